"""Follows the KV events that workers publish over ZMQ, as vLLM does; needs the extra ``penstock[kv-events]``.

One subscription per worker of the first stage, renewed with each new process (`kv_subscription`). Messages are three
frames: topic, batch number, and msgpack. What is no such message is counted and passed over: a worker that talks nonsense
costs hits, never a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.core.logs import get_logger
from penstock.router.admission import Admission
from penstock.router.core.worker import WorkerSpec
from penstock.router.kv_subscription import NUMBER_BYTES, KvAddress, KvSink, KvSubscription
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import PrefixIndex
from penstock.runtimes.engine_flags import kv_replay_port

log = get_logger(__name__)

ENGINE_BLOCK_TOKENS = 16
"""Tokens of an engine block where the graph sets none. Source: vLLM's default."""
_FRAMES = 3
_AGAIN_REAL_S = 1.0
"""Chosen: the pause before a worker whose events broke something here is followed again."""
_TURNS = 32
"""Chosen: workers whose buffers are read at once. A thousand that do not answer hold up each other for half a minute."""


class _Followed(NamedTuple):
    process: tuple[KvAddress, str]
    subscription: KvSubscription
    task: asyncio.Task[None]


class KvListener:
    """All subscriptions of one router.

    Attributes:
        batches: Applied so far.
        gaps: How often a worker's batches were lost for good, or its connection broke, and its cache was forgotten.
        malformed: Messages and events that were none.
    """

    def __init__(
        self,
        admission: Admission,
        index_of: Callable[[str], PrefixIndex | None],
        *,
        port: int,
        engine_block_tokens: int = ENGINE_BLOCK_TOKENS,
    ) -> None:
        """Prepare; nothing is connected before `start`.

        Args:
            admission: Knows the workers.
            index_of: Returns a worker's prefix index; None while it takes no requests.
            port: On which workers publish whose discovery names no port of their own.
            engine_block_tokens: Tokens of an engine block.

        Raises:
            ConfigError: a library is not installed.
        """
        try:
            import msgspec  # noqa: PLC0415 - an extra
            import zmq.asyncio  # noqa: PLC0415 - only needed with events
        except ImportError as exc:
            raise ConfigError(
                f"router.kvEventsPort: needs the package {exc.name}; pip install 'penstock[kv-events]'"
            ) from exc
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.decode
        self._decode_errors = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
        self._zmq = zmq
        self._context: Any = None
        self._admission = admission
        self._pool = admission.core.pool
        self._role = admission.core.entry
        self._index_of = index_of
        self._port = port
        self._engine_block_tokens = engine_block_tokens
        self._followed: dict[str, _Followed] = {}
        self._turns = asyncio.Semaphore(_TURNS)
        # The context may end only after the last socket, so those of cancelled tasks are waited for, too.
        self._running: set[asyncio.Task[None]] = set()
        self.batches = 0
        self.gaps = 0
        self.malformed = 0

    def start(self) -> None:
        """Follow the workers from now on."""
        self._context = self._zmq.asyncio.Context()
        self._admission.on_change(self._workers_changed)
        self._workers_changed()

    async def close(self) -> None:
        """End all subscriptions."""
        context, self._context = self._context, None
        self._followed = {}
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if context is not None:
            context.destroy(linger=0)

    def _workers_changed(self) -> None:
        if self._context is None:
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
            self._followed[name].subscription.worker_changed()

    def _follow(self, name: str, process: tuple[KvAddress, str]) -> _Followed:
        sink = KvSink(
            index=lambda: self._index_of(name),
            begin=lambda index: KvEvents(index, engine_block_tokens=self._engine_block_tokens),
            apply=self.apply,
            lost=self._connection_lost,
            turns=self._turns,
        )
        subscription = KvSubscription(self._zmq, self._context, process[0], sink)
        task = asyncio.create_task(self._follow_on(name, subscription), name=f"kv events {name}")
        log.debug("kv events followed", worker=name, address=process[0].events)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return _Followed(process, subscription, task)

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
        # Of an IPv6 address `hostname` drops the brackets, which separate it from the port.
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return KvAddress(f"tcp://{host}:{self._port}", f"tcp://{host}:{kv_replay_port(self._port)}")

    def blocks(self) -> dict[str, int]:
        """Return the prefix blocks that each worker is believed to hold, for workers that take requests."""
        found = {name: self._index_of(name) for name in self._followed}
        return {name: index.count for name, index in found.items() if index is not None}

    def apply(self, events: KvEvents, frames: Sequence[bytes]) -> None:
        """Apply one message; anything that is none is counted."""
        if len(frames) != _FRAMES or len(frames[1]) != NUMBER_BYTES:
            self._not_understood()
            return
        try:
            batch = self._decode(frames[2])
        except self._decode_errors:
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

    def _connection_lost(self) -> None:
        self.gaps += 1
