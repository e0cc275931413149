"""Percentiles by nearest rank: every figure is one that was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that ``percent`` of them do not exceed.

    Of 100 values the 99th percentile is the second largest, of fewer the largest. None without values.

    Args:
        values: In any order.
        percent: Above 0, at most 100.
    """
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else None
