"""Growing, jittered pauses between tries. Pure: the random generator is an argument."""

from __future__ import annotations

import random


class Backoff:
    """Doubles its pause up to a limit; each is drawn from the upper half of the range, so that clients spread."""

    __slots__ = ("_first_s", "_limit_s", "_next_s", "_rng")

    def __init__(self, rng: random.Random, *, first_s: float, limit_s: float) -> None:
        self._rng = rng
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """Return the next pause, between half of the range and all of it, in seconds."""
        top_s = self._next_s
        self._next_s = min(top_s * 2, self._limit_s)
        return top_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again with the shortest pause; call it after a success."""
        self._next_s = self._first_s
