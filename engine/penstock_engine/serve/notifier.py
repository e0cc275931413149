"""Tells prefill workers that their blocks were read, or are still wanted; a decode worker's worker calls it.

One POST to ``/kv/notify`` per prefill worker and wake-up carries all its reads and heartbeats. The answer
names ids without a lease: their blocks are gone, so what was fetched from them is void.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import orjson

from penstock_core.errors import PenstockError, StreamBroken
from penstock_core.logs import get_logger
from penstock_wire.client import ConnectionPool, Timeouts

log = get_logger(__name__)

NOTIFY_TIMEOUTS = Timeouts(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=5.0)
"""Real seconds; chosen: loopback and cluster networks answer in milliseconds, a dead worker never."""


@dataclass(frozen=True, slots=True)
class NotifyResult:
    """What became of one message.

    Attributes:
        reads, heartbeats: The ids it carried.
        unknown: Those of them that hold no lease any more.
        failed: Why it did not arrive, or None.
    """

    reads: list[str]
    heartbeats: list[str]
    unknown: frozenset[str] = frozenset()
    failed: str | None = None


@dataclass(slots=True)
class Outbox:
    """Messages to one prefill worker that have not been sent."""

    reads: list[str] = field(default_factory=list)
    heartbeats: list[str] = field(default_factory=list)


class Notifier:
    """Sends batches; results come back through a callback."""

    def __init__(self, group: asyncio.TaskGroup, on_result: Callable[[NotifyResult], None]) -> None:
        self._group = group
        self._on_result = on_result
        self._pool = ConnectionPool()
        self._outboxes: dict[str, Outbox] = {}
        self._flush: asyncio.Handle | None = None
        self._in_flight = 0

    @property
    def is_idle(self) -> bool:
        """Whether every message was answered."""
        return not self._in_flight and not self._outboxes

    def send(self, url: str, *, reads: Iterable[str] = (), heartbeats: Iterable[str] = ()) -> None:
        """Queue ids for ``url``; what one turn of the event loop queues travels together."""
        outbox = self._outboxes.setdefault(url, Outbox())
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
        for url, outbox in outboxes.items():
            self._in_flight += 1
            self._group.create_task(self._post(url, outbox))

    async def _post(self, url: str, outbox: Outbox) -> None:
        # A read ends the lease that its heartbeat would renew; naming both would make the id look unknown.
        read = frozenset(outbox.reads)
        outbox.heartbeats = [request_id for request_id in outbox.heartbeats if request_id not in read]
        body = orjson.dumps({"read": outbox.reads, "heartbeat": outbox.heartbeats})
        try:
            result = await self._exchange(url, body, outbox)
        except PenstockError as exc:
            log.warning("prefill worker did not take a notification", url=url, error=str(exc))
            result = NotifyResult(outbox.reads, outbox.heartbeats, failed=str(exc))
        finally:
            self._in_flight -= 1
        self._on_result(result)

    async def _exchange(self, url: str, body: bytes, outbox: Outbox) -> NotifyResult:
        headers = ((b"content-type", b"application/json"),)
        response = await self._pool.request("POST", url, body=body, headers=headers, timeouts=NOTIFY_TIMEOUTS)
        if response.status != 200:
            raise StreamBroken(f"{url} answered {response.status}")
        return NotifyResult(outbox.reads, outbox.heartbeats, frozenset(_unknown(response.body, url)))


def _unknown(body: bytes, url: str) -> list[str]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise StreamBroken(f"{url} answered with something else than JSON") from exc
    unknown = answer.get("unknown") if isinstance(answer, Mapping) else None
    if not isinstance(unknown, list):
        raise StreamBroken(f"{url} answered without the list `unknown`")
    return unknown
