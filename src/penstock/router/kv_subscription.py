"""One worker's KV events in their order: the published ones, and those replayed for a subscriber that missed them.

A router that joins asks for all that the worker's buffer still holds, one that notices a gap for what it missed.
What cannot be had again is forgotten with everything before it (`KvEvents.numbered`).

A replay is requested on a socket of its own: a number, 8 bytes, big-endian. Answered with each batch that the buffer still
holds from there on, oldest first, and a number of all ones at the end. The worker's socket drops what it cannot queue, so
that a long answer may have holes and no end: its reader requests it again from the first hole.

Source: vLLM, vllm/distributed/kv_events.py, ``ZmqEventPublisher._service_replay``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.logs import get_logger
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import PrefixIndex

log = get_logger(__name__)

NUMBER_BYTES: Final = 8
FIRST_ANSWER_S: Final = 1.0
"""Chosen: vLLM looks for questions each 0.1 s, between two batches of a busy engine."""
NEXT_ANSWER_S: Final = 0.5
"""Chosen: what comes later than this after the batch before it was dropped."""
MAX_BATCHES: Final = 1 << 17
"""Chosen: 13 times vLLM's default buffer; a worker that sends more in one answer does not end it."""
MAX_BYTES: Final = 1 << 28
"""Chosen: 256 MiB in one answer, some 60 M tokens."""
_END: Final = (1 << 8 * NUMBER_BYTES) - 1
_LAST_FRAMES: Final = 2
"""Number and payload. A topic goes before them since vLLM 0.32, and nothing did earlier."""


async def replayed(zmq: Any, context: Any, address: str, first: int) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield a worker's batches from a number >= 0 on, each with its number, until the answer ends or falls silent."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IPV6, 1)
        # Without a bound of its own the size below is the bound: what this side drops would be a hole, too.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        await socket.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
        patience_s, left_bytes = FIRST_ANSWER_S, MAX_BYTES
        for _ in range(MAX_BATCHES):
            try:
                frames = await asyncio.wait_for(socket.recv_multipart(), patience_s)
            except TimeoutError:
                return
            if len(frames) < _LAST_FRAMES or len(frames[-2]) != NUMBER_BYTES:
                return
            number, payload = int.from_bytes(frames[-2], "big"), frames[-1]
            left_bytes -= len(payload)
            if number == _END or left_bytes < 0:
                return
            patience_s = NEXT_ANSWER_S
            yield number, payload
    finally:
        socket.close(linger=0)


CATCH_UP_S: Final = 10.0
"""Chosen: meanwhile new events wait in the socket; after it the gap is taken for lost."""
_FRAMES: Final = 3


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Where a worker publishes its KV events, and answers for what it published before; None: nowhere."""

    events: str
    replay: str | None


@dataclass(frozen=True, slots=True)
class KvSink:
    """What becomes of one worker's events.

    Attributes:
        index: Returns the worker's prefix index; None while it takes no requests.
        begin: Returns the events of an index, none applied yet.
        apply: Applies one message of three frames.
        lost: Called when the connection broke.
        turns: Bounds how many workers are queried at once.
    """

    index: Callable[[], PrefixIndex | None]
    begin: Callable[[PrefixIndex], KvEvents]
    apply: Callable[[KvEvents, Sequence[bytes]], None]
    lost: Callable[[], None]
    turns: asyncio.Semaphore


class KvSubscription:
    """The events of one worker's process."""

    def __init__(self, zmq: Any, context: Any, address: KvAddress, sink: KvSink) -> None:
        self._zmq = zmq
        self._context = context
        self._address = address
        self._sink = sink
        self._index: PrefixIndex | None = None
        self._events: KvEvents | None = None
        # Published batches below this number were replayed before they were read.
        self._replayed_until = 0
        # A replay and the batch that found the gap come before any batch read later.
        self._order = asyncio.Lock()
        self._may_begin = asyncio.Event()
        self._is_connected = False

    def worker_changed(self) -> None:
        """Record that the worker may take requests from now on."""
        if self._is_connected and self._sink.index() is not self._index:
            self._may_begin.set()

    async def follow(self) -> None:
        """Apply the worker's events until cancelled."""
        zmq = self._zmq
        socket = self._context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(self._address.events)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(socket))
                group.create_task(self._watch(monitor))
                group.create_task(self._join())
        finally:
            socket.disable_monitor()
            socket.close(linger=0)

    async def _read(self, socket: Any) -> None:
        while True:
            frames = await socket.recv_multipart()
            async with self._order:
                await self._take(frames)

    async def _watch(self, monitor: Any) -> None:
        """Forget a worker's cache with its connection, and relearn it with the next.

        Numbers alone do not show a restart: a new process may reach the expected one before its first event arrives.
        """
        from zmq.utils.monitor import parse_monitor_message  # noqa: PLC0415 - an extra

        while True:
            message = parse_monitor_message(await monitor.recv_multipart())
            self._is_connected = message["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._may_begin.set()
                continue
            self._events = self._index = None
            index = self._sink.index()
            if index is not None:
                index.clear()
                self._sink.lost()

    async def _join(self) -> None:
        while True:
            await self._may_begin.wait()
            self._may_begin.clear()
            async with self._order:
                await self._begin()

    async def _begin(self) -> KvEvents | None:
        """Return the events of the worker's index, which are caught up with where it is a new one."""
        index = self._sink.index()
        if index is None:
            self._events = self._index = None
        elif self._events is None or index is not self._index:
            # A worker that joins again begins with an empty index and no known blocks.
            self._index, self._events, self._replayed_until = index, self._sink.begin(index), 0
            await self._catch_up(self._events)
        return self._events

    async def _take(self, frames: Sequence[bytes]) -> None:
        events = await self._begin()
        if events is None:
            return
        number = _number(frames)
        if number is not None and events.expected is not None and number > events.expected:
            await self._catch_up(events)
        if number is not None and number < self._replayed_until:
            return
        if self._events is events:
            self._replayed_until = 0
            self._sink.apply(events, frames)

    async def _catch_up(self, events: KvEvents) -> None:
        """Apply what the worker replays from the expected batch on; what cannot be had shows with the next number."""
        if self._address.replay is None:
            return
        async with self._sink.turns:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_S):
                    while await self._ask(events, self._address.replay):
                        log.debug("kv events asked for again", address=self._address.replay)

    async def _ask(self, events: KvEvents, address: str) -> bool:
        """Apply one answer in its order; return whether to ask again, since it had a hole after it had begun."""
        has_begun = False
        async with contextlib.aclosing(
            replayed(self._zmq, self._context, address, events.expected or 0)
        ) as answer:
            async for number, payload in answer:
                if self._events is not events:
                    return False
                if has_begun and number != events.expected:
                    return True
                has_begun = True
                self._sink.apply(events, (b"", number.to_bytes(NUMBER_BYTES, "big"), payload))
                if events.expected != number + 1:
                    return False
                self._replayed_until = number + 1
                # What has already arrived is read without waiting; requests go on in between.
                await asyncio.sleep(0)
        return False


def _number(frames: Sequence[bytes]) -> int | None:
    if len(frames) != _FRAMES or len(frames[1]) != NUMBER_BYTES:
        return None
    return int.from_bytes(frames[1], "big")
