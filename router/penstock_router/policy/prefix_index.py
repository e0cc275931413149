"""Which prefix blocks an instance holds, as far as the router knows: what it sent there, and what events say.

Keys are chained, so a block stands for everything before it, and what one prompt added is a *run* that is only
ever entered at its first block. One dict entry per run and eight bytes per block is the whole index: a lookup
costs a few dict gets and memory comparisons, not one probe per block. Runs are kept in order of use and the least
recently used are cut from their ends, so that a block never outlives the block before it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from sys import getsizeof

from penstock_router.policy.keys import KEY_BYTES, Prefix

_SLACK = 32
"""Chosen: when full, 1/32 of the capacity is forgotten at once; taking the oldest entry out of a dict one by one
would walk over all that went before it."""


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
        # First key of a run -> its keys packed; a run of one block has no need of them.
        self._runs: dict[int, bytes | None] = {}
        self.count = 0

    def held(self, prefix: Prefix) -> int:
        """Return how many leading blocks of a prompt the instance holds."""
        keys, runs = prefix.keys, self._runs
        place, total = 0, len(keys)
        while place < total:
            try:
                run = runs[keys[place]]
            except KeyError:
                break
            place += 1 if run is None else _common(run, prefix.packed, place)
        return place

    def use(self, prefix: Prefix) -> int:
        """Remember that the instance computes, or has just read, all blocks of a prompt.

        Returns:
            How many leading blocks it held before.
        """
        keys, runs = prefix.keys, self._runs
        total = len(keys)
        passed = list(self._along(prefix))
        place = passed[-1][1] if passed else 0
        if place < total:
            rest = total - place
            runs[keys[place]] = prefix.packed[place * KEY_BYTES :] if rest > 1 else None
            self.count += rest
        # Ancestors last: they must be younger than what builds on them.
        for head, _ in reversed(passed):
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
        start = 0
        for head, end in list(self._along(prefix)):
            if end > blocks:
                self._cut(head, max(0, blocks - start))
            start = end

    def clear(self) -> None:
        """Forget everything: the instance has restarted."""
        self._runs = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def size_bytes(self) -> int:
        """Return the memory of the index: the dict, its keys and the packed runs."""
        own = getsizeof(self._runs)
        return own + sum(
            getsizeof(head) + (0 if run is None else getsizeof(run)) for head, run in self._runs.items()
        )

    def _along(self, prefix: Prefix) -> Iterator[tuple[int, int]]:
        """Yield the heads of the runs that a prompt follows, each with the place where it leaves the run."""
        keys, runs = prefix.keys, self._runs
        place, total = 0, len(keys)
        while place < total:
            head = keys[place]
            try:
                run = runs[head]
            except KeyError:
                return
            place += 1 if run is None else _common(run, prefix.packed, place)
            yield head, place

    def _cut(self, head: int, blocks: int) -> None:
        """Shorten a run to ``blocks`` blocks."""
        run = self._runs[head]
        length = 1 if run is None else len(run) // KEY_BYTES
        if blocks >= length:
            return
        self.count -= length - blocks
        if blocks == 0:
            del self._runs[head]
        else:
            self._runs[head] = None if blocks == 1 or run is None else run[: blocks * KEY_BYTES]

    def _forget(self, blocks: int) -> None:
        """Forget at least ``blocks`` blocks if there are so many, the least recently used first."""
        for head in list(islice(self._runs, blocks)):
            if blocks <= 0:
                return
            run = self._runs[head]
            length = 1 if run is None else len(run) // KEY_BYTES
            self._cut(head, max(0, length - blocks))
            blocks -= length


def _common(run: bytes, packed: bytes, place: int) -> int:
    """Return how many keys a run shares with a prompt from ``place`` on; the first is known to agree."""
    start = place * KEY_BYTES
    if packed.startswith(run, start):
        return len(run) // KEY_BYTES
    # Chained keys agree up to one place and differ from there on.
    low, high = 1, min(len(run), len(packed) - start) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = middle * KEY_BYTES
        if run[at - KEY_BYTES : at] == packed[start + at - KEY_BYTES : start + at]:
            low = middle
        else:
            high = middle - 1
    return low
