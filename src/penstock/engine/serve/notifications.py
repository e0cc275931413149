"""What the reading worker sends to the one that keeps the blocks: heartbeats and completed reads, as JSON.

One POST to ``/kv/notify`` per worker read from and wake-up carries all of them. The answer names ids without a lease:
their blocks are gone, so what was fetched from them is void.
vLLM's NIXL notifications say the same in text: ``HB:id,id`` and ``id:readers``, to each agent of an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.core.errors import PenstockError, StreamBroken
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.http.tls import UNVERIFIED
from penstock.core.logs import get_logger
from penstock.core.validation import findings
from penstock.engine.core.lease import MAX_RANKS, HeartbeatSchedule, Read, reads_of
from penstock.engine.serve.metrics import EngineMetrics
from penstock.engine.serve.protocol import RemoteKv
from penstock.engine.serve.settings import ServeSettings
from penstock.engine.serve.streams import Reply

_Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
_Row = tuple[str, _Rank, _Rank, Annotated[int, Field(ge=1, le=MAX_RANKS)]]
"""Request id, rank read from, rank that read, readers of the former."""


class Notification(BaseModel):
    """One message to the process ``engine_id``; another one at the same address must not take it."""

    model_config = ConfigDict(strict=True)

    engine_id: str
    heartbeat: list[str] = Field(default=[])
    read: list[_Row] = Field(default=[])

    @property
    def reads(self) -> list[Read]:
        """Completed reads as the core takes them."""
        return [Read(*row) for row in self.read]

    @property
    def ids(self) -> list[str]:
        """Every prompt named, once."""
        return list(dict.fromkeys((*self.heartbeat, *(row[0] for row in self.read))))


def encode(engine_id: str, reads: Iterable[Read], heartbeats: Iterable[str]) -> bytes:
    """Return a message's body."""
    rows = [[each.request_id, each.rank, each.reader, each.readers] for each in reads]
    return orjson.dumps({"engine_id": engine_id, "read": rows, "heartbeat": list(heartbeats)})


def parse(body: bytes) -> Notification:
    """Return the message in ``body``."""
    try:
        return Notification.model_validate_json(body)
    except ValidationError as exc:
        raise ValueError(
            f"{findings(exc, root='body', most=1)}; a notification is engine_id, heartbeat: [request id] and "
            "read: [[request id, rank, reader, readers]]"
        ) from exc


log = get_logger(__name__)

NOTIFY_TIMEOUTS = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=5.0)
"""Real seconds; chosen: loopback and cluster networks answer in milliseconds, a dead worker never."""


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)

    unknown: frozenset[str]


@dataclass(slots=True)
class Outbox:
    """Messages to one worker that have not been sent."""

    url: str
    reads: list[Read] = field(default_factory=list)
    heartbeats: list[str] = field(default_factory=list)


