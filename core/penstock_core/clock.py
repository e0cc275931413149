"""Modelled time: one factor between the seconds of the wall and the seconds of the model.

Every real-time process owns one `ModelClock`; pure code gets its ``now`` as an argument instead.
"""

from __future__ import annotations

import math
import time

from penstock_core.errors import ConfigError


class ModelClock:
    """Monotonic modelled seconds, ``speed`` of them to one real second.

    The origin is the host's own (CLOCK_MONOTONIC), so processes of one host with the same speed agree.
    """

    __slots__ = ("speed",)

    def __init__(self, speed: float = 1.0) -> None:
        """Set the factor.

        Args:
            speed: Modelled seconds per real second, finite and > 0.

        Raises:
            ConfigError: speed is not a positive finite number.
        """
        if not (math.isfinite(speed) and speed > 0):
            raise ConfigError(f"--speed: {speed!r} must be a finite number above 0; 1 is real time")
        self.speed = speed

    def now_s(self) -> float:
        """Return modelled seconds since the host's monotonic origin."""
        return time.monotonic() * self.speed

    def to_real_s(self, modelled_s: float) -> float:
        """Return how many real seconds pass in ``modelled_s`` modelled ones."""
        return modelled_s / self.speed

    def to_model_s(self, real_s: float) -> float:
        """Return how many modelled seconds pass in ``real_s`` real ones."""
        return real_s * self.speed
