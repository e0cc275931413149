"""Which prefix blocks an instance holds, as far as the router can know: it remembers what it sent there.

Two generations of open-addressing tables stand for least-recently-used order: a block that is used goes to the
young table; when that is full, the old one is dropped and the young one becomes old. So between half and all of
the capacity is remembered, at 16 to 32 bytes a block, and nothing is ever unlinked. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_LOWEST_SLOTS = 64


class _Table:
    """A set of 64-bit keys; grows by doubling up to its limit, and is dropped whole."""

    __slots__ = ("_mask", "_slots", "count")

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _LOWEST_SLOTS))
        self._mask = _LOWEST_SLOTS - 1
        self.count = 0

    def __contains__(self, key: int) -> bool:
        slots, mask = self._slots, self._mask
        place = key & mask
        while found := slots[place]:
            if found == key:
                return True
            place = (place + 1) & mask
        return False

    def add(self, key: int) -> None:
        slots, mask = self._slots, self._mask
        place = key & mask
        while found := slots[place]:
            if found == key:
                return
            place = (place + 1) & mask
        slots[place] = key
        self.count += 1
        if self.count * 2 > mask:
            self._grow()

    def size_bytes(self) -> int:
        return len(self._slots) * 8

    def _grow(self) -> None:
        old = self._slots
        self._mask = self._mask * 2 + 1
        self._slots = array("Q", bytes(8 * (self._mask + 1)))
        slots, mask = self._slots, self._mask
        for key in old:
            if key:
                place = key & mask
                while slots[place]:
                    place = (place + 1) & mask
                slots[place] = key


class PrefixIndex:
    """The blocks of one instance.

    Args of the constructor:
        capacity: Blocks that the instance's cache holds, >= 2.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, capacity: int) -> None:
        self._half = max(1, capacity // 2)
        self._young = _Table()
        self._old = _Table()

    def held(self, chain: Sequence[int]) -> int:
        """Return how many leading blocks of ``chain`` the instance holds.

        Blocks are remembered deepest first, so what is held is a prefix and can be found by bisection.
        """
        low, high = 0, len(chain)
        young, old = self._young, self._old
        while low < high:
            middle = (low + high) // 2
            key = chain[middle] or 1
            if key in young or key in old:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, chain: Sequence[int]) -> None:
        """Remember that the instance computes, or has just read, all blocks of ``chain``."""
        for key in reversed(chain):
            if self._young.count >= self._half:
                self._old = self._young
                self._young = _Table()
            # The empty slot is 0; a key of 0 is as likely as any other and shares the place of 1.
            self._young.add(key or 1)

    def clear(self) -> None:
        """Forget everything: the instance has restarted."""
        self._young = _Table()
        self._old = _Table()

    def size_bytes(self) -> int:
        """Return the memory of both tables."""
        return self._young.size_bytes() + self._old.size_bytes()

    def __len__(self) -> int:
        return self._young.count + self._old.count
