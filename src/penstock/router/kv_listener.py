"""Receives the KV events that workers publish over ZMQ, like vLLM's; needs the extra ``penstock[kv-events]``.

There is one subscription per worker of the first stage, which is renewed with each new process. Messages have three frames:
topic, batch number, and msgpack. Other messages are counted and ignored: they cost cache hits, but never a request.

A router that joins requests all batches that the worker's buffer still contains; a router that notices a gap requests the
batches that it missed. If these are no longer available, the worker's index is cleared (`KvEvents.numbered`). A replay is
requested on a separate socket by its first number, 8 bytes, big-endian; the response is the batches from there on, then a
number of all ones. The worker's socket drops what it cannot queue, so a long response can have gaps and no end: it is
requested again from the first gap.

Source: vLLM, vllm/distributed/kv_events.py, ``ZmqEventPublisher._service_replay``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.http.own_lag import PatientTimeout
from penstock.core.logs import get_logger
from penstock.router.admission import Admission
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import PrefixIndex
from penstock.runtimes.engine_flags import kv_replay_port

log = get_logger(__name__)

ENGINE_BLOCK_TOKENS: Final = 16
"""Number of tokens per engine block if the graph sets none. Source: vLLM's default."""
_FRAMES: Final = 3
_AGAIN_REAL_S: Final = 1.0
"""Chosen: pause before a worker whose events caused an error here is followed again."""
_TURNS: Final = 32
"""Chosen: number of workers whose buffers are read at once. A thousand workers that do not answer delay each other by half a
minute."""
CATCH_UP_S: Final = 10.0
"""Maximum duration of a replay in real seconds. Chosen: new events wait in the socket meanwhile; after it the gap counts as lost."""
NUMBER_BYTES: Final = 8
"""Size of a batch number."""
FIRST_ANSWER_S: Final = 1.0
"""Maximum wait for the first batch of a replay in real seconds. Chosen: vLLM checks for requests every 0.1 s, between two batches
of a busy engine."""
NEXT_ANSWER_S: Final = 0.5
"""Maximum wait for the next batch of a replay in real seconds. Chosen: a batch that is later than this was dropped."""
MAX_BATCHES: Final = 1 << 17
"""Maximum number of batches in a replay. Chosen: 13 times vLLM's default buffer; a worker that sends more does not end its
response."""
MAX_BYTES: Final = 1 << 28
"""Maximum size of a replay. Chosen: 256 MiB, about 60 M tokens."""
_END: Final = (1 << 8 * NUMBER_BYTES) - 1
_LAST_FRAMES: Final = 2
"""Number and payload. A topic precedes them since vLLM 0.32; in earlier versions there is none."""


async def replayed(zmq: Any, context: Any, address: str, first: int) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield a worker's earlier batches of KV events from number ``first`` (>= 0) on, each as its number and its bytes.

    The iteration ends when the worker's response ends or times out.

    Args:
        zmq: The module ``zmq.asyncio``.
        context: ZMQ context.
        address: The worker's replay endpoint.
        first: Number of the first batch.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IPV6, 1)
        # The socket has no limit of its own, because messages that it drops would be gaps, too; the size below is the limit.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        await socket.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
        patience_s, left_bytes = FIRST_ANSWER_S, MAX_BYTES
        for _ in range(MAX_BATCHES):
            try:
                async with PatientTimeout(patience_s):
                    frames = await socket.recv_multipart()
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


class KvAddress(NamedTuple):
    """Endpoints of a worker's KV events.

    Attributes:
        events: Endpoint at which the worker publishes events.
        replay: Endpoint at which it replays earlier events; None if it has none.
    """

    events: str
    replay: str | None


