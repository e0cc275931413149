"""Quantiles of what a cumulative histogram gained between two looks; the dashboard's TTFT and ITL."""

from __future__ import annotations

import math

from penstock_planner.sources.base import Buckets


def gained(before: Buckets, after: Buckets) -> Buckets:
    """Return the cumulative counts gained since ``before``.

    A counter that fell (its process restarted) counts from 0, as in Prometheus.
    """
    earlier = dict(before)
    if any(count < earlier.get(bound, 0.0) for bound, count in after):
        return after
    return tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in after)


def quantile(buckets: Buckets, q: float) -> float | None:
    """Return the quantile by linear interpolation within its bucket, as PromQL's histogram_quantile.

    Args:
        buckets: Cumulative, bounds rising.
        q: Rank in (0, 1].

    Returns:
        None without samples. In the infinite bucket: the largest finite bound.

    Example: 10 samples up to 0.1 and 10 more up to 0.2: the median is 0.1, the 75th percentile 0.15.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low
