"""Notifications from a worker that reads KV to the worker that keeps it: heartbeats and completed reads, as JSON.

One POST to ``/kv/notify`` contains everything that a worker has for one keeping worker at that time. The answer names
the IDs that have no lease (any more): the blocks of these requests have been reused, so KV that was fetched from them
is invalid. vLLM's NIXL notifications have the same content as text: ``HB:id,id`` and ``id:readers``, to each agent of
an engine.
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
from penstock.engine.serve.remote_kv import RemoteKv
from penstock.engine.serve.settings import ServeSettings
from penstock.engine.serve.streams import Reply

_Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
_Row = tuple[str, _Rank, _Rank, Annotated[int, Field(ge=1, le=MAX_RANKS)]]
"""Request ID, rank that was read, rank that read it, and number of readers of that rank."""


class Notification(BaseModel):
    """One message to the process ``engine_id``; another process at the same address must not accept it.

    Attributes:
        engine_id: ID of the receiving process.
        heartbeat: IDs of requests whose leases are extended.
        read: Completed reads as rows of request ID, rank that was read, rank that read it, and number of readers of the
            rank that was read.
    """

    model_config = ConfigDict(strict=True)

    engine_id: str
    heartbeat: list[str] = Field(default=[])
    read: list[_Row] = Field(default=[])

    @property
    def reads(self) -> list[Read]:
        """Completed reads as objects of the engine's core."""
        return [Read(*row) for row in self.read]

    @property
    def ids(self) -> list[str]:
        """IDs of all prompts in the message, without duplicates."""
        return list(dict.fromkeys((*self.heartbeat, *(row[0] for row in self.read))))


def encode(engine_id: str, reads: Iterable[Read], heartbeats: Iterable[str]) -> bytes:
    """Return the body of a notification.

    Args:
        engine_id: ID of the receiving process.
        reads: Completed reads.
        heartbeats: IDs of requests whose leases are extended.
    """
    rows = [[each.request_id, each.rank, each.reader, each.readers] for each in reads]
    return orjson.dumps({"engine_id": engine_id, "read": rows, "heartbeat": list(heartbeats)})


def parse(body: bytes) -> Notification:
    """Return the notification in ``body``.

    Raises:
        ValueError: The body is not a valid notification.
    """
    try:
        return Notification.model_validate_json(body)
    except ValidationError as exc:
        raise ValueError(
            f"{findings(exc, root='body', most=1)}; a notification is engine_id, heartbeat: [request id] and "
            "read: [[request id, rank, reader, readers]]"
        ) from exc


log = get_logger(__name__)

NOTIFY_TIMEOUTS = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=5.0)
"""Timeouts in wall-clock seconds. Chosen: loopback and cluster networks answer in milliseconds, a dead worker never
does."""


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)

    unknown: frozenset[str]


@dataclass(slots=True)
class Outbox:
    """Content for one worker that has not been sent yet, for the next message.

    Attributes:
        url: URL of the worker's /kv/notify.
        reads: Completed reads.
        heartbeats: IDs of requests whose leases are extended.
    """

    url: str
    reads: list[Read] = field(default_factory=list)
    heartbeats: list[str] = field(default_factory=list)


class Notifier:
    """Sends notifications (heartbeats and completed reads) to other workers, combined into one message per worker."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._pool = ConnectionPool(tls=UNVERIFIED)
        self._outboxes: dict[str, Outbox] = {}
        self._flush: asyncio.Handle | None = None
        self._in_flight = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued and every message has been answered."""
        return not self._in_flight and not self._outboxes

    def send(
        self, url: str, engine_id: str, *, reads: Iterable[Read] = (), heartbeats: Iterable[str] = ()
    ) -> None:
        """Queue reads and heartbeats for another worker. Everything that is queued in one turn of the event loop is sent together.

        Args:
            url: URL of the worker's /kv/notify.
            engine_id: ID of the worker's process.
            reads: Completed reads.
            heartbeats: IDs of requests whose leases are extended.
        """
        outbox = self._outboxes.setdefault(engine_id, Outbox(url))
        outbox.reads += reads
        outbox.heartbeats += heartbeats
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._post_all)

    async def close(self) -> None:
        """Close the connections; queued messages are not sent."""
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
        # A read ends the lease that its heartbeat would extend; sending both would make the ID look unknown.
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
        """Process the answer to one message; subclasses implement it.

        Args:
            reads: IDs of the requests whose reads were in the message.
            heartbeats: IDs of the requests whose leases the message should extend.
            unknown: IDs of the requests that have no lease, or none any more.
            failed: Reason why the message failed; None if it was answered.
        """
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
    """The prompts whose KV a worker reads from other workers, and the messages about them to these workers."""

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
        """Send heartbeats, from now on, for the lease of the KV that a request fetches, also while the request is queued.

        Does nothing if the request fetches no KV.
        """
        remote = reply.call.remote
        if remote is None:
            return
        self._replies[remote.request_id] = reply
        if self._renews:
            self._heartbeats.track(remote.engine_id, remote.request_id)

    def next_s(self) -> float | None:
        """Return the simulated time at which the next heartbeats must be sent; None if no request needs heartbeats."""
        return self._heartbeats.next_s()

    def send_due(self, now_s: float) -> None:
        """Send the heartbeats that are due at ``now_s`` (simulated seconds): one message to each worker that keeps KV."""
        for engine_id, request_ids in self._heartbeats.due(now_s).items():
            remote = self._replies[request_ids[0]].call.remote
            if remote is not None:
                self._metrics.heartbeats_sent += 1
                self.send(remote.notify_url(self._scheme), engine_id, heartbeats=request_ids)

    def arrived(self, reply: Reply) -> None:
        """Process the arrival of a request's KV: announce the read to the worker that keeps the KV.

        The answer of that worker tells whether the lease was still valid.
        """
        remote = reply.call.remote
        if remote is not None:
            self._heartbeats.untrack(remote.engine_id, remote.request_id)
            self.release(remote)
            reply.is_read_sent = True

    def declined(self, reply: Reply) -> None:
        """Process that a request's KV is not fetched: release the KV on the other worker, and let the request continue at once."""
        self.forget(reply, is_read_pending=True)
        self._on_confirmed(reply)

    def release(self, remote: RemoteKv) -> None:
        """Announce KV as read, so that the other worker releases its blocks, also if the KV was not fetched."""
        reads = list(reads_of(remote.request_id, remote.ranks, self._ranks))
        self.send(remote.notify_url(self._scheme), remote.engine_id, reads=reads)

    def forget(self, reply: Reply, *, is_read_pending: bool) -> None:
        """Stop tracking the KV of a request and extending its lease; does nothing if the KV is not tracked.

        Args:
            reply: The request's response.
            is_read_pending: Whether KV that was not announced as read must be announced now, so that the other worker
                releases its blocks.
        """
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
        """Continue or fail the requests whose KV was read, or whose lease was extended, according to the answer."""
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
            # If a read overtook this heartbeat, the lease ended as intended; the answer to the read decides.
            if reply is not None and request_id in unknown and not reply.is_read_sent:
                self.forget(reply, is_read_pending=False)
                self._on_lost(reply, "its lease expired while the request waited")