class KvSubscription:
    """The subscription to the KV events (blocks stored in or removed from the cache) of one worker process.

    ``listener`` contains all subscriptions of the router, and ``name`` is the worker's name.

    Attributes:
        process: The worker's endpoints and the identifier of its process (`WorkerSpec.incarnation`); together they identify
            the process.
        task: Task that runs the subscription.
    """

    def __init__(self, listener: KvListener, name: str, process: tuple[KvAddress, str]) -> None:
        self.process = process
        self._address, _ = process
        self._listener = listener
        self._name = name
        self.task: asyncio.Task[None]
        self._index: PrefixIndex | None = None
        self._events: KvEvents | None = None
        # Published batches with lower numbers than this have been replayed already.
        self._replayed_until = 0
        # A replay, and the batch that revealed the gap, must be applied before any batch that is read later.
        self._order = asyncio.Lock()
        self._may_begin = asyncio.Event()
        self._is_connected = False

    def worker_changed(self) -> None:
        """Record that the set of workers has changed.

        If this subscription's worker can be sent requests now, and could not before, its cached blocks are learned from
        its events.
        """
        if self._is_connected and self._listener.index_of(self._name) is not self._index:
            self._may_begin.set()

    async def follow(self) -> None:
        """Receive the worker's KV events and apply them to its prefix index (assumed cache contents), until cancelled."""
        zmq = self._listener.zmq
        socket = self._listener.context.socket(zmq.SUB)
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
        """Clear a worker's index when its connection is lost, and learn its contents again with the next connection.

        Batch numbers alone do not reveal a restart: a new process can reach the expected number before its first event
        arrives.
        """
        from zmq.utils.monitor import parse_monitor_message  # noqa: PLC0415 - an extra

        while True:
            message = parse_monitor_message(await monitor.recv_multipart())
            self._is_connected = message["event"] == self._listener.zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._may_begin.set()
                continue
            self._events = self._index = None
            index = self._listener.index_of(self._name)
            if index is not None:
                index.clear()
                self._listener.gaps += 1

    async def _join(self) -> None:
        while True:
            await self._may_begin.wait()
            self._may_begin.clear()
            async with self._order:
                await self._begin()

    async def _begin(self) -> KvEvents | None:
        """Return the `KvEvents` of the worker's present index; if the index is new, earlier events are replayed first.

        Returns None if the worker is not eligible.
        """
        index = self._listener.index_of(self._name)
        if index is None:
            self._events = self._index = None
        elif self._events is None or index is not self._index:
            # A worker that joins again starts with an empty index and no known blocks.
            self._index, self._events, self._replayed_until = index, self._listener.begin(index), 0
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
            self._listener.apply(events, frames)

    async def _catch_up(self, events: KvEvents) -> None:
        """Apply the batches that the worker replays, starting with the expected one.

        Batches that are no longer available are detected by the next number.
        """
        if self._address.replay is None:
            return
        async with self._listener.turns:
            with contextlib.suppress(TimeoutError):
                async with PatientTimeout(CATCH_UP_S):
                    while await self._ask(events, self._address.replay):
                        log.debug("kv events asked for again", address=self._address.replay)

    async def _ask(self, events: KvEvents, address: str) -> bool:
        """Apply one replay in order; return whether to request it again, because there was a gap after its first batch."""
        has_begun = False
        answers = replayed(self._listener.zmq, self._listener.context, address, events.expected or 0)
        async with contextlib.aclosing(answers) as answer:
            async for number, payload in answer:
                if self._events is not events:
                    return False
                if has_begun and number != events.expected:
                    return True
                has_begun = True
                self._listener.apply(events, (b"", number.to_bytes(NUMBER_BYTES, "big"), payload))
                if events.expected != number + 1:
                    return False
                self._replayed_until = number + 1
                # Batches that have already arrived are read without waiting, so let other tasks run in between.
                await asyncio.sleep(0)
        return False


def _number(frames: Sequence[bytes]) -> int | None:
    if len(frames) != _FRAMES or len(frames[1]) != NUMBER_BYTES:
        return None
    return int.from_bytes(frames[1], "big")


