"""Simulated time: one factor, the time scale, between real seconds and simulated ones (docs/glossary.md); and lateness.

Every real-time process owns one `SimulatedClock`; pure code gets its ``now`` as an argument instead.
"""

from __future__ import annotations

import math
import time
from collections import deque

from penstock.core.errors import ConfigError
from penstock.core.histogram import percentile


class SimulatedClock:
    """Monotonic simulated seconds, ``speed`` of them to one real second.

    The origin is the host's own (CLOCK_MONOTONIC), so processes of one host with the same speed agree.
    """

    __slots__ = ("speed",)

    def __init__(self, speed: float = 1.0) -> None:
        """Set the factor."""
        if not (math.isfinite(speed) and speed > 0):
            raise ConfigError(f"--speed: {speed!r} must be a finite number above 0; 1 is real time")
        self.speed = speed

    def now_s(self) -> float:
        """Return simulated seconds since the host's monotonic origin."""
        return time.monotonic() * self.speed

    def to_real_s(self, simulated_s: float) -> float:
        """Return how many real seconds pass in ``simulated_s`` simulated ones."""
        return simulated_s / self.speed

    def to_simulated_s(self, real_s: float) -> float:
        """Return how many simulated seconds pass in ``real_s`` real ones."""
        return real_s * self.speed


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
