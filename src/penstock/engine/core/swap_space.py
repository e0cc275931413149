"""Host memory for the KV of preempted requests, and the copies on their way there and back; the engine calls it.

Each direction is a `Link` of its own, as PCIe is full duplex. A victim's GPU blocks stay its own until its copy
has ended, and its host blocks until they have been copied back.
"""

from __future__ import annotations

from penstock.engine.core.requests import RequestState
from penstock.engine.core.transfer import Link, LinkTerms, Transfer


class SwapSpace:
    """The blocks of host memory and who is being copied.

    Attributes:
        capacity: Blocks.
        used: Blocks taken, those of copies under way included.
    """

    __slots__ = ("_in", "_out", "capacity", "used")

    def __init__(self, capacity: int, link: LinkTerms) -> None:
        self.capacity = capacity
        self.used = 0
        self._out = Link(link)
        self._in = Link(link)

    def fits(self, blocks: int) -> bool:
        """Whether so many more blocks fit."""
        return self.used + blocks <= self.capacity

    def take(self, state: RequestState, blocks: int) -> None:
        """Keep ``blocks`` for a request that is about to be copied out."""
        self.used += blocks
        state.host_blocks = blocks

    def give_back(self, state: RequestState) -> None:
        """Free what a request has here; nothing if it has nothing."""
        self.used -= state.host_blocks
        state.host_blocks = 0

    def copy_out(self, state: RequestState, size: int, now_s: float) -> None:
        """Begin the copy of ``size`` bytes to host memory."""
        self._out.start(state, size, now_s)

    def copy_in(self, state: RequestState, size: int, now_s: float) -> None:
        """Begin the copy of ``size`` bytes from host memory."""
        self._in.start(state, size, now_s)

    def finish_out(self, now_s: float) -> list[Transfer]:
        """Return the copies to host memory that ended at or before ``now_s``."""
        return self._out.finish(now_s)

    def finish_in(self, now_s: float) -> list[Transfer]:
        """Return the copies from host memory that ended at or before ``now_s``."""
        return self._in.finish(now_s)

    def next_s(self) -> float | None:
        """Return when the next copy ends, or None."""
        return min((at for at in (self._out.next_s(), self._in.next_s()) if at is not None), default=None)
