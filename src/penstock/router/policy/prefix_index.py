"""Which prefix blocks a worker holds, as far as the router knows: what it sent there, and what events say.

Keys are chained, so a block stands for everything before it, and what one prompt added is a *run* that is only
ever entered at its first block, its *head*. A lookup costs one probe and one memory comparison per run, not one
probe per block. Runs are forgotten in order of use and from their ends, so that a block never outlives the block
before it. Pure.

A run is a number, and the equally numbered items of flat arrays; number 0 is no run. A dict would be a little
quicker, at some 100 bytes an entry, which is what a block costs where every prompt brings one.
"""

from __future__ import annotations

from array import array
from sys import getsizeof

import numpy as np

from penstock.router.policy.keys import KEY_BYTES, Prefix

_SLACK = 32
"""Chosen: when full, 1/32 of the capacity is forgotten at once, since finding the oldest looks at all."""
_ONE_BLOCK = b""
"""A run of one block: its head is all there is to know."""
_PARTS = 256
"""Chosen: parts of an empty index's table, a power of two; a worker without a request costs next to nothing."""
_NEVER = (1 << 64) - 1
"""When a number was used that stands for no run: after all others."""


class PrefixIndex:
    """The blocks of one worker, at most ``capacity`` of them.

    Attributes:
        count: Blocks remembered.
        anywhere: Blocks that the worker holds in any memory, to be loaded where this index has them not; None: none are
            known to be held elsewhere. Forgotten by `clear`.
    """

    __slots__ = (
        "_capacity",
        "_clock",
        "_free",
        "_heads",
        "_mask",
        "_next",
        "_runs",
        "_table",
        "_used",
        "anywhere",
        "count",
    )

    def __init__(self, capacity: int) -> None:
        """Start empty.

        Args:
            capacity: Blocks that the worker's cache holds, in [1, 2**31].
        """
        self._capacity = capacity
        self.clear()

    @property
    def capacity(self) -> int:
        """Blocks that the worker's cache holds."""
        return self._capacity

    def resize(self, capacity: int) -> None:
        """Learn how many blocks the worker's cache holds, in [1, 2**31]; what is too much is forgotten."""
        self._capacity = capacity
        if self.count > capacity:
            self._forget(self.count - capacity)

    def clear(self) -> None:
        """Forget everything: the worker has worker_restarted."""
        # A head's lowest bits -> the first run of those whose heads have them, chained by `_next`.
        self._table = array("I", bytes(4 * _PARTS))
        self._mask = _PARTS - 1
        self._next = array("I", (0,))
        self._heads = array("Q", (0,))
        # A run's keys packed, its head's included.
        self._runs = [_ONE_BLOCK]
        # The clock at a run's last use. It counts uses, and would last for ages.
        self._used = array("Q", (_NEVER,))
        self._clock = 0
        # The first number that is free again, chained likewise.
        self._free = 0
        self.count = 0
        self.anywhere: PrefixIndex | None = None

    def held(self, prefix: Prefix) -> int:
        """Return how many leading blocks of a prompt the worker holds."""
        keys, table, mask = prefix.keys, self._table, self._mask
        place, total = 0, len(keys)
        while place < total:
            key = keys[place]
            number = table[key & mask]
            while number and self._heads[number] != key:
                number = self._next[number]
            if not number:
                break
            run = self._runs[number]
            place += _common(run, prefix.packed, place) if run else 1
        return place

    def use(self, prefix: Prefix) -> int:
        """Remember that the worker computes, or has just read, all blocks of a prompt.

        Returns:
            How many leading blocks it held before.
        """
        keys, packed, heads, runs = prefix.keys, prefix.packed, self._heads, self._runs
        place, total = 0, len(keys)
        passed = []
        while place < total:
            key = keys[place]
            number = self._table[key & self._mask]
            while number and heads[number] != key:
                number = self._next[number]
            if not number:
                break
            passed.append(number)
            run = runs[number]
            if not run:
                place += 1
                continue
            length = _common(run, packed, place)
            place += length
            if length * KEY_BYTES < len(run) and place < total:
                self._split(number, length)
        if place < total:
            self._add(keys[place], packed[place * KEY_BYTES :] if total - place > 1 else _ONE_BLOCK)
            self.count += total - place
        # Ancestors last: they must be younger than what builds on them.
        used = self._used
        self._clock = clock = self._clock + len(passed)
        for number in passed:
            used[number] = clock
            clock -= 1
        if self.count > self._capacity:
            self._forget(self.count - self._capacity + self._capacity // _SLACK)
        return place

    def limit(self, prefix: Prefix, blocks: int) -> None:
        """Learn that the worker holds at most the first ``blocks`` blocks of a prompt.

        Args:
            prefix: The prompt.
            blocks: >= 0. What other prompts hold beyond them in common with this one is forgotten with it.
        """
        keys, runs = prefix.keys, self._runs
        total = len(keys)
        # Most often a run begins right there: what this prompt had brought.
        place, number = blocks, self._find(keys[blocks]) if blocks < total else 0
        if not number and total:
            place, number = 0, self._find(keys[0])
        while number:
            run = runs[number]
            length = _common(run, prefix.packed, place) if run else 1
            if place + length > blocks:
                self._cut(number, max(0, blocks - place))
            place += length
            number = self._find(keys[place]) if place < total else 0

    def __len__(self) -> int:
        return self.count

    def size_bytes(self) -> int:
        """Return the memory of the index: the arrays and the packed runs."""
        arrays = (self._table, self._next, self._heads, self._used, self._runs)
        return sum(map(getsizeof, arrays)) + sum(getsizeof(run) for run in self._runs if run)

    def _find(self, head: int) -> int:
        """Return the number of the run that begins with a key; 0: there is none."""
        number = self._table[head & self._mask]
        while number and self._heads[number] != head:
            number = self._next[number]
        return number

    def _add(self, head: int, run: bytes) -> None:
        """Take in a run as the youngest; none begins with its head yet. Its blocks are not counted."""
        runs, after = self._runs, self._next
        self._clock = clock = self._clock + 1
        number = self._free
        if not number and len(runs) > self._mask:
            self._widen()
        table, part = self._table, head & self._mask
        if number:
            self._free = after[number]
            runs[number] = run
            self._heads[number] = head
            self._used[number] = clock
            after[number] = table[part]
        else:
            number = len(runs)
            runs.append(run)
            self._heads.append(head)
            self._used.append(clock)
            after.append(table[part])
        table[part] = number

    def _widen(self) -> None:
        """Double the table's parts; no number is free."""
        parts = 2 * len(self._table)
        self._table = table = array("I", bytes(4 * parts))
        self._mask = mask = parts - 1
        after = self._next
        for number in range(1, len(after)):
            part = self._heads[number] & mask
            after[number] = table[part]
            table[part] = number

    def _split(self, number: int, blocks: int) -> None:
        """Let what follows ``blocks`` blocks of a run age by itself: another prompt goes on differently there."""
        run, at = self._runs[number], blocks * KEY_BYTES
        self._runs[number] = run[:at] if blocks > 1 else _ONE_BLOCK
        rest = run[at:]
        head = int.from_bytes(rest[:KEY_BYTES], "little")
        if self._find(head):
            self.count -= len(rest) // KEY_BYTES
        else:
            self._add(head, rest if len(rest) > KEY_BYTES else _ONE_BLOCK)

    def _cut(self, number: int, blocks: int) -> None:
        """Shorten a run to ``blocks`` blocks."""
        run = self._runs[number]
        length = len(run) // KEY_BYTES or 1
        if blocks >= length:
            return
        self.count -= length - blocks
        if blocks == 0:
            self._remove(number)
        else:
            self._runs[number] = run[: blocks * KEY_BYTES] if blocks > 1 else _ONE_BLOCK

    def _remove(self, number: int) -> None:
        """Let a run's number be free."""
        after, table = self._next, self._table
        part = self._heads[number] & self._mask
        at = table[part]
        if at == number:
            table[part] = after[number]
        else:
            while (following := after[at]) != number:
                at = following
            after[at] = after[number]
        self._runs[number] = _ONE_BLOCK
        self._used[number] = _NEVER
        after[number] = self._free
        self._free = number

    def _forget(self, blocks: int) -> None:
        """Forget the least recently used blocks, in [1, ``count``]."""
        used = np.array(self._used)
        # As many runs as blocks at most; what is free or no run comes last, and is never reached.
        oldest = np.argpartition(used, min(blocks, len(used)) - 1)[:blocks]
        for number in oldest[np.argsort(used[oldest])].tolist():
            length = len(self._runs[number]) // KEY_BYTES or 1
            self._cut(number, max(0, length - blocks))
            blocks -= length
            if blocks <= 0:
                return


def _common(run: bytes, packed: bytes, place: int) -> int:
    """Return how many keys a run shares with a prompt from ``place`` on; the first is known to agree."""
    start = place * KEY_BYTES
    if packed.startswith(run, start):
        return len(run) // KEY_BYTES
    both = packed[start : start + len(run)]
    # Of two big-endian numbers, the highest bit in which they differ lies in the first byte that differs.
    differing = int.from_bytes(run[: len(both)], "big") ^ int.from_bytes(both, "big")
    return (8 * len(both) - differing.bit_length()) // (8 * KEY_BYTES)
