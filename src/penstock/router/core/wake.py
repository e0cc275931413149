"""How long a request that finds no worker at all waits for one, learnt from the last times that workers came. Pure.

A wake-up begins with the first request that finds no worker of any stage and ends once every stage has one. So it holds
the planner's reaction, scheduling and image pulls as well as the start itself: all that a held request has to outlast.
"""

from __future__ import annotations

from collections import deque

KEPT = 8
"""Wake-ups remembered. Chosen: a slow image pull counts for a while, and not for ever."""

LEARNT_FROM = 3
"""Wake-ups seen before they bound the wait. Chosen: a replica that was lost and not scaled to zero may be half started
when the first request comes; one such short time must not refuse requests."""

HOLD_FACTOR = 2.0
"""Chosen: starts vary with image caches and nodes. A wait that is too long costs only requests that are lost anyway, one
that is too short loses those that would have been served."""


class WakeTimes:
    """The wake-ups of one router."""

    def __init__(self, max_s: float) -> None:
        """Know none yet; ``max_s`` is the longest wait that is configured, simulated seconds > 0."""
        self._max_s = max_s
        self._took_s: deque[float] = deque(maxlen=KEPT)
        self._begun_s: float | None = None
        self._was_served = False

    @property
    def slowest_s(self) -> float | None:
        """The slowest remembered wake-up, simulated seconds; None: too few were seen."""
        return max(self._took_s) if len(self._took_s) >= LEARNT_FROM else None

    @property
    def hold_s(self) -> float:
        """How long a request waits for a worker, simulated seconds: the configured bound until enough is learnt."""
        slowest_s = self.slowest_s
        return self._max_s if slowest_s is None else min(self._max_s, HOLD_FACTOR * slowest_s)

    def asked(self, now_s: float) -> None:
        """Take note of a request that finds no worker of any stage.

        Before workers have served once they may have begun to start long ago: that teaches nothing.
        """
        if self._begun_s is None and self._was_served:
            self._begun_s = now_s

    def served(self, now_s: float) -> None:
        """Take note that every stage has a worker."""
        self._was_served = True
        if self._begun_s is not None:
            self._took_s.append(now_s - self._begun_s)
            self._begun_s = None

    def left_s(self, now_s: float) -> float | None:
        """Return how long workers are expected to take still, simulated seconds; None: none is being waited for.

        A wake-up that already takes longer than any remembered one, or than nothing, is expected to take as long again.
        """
        if self._begun_s is None:
            return None
        past_s, slowest_s = now_s - self._begun_s, self.slowest_s
        return slowest_s - past_s if slowest_s is not None and past_s < slowest_s else past_s

    def least_left_s(self, now_s: float) -> float:
        """Return the least time that workers take still, as the fastest remembered wake-up did; 0: any may be next."""
        if self._begun_s is None or len(self._took_s) < LEARNT_FROM:
            return 0.0
        return max(0.0, min(self._took_s) - (now_s - self._begun_s))