class Notifier:
    """Sends batches of messages to other workers."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._pool = ConnectionPool(tls=UNVERIFIED)
        self._outboxes: dict[str, Outbox] = {}
        self._flush: asyncio.Handle | None = None
        self._in_flight = 0

    @property
    def is_idle(self) -> bool:
        """Whether every message was answered."""
        return not self._in_flight and not self._outboxes

    def send(
        self, url: str, engine_id: str, *, reads: Iterable[Read] = (), heartbeats: Iterable[str] = ()
    ) -> None:
        """Queue reads and heartbeats for the process ``engine_id`` at ``url``; what one turn queues travels together."""
        outbox = self._outboxes.setdefault(engine_id, Outbox(url))
        outbox.reads += reads
        outbox.heartbeats += heartbeats
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._post_all)

    async def close(self) -> None:
        """Close the connections."""
        if self._flush is not None:
            self._flush.cancel()
        await self._pool.close()

    def _post_all(self) -> None:
        self._flush = None
        outboxes, self._outboxes = self._outboxes, {}
        for engine_id, outbox in outboxes.items():
            self._in_flight += 1
            self._group.create_task(self._post(engine_id, outbox))

    async def _post(self, engine_id: str, outbox: Outbox) -> None:
        reads = list(dict.fromkeys(read.request_id for read in outbox.reads))
        # A read ends the lease that its heartbeat would renew; naming both would make the id look unknown.
        ended = frozenset(reads)
        heartbeats = [request_id for request_id in outbox.heartbeats if request_id not in ended]
        body = encode(engine_id, outbox.reads, heartbeats)
        unknown, failed = frozenset[str](), None
        try:
            unknown = await self._round_trip(outbox.url, body)
        except PenstockError as exc:
            failed = str(exc)
            log.warning("worker did not take a notification", url=outbox.url, error=failed)
        finally:
            self._in_flight -= 1
        self.answered(reads, heartbeats, unknown, failed)

    def answered(
        self, reads: list[str], heartbeats: list[str], unknown: frozenset[str], failed: str | None
    ) -> None:
        """Take the ids that one message named, those of them without a lease, and why it failed, or None."""
        raise NotImplementedError

    async def _round_trip(self, url: str, body: bytes) -> frozenset[str]:
        headers = ((b"content-type", b"application/json"),)
        response = await self._pool.request("POST", url, body=body, headers=headers, timeouts=NOTIFY_TIMEOUTS)
        if response.status != 200:
            raise StreamBroken(f"{url} answered {response.status}")
        try:
            return _Answer.model_validate_json(response.body).unknown
        except ValidationError as exc:
            raise StreamBroken(f"{url} answered without the list `unknown` of request ids") from exc


class KvReading(Notifier):
    """The prompts that a worker reads from others."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        settings: ServeSettings,
        metrics: EngineMetrics,
        *,
        on_lost: Callable[[Reply, str], None],
        on_confirmed: Callable[[Reply], None],
    ) -> None:
        super().__init__(group)
        self._metrics = metrics
        self._ranks = settings.engine.ranks
        self._scheme = settings.scheme
        self._renews = settings.engine.role.fetches
        self._on_lost = on_lost
        self._on_confirmed = on_confirmed
        self._heartbeats = HeartbeatSchedule(settings.engine.lease.heartbeat_interval_s)
        self._replies: dict[str, Reply] = {}

    def track(self, reply: Reply) -> None:
        """Renew the lease of the KV that a request fetches, if any, from now on, its time in the queue included."""
        remote = reply.call.remote
        if remote is None:
            return
        self._replies[remote.request_id] = reply
        if self._renews:
            self._heartbeats.track(remote.engine_id, remote.request_id)

    def next_s(self) -> float | None:
        """Return when heartbeats are due, simulated seconds, or None."""
        return self._heartbeats.next_s()

    def send_due(self, now_s: float) -> None:
        """Send the heartbeats that are due: one message for each worker read from."""
        for engine_id, request_ids in self._heartbeats.due(now_s).items():
            remote = self._replies[request_ids[0]].call.remote
            if remote is not None:
                self._metrics.heartbeats_sent += 1
                self.send(remote.notify_url(self._scheme), engine_id, heartbeats=request_ids)

    def arrived(self, reply: Reply) -> None:
        """The KV of a request has arrived: its other copy may go, and says by its answer whether it was still held."""
        remote = reply.call.remote
        if remote is not None:
            self._heartbeats.untrack(remote.engine_id, remote.request_id)
            self.release(remote)
            reply.is_read_sent = True

    def declined(self, reply: Reply) -> None:
        """A request's KV is not fetched: its other copy may go, and the request need not wait for it."""
        self.forget(reply, is_read_pending=True)
        self._on_confirmed(reply)

    def release(self, remote: RemoteKv) -> None:
        """Announce KV that was read, or will not be fetched, as read: its blocks may go."""
        reads = list(reads_of(remote.request_id, remote.ranks, self._ranks))
        self.send(remote.notify_url(self._scheme), remote.engine_id, reads=reads)

    def forget(self, reply: Reply, *, is_read_pending: bool) -> None:
        """Stop tracking a request; KV that was never fetched is announced as read, so that its blocks are freed."""
        remote = reply.call.remote
        if remote is None or self._replies.get(remote.request_id) is not reply:
            return
        if is_read_pending and not reply.is_read_sent:
            self.release(remote)
        del self._replies[remote.request_id]
        self._heartbeats.untrack(remote.engine_id, remote.request_id)

    def answered(
        self, reads: list[str], heartbeats: list[str], unknown: frozenset[str], failed: str | None
    ) -> None:
        """Let the answer decide about requests whose KV was read, or is still held for them."""
        self._metrics.failed_notifications += failed is not None
        for request_id in reads:
            reply = self._replies.get(request_id)
            if reply is None or not reply.is_read_sent:
                continue
            self.forget(reply, is_read_pending=False)
            if failed is not None or request_id in unknown:
                self._on_lost(reply, failed or "its lease had expired")
            else:
                self._on_confirmed(reply)
        for request_id in heartbeats:
            reply = self._replies.get(request_id)
            # A read that overtook this heartbeat ended the lease rightly; its own answer decides.
            if reply is not None and request_id in unknown and not reply.is_read_sent:
                self.forget(reply, is_read_pending=False)
                self._on_lost(reply, "its lease expired while the request waited")
