"""KV blocks kept for the premium tier: all other requests together hold at most the rest, even of idle blocks.

`TieredBatcher` tells it of every block that such a request takes and gives back; a prefix that several share
counts once. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence


class Reservation:
    """Counts the blocks held by requests that may not use the reserve.

    Attributes:
        held: Distinct blocks that they hold, 0 to `limit`.
        limit: Blocks that they may hold.
    """

    __slots__ = ("_references", "held", "limit")

    def __init__(self, capacity: int, reserved: int) -> None:
        """Keep ``reserved`` of ``capacity`` blocks, 0 <= reserved < capacity."""
        self._references = [0] * capacity
        self.held = 0
        self.limit = capacity - reserved

    @property
    def room(self) -> int:
        """Further blocks that they may take."""
        return self.limit - self.held

    def added(self, blocks: Sequence[int]) -> int:
        """Return how many of ``blocks`` none of them holds yet."""
        return sum(1 for block in blocks if not self._references[block])

    def hold(self, blocks: Sequence[int]) -> None:
        """Note that one of them took these blocks."""
        references = self._references
        for block in blocks:
            if not references[block]:
                self.held += 1
            references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Note that one of them gave these blocks back."""
        references = self._references
        for block in blocks:
            references[block] -= 1
            if not references[block]:
                self.held -= 1
