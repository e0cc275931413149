"""Which prefix blocks an instance holds, as far as the router knows: what it sent there, and what events say.

Keys are chained, so a block stands for everything before it, and what one prompt added is a *run* that is only
ever entered at its first block. One dict entry per run and eight bytes per block is the whole index: a lookup
costs a few dict gets and memory comparisons, not one probe per block. Runs are kept in order of use and the least
recently used are cut from their ends, so that a block never outlives the block before it. Pure.
"""

from __future__ import annotations

from itertools import islice
from sys import getsizeof

from penstock_router.policy.keys import KEY_BYTES, Prefix

_SLACK = 32
"""Chosen: when full, 1/32 of the capacity is forgotten at once; taking the oldest entry out of a dict one by one
would walk over all that went before it."""
_ONE_BLOCK = b""
"""A run of one block: its head is all there is to know."""


class PrefixIndex:
    """The blocks of one instance, at most ``capacity`` of them.

    Attributes:
        count: Blocks remembered.
    """

    __slots__ = ("_capacity", "_runs", "count")

    def __init__(self, capacity: int) -> None:
        """Start empty.

        Args:
            capacity: Blocks that the instance's cache holds, >= 1.
        """
        self._capacity = capacity
        # First key of a run -> its keys packed.
        self._runs: dict[int, bytes] = {}
        self.count = 0

    def held(self, prefix: Prefix) -> int:
        """Return how many leading blocks of a prompt the instance holds."""
        keys, runs = prefix.keys, self._runs
        place, total = 0, len(keys)
        while place < total:
            run = runs.get(keys[place])
            if run is None:
                break
            place += _common(run, prefix.packed, place) if run else 1
        return place

    def use(self, prefix: Prefix) -> int:
        """Remember that the instance computes, or has just read, all blocks of a prompt.

        Returns:
            How many leading blocks it held before.
        """
        keys, runs = prefix.keys, self._runs
        place, total = 0, len(keys)
        passed = []
        while place < total:
            head = keys[place]
            run = runs.get(head)
            if run is None:
                break
            passed.append(head)
            length = _common(run, prefix.packed, place) if run else 1
            place += length
            if length * KEY_BYTES < len(run) and place < total:
                self._split(head, length)
        if place < total:
            runs[keys[place]] = prefix.packed[place * KEY_BYTES :] if total - place > 1 else _ONE_BLOCK
            self.count += total - place
        # Ancestors last: they must be younger than what builds on them.
        while passed:
            head = passed.pop()
            runs[head] = runs.pop(head)
        if self.count > self._capacity:
            self._forget(self.count - self._capacity + self._capacity // _SLACK)
        return place

    def limit(self, prefix: Prefix, blocks: int) -> None:
        """Learn that the instance holds at most the first ``blocks`` blocks of a prompt.

        Args:
            prefix: The prompt.
            blocks: >= 0. What other prompts hold beyond them in common with this one is forgotten with it.
        """
        keys, runs = prefix.keys, self._runs
        total = len(keys)
        # Most often a run begins right there: what this prompt had brought.
        place = blocks if blocks < total and keys[blocks] in runs else 0
        while place < total and (run := runs.get(keys[place])) is not None:
            length = _common(run, prefix.packed, place) if run else 1
            if place + length > blocks:
                self._cut(keys[place], max(0, blocks - place))
            place += length

    def clear(self) -> None:
        """Forget everything: the instance has restarted."""
        self._runs = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def size_bytes(self) -> int:
        """Return the memory of the index: the dict, its keys and the packed runs."""
        own = getsizeof(self._runs)
        return own + sum(getsizeof(head) + (getsizeof(run) if run else 0) for head, run in self._runs.items())

    def _split(self, head: int, blocks: int) -> None:
        """Let what follows ``blocks`` blocks of a run age by itself: another prompt goes on differently there."""
        rest = self._runs[head][blocks * KEY_BYTES :]
        self._cut(head, blocks)
        rest_head = int.from_bytes(rest[:KEY_BYTES], "little")
        if rest_head not in self._runs:
            self._runs[rest_head] = rest if len(rest) > KEY_BYTES else _ONE_BLOCK
            self.count += len(rest) // KEY_BYTES

    def _cut(self, head: int, blocks: int) -> None:
        """Shorten a run to ``blocks`` blocks."""
        run = self._runs[head]
        length = len(run) // KEY_BYTES or 1
        if blocks >= length:
            return
        self.count -= length - blocks
        if blocks == 0:
            del self._runs[head]
        else:
            self._runs[head] = run[: blocks * KEY_BYTES] if blocks > 1 else _ONE_BLOCK

    def _forget(self, blocks: int) -> None:
        """Forget at least ``blocks`` blocks if there are so many, the least recently used first."""
        for head in list(islice(self._runs, blocks)):
            if blocks <= 0:
                return
            length = len(self._runs[head]) // KEY_BYTES or 1
            self._cut(head, max(0, length - blocks))
            blocks -= length


def _common(run: bytes, packed: bytes, place: int) -> int:
    """Return how many keys a run shares with a prompt from ``place`` on; the first is known to agree."""
    start = place * KEY_BYTES
    if packed.startswith(run, start):
        return len(run) // KEY_BYTES
    both = packed[start : start + len(run)]
    # The lowest bit in which two little-endian numbers differ lies in the first byte that differs.
    differing = int.from_bytes(run[: len(both)], "little") ^ int.from_bytes(both, "little")
    if not differing:
        return len(both) // KEY_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * KEY_BYTES)
