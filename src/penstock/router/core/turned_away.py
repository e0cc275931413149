"""Requests that a stage had no worker for: they are demand as those that wait. Pure."""

from __future__ import annotations

from collections import deque

LATELY_S = 15.0
"""Chosen: the time between two syncs of a HorizontalPodAutoscaler, so that each sees what was turned away since the last."""


class TurnedAway:
    """Counts of one stage of one router.

    Attributes:
        total: Rejected, shed, refused by a full queue, or timed out there, so far.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.total = 0
        self._at_s: deque[float] = deque()

    def add(self, now_s: float) -> None:
        """Count a request, at a simulated second."""
        self.total += 1
        self._at_s.append(now_s)
        self.lately(now_s)

    def lately(self, now_s: float) -> int:
        """Return how many were turned away within `LATELY_S` before now."""
        while self._at_s and self._at_s[0] <= now_s - LATELY_S:
            self._at_s.popleft()
        return len(self._at_s)
