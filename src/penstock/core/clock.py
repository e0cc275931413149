"""Simulated time: the time scale is the factor between wall-clock and simulated seconds (docs/glossary.md); also lateness statistics.

Every real-time process has one `SimulatedClock`; pure code receives the current time as an argument instead.
"""

from __future__ import annotations

import math
import time
from collections import deque

from penstock.core.errors import ConfigError
from penstock.core.histogram import percentile


class SimulatedClock:
    """Monotonic clock of simulated time, which runs ``speed`` times as fast as wall-clock time.

    Its origin is the host's (CLOCK_MONOTONIC), so processes on one host with the same speed have the same time.

    Attributes:
        speed: Simulated seconds per wall-clock second, above 0; 1 is real time.
    """

    __slots__ = ("speed",)

    def __init__(self, speed: float = 1.0) -> None:
        """Set the time scale.

        Args:
            speed: Simulated seconds per wall-clock second, above 0.

        Raises:
            ConfigError: ``speed`` is not a finite number above 0.
        """
        if not (math.isfinite(speed) and speed > 0):
            raise ConfigError(f"--speed: {speed!r} must be a finite number above 0; 1 is real time")
        self.speed = speed

    def now_s(self) -> float:
        """Return the simulated seconds since the host's monotonic origin."""
        return time.monotonic() * self.speed

    def to_real_s(self, simulated_s: float) -> float:
        """Convert a duration from simulated to wall-clock seconds."""
        return simulated_s / self.speed

    def to_simulated_s(self, real_s: float) -> float:
        """Convert a duration from wall-clock to simulated seconds."""
        return real_s * self.speed


WINDOW_SAMPLES = 4096
"""Number of samples that a LagTracker keeps. Chosen: about one minute of engine steps, 32 KB of floats."""


class LagTracker:
    """Keeps how late the newest events (such as the steps of a simulated engine) were, and computes the 99th percentile.

    A sample is the actual minus the scheduled time of an event in simulated seconds; negative samples count as 0.

    Attributes:
        total: Number of samples recorded since the start, including those that are no longer kept.
    """

    __slots__ = ("_samples", "total")

    def __init__(self, window: int = WINDOW_SAMPLES) -> None:
        self._samples: deque[float] = deque(maxlen=window)
        self.total = 0

    def record(self, lag_s: float) -> None:
        """Add one sample: ``lag_s`` simulated seconds; a negative value counts as 0."""
        self._samples.append(lag_s if lag_s > 0 else 0.0)
        self.total += 1

    def p99_s(self) -> float | None:
        """Return the 99th percentile of the kept samples in simulated seconds; None without samples."""
        return percentile(self._samples, 99)
