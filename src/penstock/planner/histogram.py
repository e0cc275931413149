"""What a cumulative histogram gained between two observations, and how much of it lies within a bound."""

from __future__ import annotations

import math

from penstock.planner.sources.base import Buckets


def gained(before: Buckets, after: Buckets) -> Buckets:
    """Return the cumulative counts gained since ``before``.

    A counter that fell (its process restarted) counts from 0, as in Prometheus.
    """
    earlier = dict(before)
    if any(count < earlier.get(bound, 0.0) for bound, count in after):
        return after
    return tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in after)


def share_within(buckets: Buckets, bound_s: float, *, missed: float = 0.0) -> float | None:
    """Return the share of the samples up to a bound; those of the bucket around it are taken as spread evenly.

    Args:
        buckets: Cumulative, bounds rising.
        bound_s: >= 0.
        missed: Further samples that lie beyond it.

    Returns:
        None without samples. Samples of the infinite bucket lie beyond every bound.

    Example: 10 samples in (0.1, 0.2] and 10 more in (0.2, 0.4]: three quarters lie within 0.3.
    """
    samples = (buckets[-1][1] if buckets else 0.0) + missed
    if samples <= 0:
        return None
    low, below = 0.0, 0.0
    for high, count in buckets:
        if bound_s < high:
            part = 0.0 if math.isinf(high) else (bound_s - low) / (high - low)
            return (below + part * (count - below)) / samples
        low, below = high, count
    return below / samples
