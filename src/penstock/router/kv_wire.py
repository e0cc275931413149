"""Reads one batch of KV events as engines send it; `KvListener` applies what comes out. Pure.

vLLM wrote events as arrays up to 0.23 and as maps since (its pull request 42892); batches stayed arrays. Both are
read, a batch as a map, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

    Tokens alone do not tell those apart from a plain prompt's.
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
