"""Follows the KV events that workers publish over ZMQ, as vLLM does; needs the extra ``penstock[kv-events]``.

One subscription per worker of the first stage, renewed with each new process (`kv_subscription`). Messages are three
frames: topic, batch number, and msgpack. What is no such message is counted and passed over: a worker that talks nonsense
costs hits, never a request. vLLM wrote events as arrays up to 0.23 and as maps since (its pull request 42892); batches
stayed arrays. Both are read, a batch as a map, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.core.logs import get_logger
from penstock.router.admission import Admission
from penstock.router.core.worker import WorkerSpec
from penstock.router.kv_subscription import NUMBER_BYTES, KvAddress, KvSink, KvSubscription
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import PrefixIndex
from penstock.runtimes.engine_flags import kv_replay_port

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""The first fields of each event in the order of an array."""
_MEDIA: Final = {None, "GPU"}
"""Names of the GPU's memory; any other is an offloading connector's, whose blocks come and go by themselves."""
_MEDIUM, _EXTRA_KEYS = 1, 3
"""Places after a stored block's size."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks are held; see `KvEvents.stored`. Of other memory an engine may send neither tokens nor a unit."""

    hashes: list[Any]
    parent: Any
    tokens: list[Any]
    unit: int
    is_offloaded: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are no longer held."""

    hashes: list[Any]
    is_offloaded: bool


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is held."""


@dataclass(frozen=True, slots=True)
class UnsupportedBlocks:
    """About blocks that a plain prompt cannot hit: of a salt, an adapter or an image.

    Tokens alone do not distinguish those from a plain prompt's.
    """


Event = Stored | Removed | Cleared | UnsupportedBlocks


def read_batch(batch: Any) -> list[Any] | None:
    """Return a decoded batch's events, each for `read_event`; None: it is no batch."""
    events = None
    if isinstance(batch, dict):
        events = batch.get("events")
    elif isinstance(batch, list) and len(batch) > 1:
        events = batch[1]
    return events if isinstance(events, list) else None


def read_event(event: Any) -> Event | None:
    """Return an event; None: it is none that is known."""
    match _as_array(event):
        case ["BlockStored", list(hashes), parent, list(tokens), int(unit), *rest] if _are_names(
            [*hashes, parent]
        ) and _is_medium(rest[_MEDIUM : _MEDIUM + 1]):
            if _has_extra(rest[_EXTRA_KEYS:]):
                return UnsupportedBlocks()
            return Stored(hashes, parent, tokens, unit, _is_offloaded(rest[_MEDIUM : _MEDIUM + 1]))
        case ["BlockRemoved", list(hashes), *rest] if _are_names(hashes) and _is_medium(rest[:1]):
            return Removed(hashes, _is_offloaded(rest[:1]))
        case ["AllBlocksCleared", *_]:
            return Cleared()
        case _:
            return None


def _as_array(event: Any) -> Any:
    if not isinstance(event, dict):
        return event
    kind = event.get("type")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    return None if fields is None else [kind, *(event.get(name) for name in fields)]


def _is_medium(medium: Sequence[Any]) -> bool:
    return all(each is None or isinstance(each, str) for each in medium)


def _is_offloaded(medium: Sequence[Any]) -> bool:
    return bool(medium) and medium[0] not in _MEDIA


def _has_extra(rest: Sequence[Any]) -> bool:
    return bool(rest) and isinstance(rest[0], list) and any(each is not None for each in rest[0])


def _are_names(names: Sequence[Any]) -> bool:
    """Return whether an engine's names of blocks can be looked up."""
    return all(name is None or isinstance(name, int | bytes | str) for name in names)


log = get_logger(__name__)

ENGINE_BLOCK_TOKENS = 16
"""Tokens of an engine block where the graph sets none. Source: vLLM's default."""
_FRAMES = 3
_AGAIN_REAL_S = 1.0
"""Chosen: the pause before a worker whose events broke something here is followed again."""
_TURNS = 32
"""Chosen: workers whose buffers are read at once. A thousand that do not answer hold up each other for half a minute."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """A process that is followed: which, by what, and the task that does."""

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
            admission: Knows the workers; the caches of the first stage's decide.
            index_of: A worker's prefix index; None while it takes no requests.
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

    def _connection_lost(self) -> None:
        self.gaps += 1

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
            found = read_batch(self._decode(frames[2]))
        except self._decode_errors:
            found = None
        if found is None:
            self._not_understood()
            return
        self.gaps += events.numbered(int.from_bytes(frames[1], "big"))
        for event in found:
            self._apply_one(events, event)
        self.batches += 1

    def _apply_one(self, events: KvEvents, raw: Any) -> None:
        match read_event(raw):
            case Stored(hashes, parent, tokens, unit, is_offloaded) if unit == self._engine_block_tokens:
                events.stored(hashes, parent, tokens, is_offloaded=is_offloaded)
            case Stored(hashes, is_offloaded=True):
                events.copied(hashes)
            case Removed(hashes, is_offloaded):
                events.removed(hashes, is_offloaded=is_offloaded)
            case Cleared():
                events.cleared()
            case UnsupportedBlocks():
                pass
            case _:
                self._not_understood()

    def _not_understood(self) -> None:
        if not self.malformed:
            log.warning("kv events not understood; a metric counts them from here on")
        self.malformed += 1
