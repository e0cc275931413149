"""Counts of inter-token gaps in bins of one percent: millions of tokens in a few hundred numbers."""

from __future__ import annotations

import math

_BINS_PER_E = 100.0


class GapHistogram:
    """Gaps in seconds by logarithmic bin; a percentile is exact to half a percent of its value.

    Attributes:
        total: Gaps counted.
        sum_s: Of their lengths.
    """

    __slots__ = ("_counts", "sum_s", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0
        self.sum_s = 0.0

    def add(self, gap_s: float, count: int) -> None:
        """Count ``count`` gaps of ``gap_s`` > 0; gaps of no length are left out."""
        if gap_s > 0:
            place = round(math.log(gap_s) * _BINS_PER_E)
            self._counts[place] = self._counts.get(place, 0) + count
            self.total += count
            self.sum_s += gap_s * count

    def percentile(self, share: float) -> float | None:
        """Return the nearest-rank percentile in seconds, or None without gaps.

        Args:
            share: In (0, 1].
        """
        wanted = math.ceil(share * self.total)
        seen = 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= wanted:
                return math.exp(place / _BINS_PER_E)
        return None
