"""The time for which another router may be silent before it counts as gone; it is longer after wrong decisions. Pure.

A router without enough CPU sends its heartbeat late. Routers that take it for gone elect another picker, see it again a
moment later, and so on: an election costs every router work, which makes all of them later still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_TICKS: Final = 50
"""Maximum of the limit, in ticks of 0.1 s. Chosen: five seconds, for which requests then wait when a node is lost; a process
without CPU for longer is of no use."""
CALM_TICKS: Final = 600
"""Number of ticks without a wrong decision after which the limit is halved. Chosen: a minute."""
_JITTER: Final = 0.25
"""Chosen: routers with equal limits must not all hold an election in the same tick."""


class SilencePatience:
    """The limit of silence: the number of ticks without a message after which another router counts as gone.

    A tick is 0.1 s of this process. The limit doubles when a router was wrongly taken for gone, and is halved after a minute
    without such a mistake.

    Attributes:
        ticks: Present limit, in ticks.
    """

    __slots__ = ("_base", "_calm", "_jitter", "_least", "ticks")

    def __init__(self, least: int, jitter: Callable[[], float]) -> None:
        """Start with the minimum limit of ``least`` ticks.

        ``jitter`` returns random numbers from 0 to 1, by which a raised limit is varied, so that routers do not all act in the
        same tick.
        """
        self.ticks = self._base = self._least = least
        self._jitter = jitter
        self._calm = 0

    def tick(self) -> None:
        """Count one tick; halve the limit if no router was wrongly taken for gone within the last minute (600 ticks, `CALM_TICKS`)."""
        self._calm += 1
        if self._base > self._least and self._calm >= CALM_TICKS:
            self._calm, self._base = 0, max(self._least, self._base // 2)
            self._spread()

    def record_false_alarm(self) -> None:
        """Double the limit (at most 50 ticks), because a router that was taken for gone has come back: it was only slow."""
        self._calm, self._base = 0, min(MAX_TICKS, 2 * self._base)
        self._spread()

    def _spread(self) -> None:
        extra = 0 if self._base == self._least else self._base * _JITTER * self._jitter()
        self.ticks = min(MAX_TICKS, self._base + round(extra))
