"""The percentile by nearest rank: a value that was measured, never one between two. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that ``percent`` of the values do not exceed; None without values.

    Of 100 values the 99th percentile is the second largest, of fewer the largest.

    Args:
        values: In any order.
        percent: Above 0, at most 100.
    """
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else None
