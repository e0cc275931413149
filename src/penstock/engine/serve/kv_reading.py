"""The reading side of a KV transfer: which prompts lie on other workers, their heartbeats, reads and what came of them.

The worker calls it for each request that fetches KV. From decode to prefill, the next turn of a conversation, no
heartbeats go out: its blocks have a fixed life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.engine.core.lease import HeartbeatSchedule, Read, reads_of
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.metrics import EngineMetrics
from penstock.engine.serve.notifications import Notifier, NotifyResult
from penstock.engine.serve.protocol import RemoteKv
from penstock.engine.serve.settings import ServeSettings
from penstock.engine.serve.streams import Stream


class KvReading:
    """The prompts that a worker reads from others."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        settings: ServeSettings,
        metrics: EngineMetrics,
        *,
        on_lost: Callable[[Stream, str], None],
        on_confirmed: Callable[[Stream], None],
    ) -> None:
        self._metrics = metrics
        self._ranks = settings.engine.ranks
        self._renews = settings.engine.role is EngineRole.DECODE
        self._on_lost = on_lost
        self._on_confirmed = on_confirmed
        self._heartbeats = HeartbeatSchedule(settings.engine.lease.heartbeat_interval_s)
        self._notifier = Notifier(group, self._on_notified)
        self._streams: dict[str, Stream] = {}

    @property
    def is_idle(self) -> bool:
        """Whether every message was answered."""
        return self._notifier.is_idle

    async def close(self) -> None:
        """Close the connections."""
        await self._notifier.close()

    def track(self, stream: Stream, remote: RemoteKv) -> None:
        """Renew the lease of a request's KV from now on, its time in the queue included."""
        self._streams[remote.request_id] = stream
        if self._renews:
            self._heartbeats.track(remote.engine_id, remote.request_id)

    def next_s(self) -> float | None:
        """Return when heartbeats are due, simulated seconds, or None."""
        return self._heartbeats.next_s()

    def send_due(self, now_s: float) -> None:
        """Send the heartbeats that are due: one message for each worker read from."""
        for engine_id, request_ids in self._heartbeats.due(now_s).items():
            remote = self._streams[request_ids[0]].call.remote
            if remote is not None:
                self._metrics.heartbeats_sent += 1
                self._notifier.send(remote.notify_url, engine_id, heartbeats=request_ids)

    def arrived(self, stream: Stream) -> None:
        """The KV of a request has arrived: its other copy may go, and says by its answer whether it was still held."""
        remote = stream.call.remote
        if remote is not None:
            self._heartbeats.untrack(remote.engine_id, remote.request_id)
            self._send_reads(remote)
            stream.is_read_sent = True

    def declined(self, stream: Stream) -> None:
        """A request's KV is not fetched: its other copy may go, and the request need not wait for it."""
        self.forget(stream, is_read_pending=True)
        self._on_confirmed(stream)

    def release(self, remote: RemoteKv) -> None:
        """Nobody will fetch it: its blocks may go."""
        self._send_reads(remote)

    def forget(self, stream: Stream, *, is_read_pending: bool) -> None:
        """Stop tracking a request; KV that was never fetched is announced as read, so that its blocks are freed."""
        remote = stream.call.remote
        if remote is None or self._streams.get(remote.request_id) is not stream:
            return
        if is_read_pending and not stream.is_read_sent:
            self._send_reads(remote)
        del self._streams[remote.request_id]
        self._heartbeats.untrack(remote.engine_id, remote.request_id)

    def _send_reads(self, remote: RemoteKv) -> None:
        reads: list[Read] = list(reads_of(remote.request_id, remote.ranks, self._ranks))
        self._notifier.send(remote.notify_url, remote.engine_id, reads=reads)

    def _on_notified(self, result: NotifyResult) -> None:
        if result.failed is not None:
            self._metrics.failed_notifications += 1
        for request_id in result.reads:
            stream = self._streams.get(request_id)
            if stream is None or not stream.is_read_sent:
                continue
            self.forget(stream, is_read_pending=False)
            if result.failed is not None or request_id in result.unknown:
                self._on_lost(stream, result.failed or "its lease had expired")
            else:
                self._on_confirmed(stream)
        for request_id in result.heartbeats:
            stream = self._streams.get(request_id)
            # A read that overtook this heartbeat ended the lease rightly; its own answer decides.
            if stream is not None and request_id in result.unknown and not stream.is_read_sent:
                self.forget(stream, is_read_pending=False)
                self._on_lost(stream, "its lease expired while the request waited")