class KvListener:
    """All subscriptions of one router to the KV events of its workers, by which it knows what each worker has cached.

    A KV event reports blocks that were stored in, or removed from, a worker's cache. A worker is eligible if it can be sent
    requests now.

    Attributes:
        zmq: The module ``zmq.asyncio``.
        context: ZMQ context; None before `start` and after `close`.
        index_of: Returns the prefix index of a worker by name; None while it is not eligible.
        turns: Limits the number of replays at a time.
        batches: Cumulative number of applied batches.
        gaps: Cumulative number of times that a worker's index was cleared, because batches were lost or its connection broke.
        malformed: Cumulative number of messages and events that were not understood.
    """

    def __init__(
        self,
        admission: Admission,
        index_of: Callable[[str], PrefixIndex | None],
        *,
        port: int,
        engine_block_tokens: int = ENGINE_BLOCK_TOKENS,
    ) -> None:
        """Create the listener; nothing is connected before `start`.

        Args:
            admission: Reports changes of the workers.
            index_of: Returns the prefix index of a worker by name; None while it is not eligible.
            port: Port on which workers publish, unless their discovery data contain an endpoint.
            engine_block_tokens: Number of tokens per engine block.

        Raises:
            ConfigError: pyzmq is not installed.
        """
        try:
            import zmq.asyncio  # noqa: PLC0415 - an extra
        except ImportError as exc:
            raise ConfigError(
                f"router.kvEventsPort: needs the package {exc.name}; pip install 'penstock[kv-events]'"
            ) from exc
        self.zmq = zmq
        self.context: Any = None
        self._admission = admission
        self._pool = admission.core.pool
        self._role = admission.core.entry
        self.index_of = index_of
        self._port = port
        self._engine_block_tokens = engine_block_tokens
        self._followed: dict[str, KvSubscription] = {}
        self.turns = asyncio.Semaphore(_TURNS)
        # The context can only be closed after the last socket, so cancelled tasks are waited for as well.
        self._running: set[asyncio.Task[None]] = set()
        self.batches = 0
        self.gaps = 0
        self.malformed = 0

    def start(self) -> None:
        """Subscribe to the workers' events from now on."""
        self.context = self.zmq.asyncio.Context()
        self._admission.on_change(self._workers_changed)
        self._workers_changed()

    async def close(self) -> None:
        """End all subscriptions."""
        context, self.context = self.context, None
        self._followed = {}
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if context is not None:
            context.destroy(linger=0)

    def _workers_changed(self) -> None:
        if self.context is None:
            return
        wanted = {
            each.name: (self._address(each.spec), each.spec.incarnation)
            for each in self._pool
            if each.spec.role is self._role
        }
        for name in [name for name, each in self._followed.items() if wanted.get(name) != each.process]:
            self._followed.pop(name).task.cancel()
        for name, process in wanted.items():
            if name not in self._followed:
                self._followed[name] = self._follow(name, process)
            self._followed[name].worker_changed()

    def _follow(self, name: str, process: tuple[KvAddress, str]) -> KvSubscription:
        subscription = KvSubscription(self, name, process)
        task = asyncio.create_task(self._follow_on(name, subscription), name=f"kv events {name}")
        log.debug("kv events followed", worker=name, address=process[0].events)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        subscription.task = task
        return subscription

    async def _follow_on(self, name: str, subscription: KvSubscription) -> None:
        while True:
            try:
                await subscription.follow()
            except Exception:  # root of the task: what one worker sends must not end its subscription
                log.exception("kv events not applied; following again", worker=name)
                self.malformed += 1
            await asyncio.sleep(_AGAIN_REAL_S)

    def _address(self, spec: WorkerSpec) -> KvAddress:
        if spec.kv_events is not None:
            return KvAddress(spec.kv_events, spec.kv_replay)
        parts = urlsplit(spec.url)
        # `hostname` drops the brackets of an IPv6 address, which separate it from the port.
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return KvAddress(f"tcp://{host}:{self._port}", f"tcp://{host}:{kv_replay_port(self._port)}")

    def blocks(self) -> dict[str, int]:
        """Return the number of prefix blocks that each worker is assumed to have cached, by name.

        Only workers that can be sent requests now are included.
        """
        found = {name: self.index_of(name) for name in self._followed}
        return {name: index.count for name, index in found.items() if index is not None}

    def apply(self, events: KvEvents, frames: Sequence[bytes]) -> None:
        """Apply one ZMQ message with a batch of a worker's KV events to the worker's prefix index (assumed cache contents).

        Whatever is not understood is left out, and counted in `malformed`.

        Args:
            events: Object that applies the worker's events to its prefix index.
            frames: Frames of the message: topic, number of the batch (8 bytes), and the batch in MessagePack.
        """
        if len(frames) != _FRAMES or len(frames[1]) != NUMBER_BYTES:
            self._not_understood()
            return
        try:
            batch = msgspec.msgpack.decode(frames[2])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
            # TypeError: msgspec hashes the keys of maps, before 0.22 without a check.
            batch = None
        # vLLM's batches are arrays; one as a map is read, too.
        if isinstance(batch, dict):
            found = batch.get("events")
        else:
            found = batch[1] if isinstance(batch, list) and len(batch) > 1 else None
        if not isinstance(found, list):
            self._not_understood()
            return
        self.gaps += events.numbered(int.from_bytes(frames[1], "big"))
        for event in found:
            if not events.apply(event):
                self._not_understood()
        self.batches += 1

    def _not_understood(self) -> None:
        if not self.malformed:
            log.warning("kv events not understood; a metric counts them from here on")
        self.malformed += 1

    def begin(self, index: PrefixIndex) -> KvEvents:
        """Return a new object that applies the KV events of one worker to ``index``, the worker's prefix index (assumed cache).

        Called for each new subscription, because the known blocks and the number of the last batch start again with it.
        """
        return KvEvents(index, engine_block_tokens=self._engine_block_tokens)
