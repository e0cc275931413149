"""What changes in a worker's KV cache, in order; the pool and the batcher write it, a publisher takes it. Pure.

Blocks of generated tokens are left out: their keys are the engine's own, so no prompt can ever hit them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.engine.core.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that a later request may reuse from now on.

    Attributes:
        keys: Consecutive blocks of one prompt.
        parent: Key of the block before them; None: they begin the prompt.
        tokens: Their token ids, packed into 4 bytes each.
    """

    keys: tuple[int, ...]
    parent: int | None
    tokens: bytes


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks whose content was given up for others.

    Attributes:
        keys: In the order of their eviction.
    """

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks were given up at once."""


KvFact = BlocksStored | BlocksRemoved | CacheCleared


class KvJournal:
    """The changes since somebody last took them."""

    __slots__ = ("_block_size", "_facts", "_removed")

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self._block_size = block_size
        self._facts: list[KvFact] = []
        self._removed: list[int] = []

    def stored(self, request: EngineRequest, places: Sequence[int]) -> None:
        """Note blocks of a prompt under their places in it, ascending; neighbours go into one fact."""
        self._end_removals()
        keys, start = request.block_keys, 0
        for number, place in enumerate(places, 1):
            if number < len(places) and places[number] == place + 1:
                continue
            first, end = places[start], place + 1
            width = self._block_size * BYTES_PER_TOKEN
            parent = keys[first - 1] if first else None
            tokens = request.prompt[first * width : end * width]
            self._facts.append(BlocksStored(tuple(keys[first:end]), parent, tokens))
            start = number

    def removed(self, key: int) -> None:
        """Note an evicted block; negative keys are those of generated tokens."""
        if key >= 0:
            self._removed.append(key)

    def cleared(self) -> None:
        """Note that nothing is cached any more; what was noted before no longer matters."""
        self._removed.clear()
        self._facts = [CacheCleared()]

    def take(self) -> list[KvFact]:
        """Return the changes, oldest first, and forget them."""
        self._end_removals()
        facts, self._facts = self._facts, []
        return facts

    def _end_removals(self) -> None:
        if self._removed:
            self._facts.append(BlocksRemoved(tuple(self._removed)))
            self._removed.clear()
