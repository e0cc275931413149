"""Requests/s in equal steps of time, from pulls."""

from __future__ import annotations

import math
from collections import deque

from penstock.planner.decide.observation import Pull

BUCKET_S = 10.0
"""Chosen: at 2 requests/s a step has twenty arrivals, and a fit sees a start-up of half a minute as three steps."""

POINTS_MOST = 120
"""Chosen: twenty minutes; a fit takes a tenth of a second."""

GAP_MOST = 3
"""Chosen: so many unknown steps in a row are bridged by a line; older than a longer gap, nothing counts."""

COVERED_LEAST = 0.5
"""Chosen: a step of which less than half was seen is unknown."""


class History:
    """The last steps' mean arrivals.

    Steps end at multiples of their length, so that a history which is gathered again from its last pulls is the same.

    Attributes:
        bucket_s: Length of a step, simulated seconds.
    """

    __slots__ = ("_arrived", "_covered_s", "_end_s", "_rates", "bucket_s")

    def __init__(self, bucket_s: float) -> None:
        self.bucket_s = bucket_s
        self._rates: deque[float] = deque(maxlen=POINTS_MOST)
        self._end_s: float | None = None
        self._arrived = 0.0
        self._covered_s = 0.0

    @property
    def span_s(self) -> float:
        """Return how long ago the oldest pull was, at most, that a history still depends on; simulated seconds."""
        return (POINTS_MOST + 2) * self.bucket_s

    @property
    def end_s(self) -> float:
        """Return the end of the newest full step; 0 before the first pull that knows demand."""
        return 0.0 if self._end_s is None else self._end_s - self.bucket_s

    def add(self, pull: Pull) -> bool:
        """Take a pull, later than the one before; return whether a step has become full.

        Arrivals count as spread evenly over the time that they were counted in; a pull without demand leaves a gap.
        """
        demand = pull.demand
        if self._end_s is None:
            if demand is None:
                return False
            self._end_s = self._end_after(pull.at_s - demand.period_s)
        from_s = pull.at_s if demand is None else pull.at_s - demand.period_s
        per_s = 0.0 if demand is None else demand.arrivals / demand.period_s
        if pull.at_s - self._end_s > POINTS_MOST * self.bucket_s:
            # A gap beyond the whole history.
            self._rates.clear()
            self._end_s = self._end_after(from_s)
            self._arrived = self._covered_s = 0.0
        is_full = False
        while pull.at_s >= self._end_s:
            self._cover(from_s, self._end_s, per_s)
            self._close(self._end_s)
            is_full = True
        self._cover(from_s, pull.at_s, per_s)
        return is_full

    def rates(self) -> tuple[float, ...]:
        """Return requests/s of the full steps since the last long gap, oldest first, short gaps bridged by lines."""
        known: list[float] = []
        gap = 0
        for rate in self._rates:
            if math.isnan(rate):
                gap += 1
                continue
            if known and gap <= GAP_MOST:
                known += [known[-1] + (rate - known[-1]) * step / (gap + 1) for step in range(1, gap + 1)]
            elif gap:
                known = []
            known.append(rate)
            gap = 0
        return () if gap else tuple(known)

    def _end_after(self, at_s: float) -> float:
        return (math.floor(at_s / self.bucket_s) + 1) * self.bucket_s

    def _cover(self, from_s: float, to_s: float, per_s: float) -> None:
        """Count what lies in the step under way."""
        assert self._end_s is not None  # noqa: S101 - the caller's
        seconds = max(0.0, to_s - max(from_s, self._end_s - self.bucket_s))
        self._arrived += per_s * seconds
        self._covered_s += seconds

    def _close(self, end_s: float) -> None:
        is_known = self._covered_s >= COVERED_LEAST * self.bucket_s
        self._rates.append(self._arrived / self._covered_s if is_known else math.nan)
        self._end_s = end_s + self.bucket_s
        self._arrived = self._covered_s = 0.0
