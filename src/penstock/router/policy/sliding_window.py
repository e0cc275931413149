"""Values of the last seconds. Pure."""

from __future__ import annotations

from collections import deque

MOST_VALUES = 8192
"""Chosen: 270 requests/s of one tier in 30 s; of more, the newest count."""


class SlidingWindow:
    """Values by the time at which they were measured.

    Attributes:
        length_s: Values older than this are forgotten, simulated seconds.
    """

    __slots__ = ("_values", "length_s")

    def __init__(self, length_s: float) -> None:
        """Begin empty; ``length_s`` > 0, simulated seconds."""
        self.length_s = length_s
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST_VALUES)

    def add(self, value: float, now_s: float) -> None:
        """Take a value in; times never decrease."""
        self._values.append((now_s, value))

    def values(self, now_s: float, *, since_s: float = float("-inf")) -> list[float]:
        """Return the values measured within the window and after ``since_s``, oldest first."""
        values = self._values
        while values and values[0][0] <= now_s - self.length_s:
            values.popleft()
        return [value for at_s, value in values if at_s > since_s]
