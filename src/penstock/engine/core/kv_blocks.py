"""Paged KV blocks with reference counts, a prefix cache, its keys and the journal of its changes.

A block is in use (referenced by at least one request), idle (unreferenced, its content still keyed, so a
later request may take it back) or blank. Blank blocks are handed out first, then idle ones from the least
recently used. Every operation is O(1) per block touched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.engine.core.requests import EngineRequest


def count_tokens(prompt: bytes) -> int:
    """Return the number of simulated tokens in ``prompt``; a partial last token counts as one."""
    return -(-len(prompt) // BYTES_PER_TOKEN)


def prefix_keys(prompt: bytes, block_size: int, *, seed: int = 0) -> list[int]:
    """Return one chained 64-bit key per full block of ``prompt``; prompts of two seeds share none."""
    width = block_size * BYTES_PER_TOKEN
    digest = xxhash.xxh3_64_intdigest
    keys = []
    key = seed
    for start in range(0, count_tokens(prompt) // block_size * width, width):
        key = digest(prompt[start : start + width], key)
        keys.append(key)
    return keys


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one prompt that may be reused.

    Attributes:
        parent: Key before them; None: they begin the prompt.
        tokens: Their token ids, 4 bytes each.
        adapter: The LoRA adapter that computed them, for whose prompts alone they may be reused; None: the model itself.
    """

    keys: tuple[int, ...]
    parent: int | None
    tokens: bytes
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks whose content was given up for others."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks were given up at once."""


KvFact = BlocksStored | BlocksRemoved | CacheCleared


class KvJournal:
    """The changes since they were last taken."""

    def __init__(self, block_size: int) -> None:
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
            self._facts.append(BlocksStored(tuple(keys[first:end]), parent, tokens, request.adapter))
            start = number

    def removed(self, key: int) -> None:
        """Note an evicted block; negative keys are those of generated tokens."""
        if key >= 0:
            self._removed.append(key)

    def cleared(self) -> None:
        """Record that the cache is empty; earlier records no longer matter."""
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


class BlockPool:
    """Owns ``capacity`` blocks, numbered from 0."""

    def __init__(self, capacity: int, journal: KvJournal | None = None) -> None:
        self.capacity = capacity
        self._journal = journal
        self.version = 0
        self._references = [0] * capacity
        self._key_of: list[int | None] = [None] * capacity
        self._by_key: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._blank = list(range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that can be handed out: blank and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks referenced by at least one request, pinned ones included."""
        return self.capacity - len(self._blank) - len(self._idle)

    def count_hits(self, keys: Sequence[int], limit: int | None = None) -> int:
        """Return how many leading ``keys`` are cached, at most ``limit``."""
        by_key = self._by_key
        for hits, key in enumerate(keys):
            if hits == limit or key not in by_key:
                return hits
        return len(keys)

    def claim(self, hit_keys: Iterable[int], total: int) -> list[int] | None:
        """Return ``total`` blocks, those of ``hit_keys`` (just found by `count_hits`) first, or None, and change nothing, if they do not fit."""
        references, idle = self._references, self._idle
        blocks = [self._by_key[key] for key in hit_keys]
        revived = sum(1 for block in blocks if not references[block])
        fresh = total - len(blocks)
        if fresh + revived > len(self._blank) + len(idle):
            return None
        for block in blocks:
            if not references[block]:
                del idle[block]
            references[block] += 1
        blocks += self._take(fresh)
        return blocks

    def blocks_of(self, keys: Iterable[int]) -> list[int]:
        """Return the blocks found under ``keys``, all of them cached."""
        return [self._by_key[key] for key in keys]

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` are unreferenced."""
        return sum(1 for block in blocks if not self._references[block])

    def sole(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` have one reference: the ones that their holder alone would free."""
        return sum(1 for block in blocks if self._references[block] == 1)

    def _take(self, count: int) -> list[int]:
        references, blank, idle = self._references, self._blank, self._idle
        blocks: list[int] = []
        from_blank = min(count, len(blank))
        if from_blank:
            blocks = blank[-from_blank:]
            blocks.reverse()
            del blank[-from_blank:]
        for _ in range(count - from_blank):
            block, _ = idle.popitem(last=False)
            key = self._key_of[block]
            if key is not None:
                del self._by_key[key]
                self._key_of[block] = None
                if self._journal is not None:
                    self._journal.removed(key)
            blocks.append(block)
        for block in blocks:
            references[block] = 1
        return blocks

    def register(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Let later requests find each of ``blocks`` under its key; the first block of a key keeps it."""
        key_of, by_key = self._key_of, self._by_key
        for block, key in zip(blocks, keys, strict=True):
            if key_of[block] is None and key not in by_key:
                key_of[block] = key
                by_key[key] = block
        self.version += 1

    def is_cached(self, key: int) -> bool:
        """Return whether a block is found under ``key``."""
        return key in self._by_key

    def clear(self) -> bool:
        """Forget the content of every block; False, and nothing changed, while one is in use."""
        if self.used:
            return False
        self._key_of = [None] * self.capacity
        self._by_key.clear()
        self._idle.clear()
        self._blank = list(range(self.capacity - 1, -1, -1))
        self.version += 1
        if self._journal is not None:
            self._journal.cleared()
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; the last block of a request is evicted before the first."""
        references, idle, key_of = self._references, self._idle, self._key_of
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} released more often than claimed")
            references[block] = left
            if not left:
                if key_of[block] is None:
                    self._blank.append(block)
                else:
                    idle[block] = None
        self.version += 1
