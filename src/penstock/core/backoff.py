"""Computes the pauses after consecutive failures: doubling, up to a limit. Pure; callers add their own jitter."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 64
"""Maximum number of doublings. Chosen: a second doubled this often exceeds any limit, and numbers stay finite."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses after consecutive failures.

    Attributes:
        first_s: Pause after the first failure, in seconds.
        limit_s: Maximum pause, in seconds.
    """

    first_s: float
    limit_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after ``failures`` consecutive failures, which must be at least 1."""
        return min(self.first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS), self.limit_s)
