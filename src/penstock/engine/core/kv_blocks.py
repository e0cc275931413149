"""Paged KV blocks with reference counts; the prefix cache, its keys, and a journal of its changes.

A block is in use (referenced by at least one request), idle (unreferenced, but its content is still cached, so that a
later request can reuse it) or blank. Blank blocks are allocated first, then idle ones, least recently used first.
Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from penstock.core.simulated_tokens import BYTES_PER_TOKEN
from penstock.engine.core.requests import EngineRequest


def count_tokens(prompt: bytes) -> int:
    """Return the number of simulated tokens in ``prompt``; an incomplete last token counts as one."""
    return -(-len(prompt) // BYTES_PER_TOKEN)


def prefix_keys(prompt: bytes, block_size: int, *, seed: int = 0) -> list[int]:
    """Return one chained 64-bit key per complete block of ``prompt``; empty if the prompt is shorter than a block.

    Args:
        prompt: Token IDs of the prompt, 4 bytes each.
        block_size: Tokens per block.
        seed: Start value of the chain; prompts with different seeds share no keys.
    """
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
    """Consecutive blocks of one prompt that later requests can now reuse.

    Attributes:
        keys: Prefix keys of the blocks.
        parent: Key of the block before them; None if they are the start of the prompt.
        tokens: Token IDs of the blocks, 4 bytes each.
        adapter: LoRA adapter with which the blocks were computed; only its requests can reuse them. None for the base
            model.
    """

    keys: tuple[int, ...]
    parent: int | None
    tokens: bytes
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that were evicted, by their prefix keys."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks were evicted at once."""


KvFact = BlocksStored | BlocksRemoved | CacheCleared
"""A change of the prefix cache."""


class KvJournal:
    """Records changes of the prefix cache until `take` returns them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._facts: list[KvFact] = []
        self._removed: list[int] = []

    def stored(self, request: EngineRequest, places: Sequence[int]) -> None:
        """Record blocks of a prompt that can now be reused; consecutive blocks are combined.

        Args:
            request: The request with the prompt.
            places: Ascending indices of the blocks in the prompt.
        """
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
        """Record an evicted block; negative keys, which are those of generated tokens, are ignored."""
        if key >= 0:
            self._removed.append(key)

    def cleared(self) -> None:
        """Record that the cache is empty; earlier records are dropped."""
        self._removed.clear()
        self._facts = [CacheCleared()]

    def take(self) -> list[KvFact]:
        """Return the recorded changes, oldest first, and clear the journal."""
        self._end_removals()
        facts, self._facts = self._facts, []
        return facts

    def _end_removals(self) -> None:
        if self._removed:
            self._facts.append(BlocksRemoved(tuple(self._removed)))
            self._removed.clear()


class BlockPool:
    """Manages ``capacity`` blocks, numbered from 0.

    Attributes:
        capacity: Number of blocks in total.
        version: Number that increases whenever blocks are registered, released or cleared.
    """

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
        """Number of blocks that can be allocated: blank and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Number of blocks referenced by at least one request, including kept ones."""
        return self.capacity - len(self._blank) - len(self._idle)

    def count_hits(self, keys: Sequence[int], limit: int | None = None) -> int:
        """Return how many of the leading ``keys`` are cached, up to the first one that is not; at most ``limit``, if it is set."""
        by_key = self._by_key
        for hits, key in enumerate(keys):
            if hits == limit or key not in by_key:
                return hits
        return len(keys)

    def claim(self, hit_keys: Iterable[int], total: int) -> list[int] | None:
        """Allocate ``total`` blocks and return them; return None, and change nothing, if there are too few free blocks.

        Args:
            hit_keys: Keys of cached blocks, as just counted by `count_hits`; their blocks come first.
            total: Number of blocks to allocate, the cached ones included.
        """
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
        """Return the blocks cached under ``keys``; all keys must be cached."""
        return [self._by_key[key] for key in keys]

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` no request references."""
        return sum(1 for block in blocks if not self._references[block])

    def sole(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` have exactly one reference, so that their owner would free them."""
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
        """Cache each of ``blocks`` under its key; a key that is already cached keeps its first block."""
        key_of, by_key = self._key_of, self._by_key
        for block, key in zip(blocks, keys, strict=True):
            if key_of[block] is None and key not in by_key:
                key_of[block] = key
                by_key[key] = block
        self.version += 1

    def is_cached(self, key: int) -> bool:
        """Return whether a block is cached under ``key``."""
        return key in self._by_key

    def clear(self) -> bool:
        """Empty the cache; return False, and change nothing, if any block is in use."""
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
        """Drop one reference of each block; later blocks of a request are evicted before earlier ones.

        Raises:
            ValueError: A block has no reference.
        """
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
