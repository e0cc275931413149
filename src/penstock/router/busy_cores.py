"""How many processor cores a process uses, smoothed; the caller reads the clocks. Pure."""

from __future__ import annotations

from math import exp

_WINDOW_S = 10.0
"""Chosen: bursts of a second or two do not count as load, a minute's rise does within its first half."""


class BusyCores:
    """Exponentially weighted mean of processor seconds per second.

    Attributes:
        cores: The mean, >= 0; 0 while nothing was measured.
    """

    __slots__ = ("_cpu_s", "_wall_s", "cores")

    def __init__(self) -> None:
        self.cores = 0.0
        self._cpu_s: float | None = None
        self._wall_s = 0.0

    def measure(self, cpu_s: float, wall_s: float) -> None:
        """Take the clocks in: processor seconds that the process has used so far, and monotonic seconds, both real."""
        passed_s = wall_s - self._wall_s
        if self._cpu_s is not None and passed_s > 0:
            weight = exp(-passed_s / _WINDOW_S)
            self.cores = weight * self.cores + (1 - weight) * max(0.0, cpu_s - self._cpu_s) / passed_s
        if self._cpu_s is None or passed_s > 0:
            self._cpu_s, self._wall_s = cpu_s, wall_s
