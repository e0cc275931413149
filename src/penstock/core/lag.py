"""How late a process runs against its own schedule; engine, planner loop and load generator report it."""

from __future__ import annotations

from collections import deque

from penstock.core.percentiles import percentile

WINDOW_SAMPLES = 4096
"""Chosen: about a minute of engine steps, 32 KB of floats."""


class LagTracker:
    """Keeps the newest samples of lateness and answers percentiles.

    A sample is ``actual - scheduled`` in simulated seconds; early counts as 0.
    """

    __slots__ = ("_samples", "total")

    def __init__(self, window: int = WINDOW_SAMPLES) -> None:
        self._samples: deque[float] = deque(maxlen=window)
        self.total = 0

    def record(self, lag_s: float) -> None:
        """Add one sample in simulated seconds."""
        self._samples.append(lag_s if lag_s > 0 else 0.0)
        self.total += 1

    def p99_s(self) -> float | None:
        """Return the 99th percentile in simulated seconds, or None without samples."""
        return percentile(self._samples, 99)
