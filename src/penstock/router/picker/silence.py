"""How long another router may be silent before it counts as gone: longer, the more often that was wrong. Pure.

A router without CPU sends its heartbeat late. Who takes it for gone elects another picker, finds it again a moment later,
and so on: an election costs every router work, which makes all of them later still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST_TICKS: Final = 50
"""Chosen: five seconds, which requests then wait for a node that is lost; a process without CPU for longer is of no use."""
CALM_TICKS: Final = 600
"""Chosen: a minute without a mistake halves the patience."""
_JITTER: Final = 0.25
"""Chosen: routers of equal patience must not all hold an election in the same tick."""


class SilencePatience:
    """The limit of one side's silence, in ticks of this process.

    Attributes:
        ticks: The current limit.
    """

    __slots__ = ("_base", "_calm", "_jitter", "_least", "ticks")

    def __init__(self, least: int, jitter: Callable[[], float]) -> None:
        """Begin with the least; ``jitter`` returns numbers of 0 to 1."""
        self.ticks = self._base = self._least = least
        self._jitter = jitter
        self._calm = 0

    def tick(self) -> None:
        """Count one tick, and come down where there was no mistake for long."""
        self._calm += 1
        if self._base > self._least and self._calm >= CALM_TICKS:
            self._calm, self._base = 0, max(self._least, self._base // 2)
            self._spread()

    def was_wrong(self) -> None:
        """Record that what was taken for gone has come back: it was slow."""
        self._calm, self._base = 0, min(MOST_TICKS, 2 * self._base)
        self._spread()

    def _spread(self) -> None:
        extra = 0 if self._base == self._least else self._base * _JITTER * self._jitter()
        self.ticks = min(MOST_TICKS, self._base + round(extra))
