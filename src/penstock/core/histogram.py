"""Histograms with vLLM's bucket bounds; adding many equal samples costs one bisection and one addition, without a lock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil
from typing import Final


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest of the values that is at least as large as ``percent`` percent of them; None without values.

    For example, the 99th percentile of 100 values is the second largest; of fewer values it is the largest.
    """
    ordered = sorted(values)
    return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else None


# Upper bounds of vLLM 0.32 in seconds, so that a dashboard can compare the router's curves with the workers'.
TTFT_BOUNDS_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BOUNDS_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

BOUND_RATIO: Final = 1.2
"""Maximum ratio of consecutive bounds. Chosen: a percentile estimated as the geometric middle of its bucket is off by
at most sqrt(1.2) - 1 = 9.6%."""


def geometric_bounds(low: float, high: float) -> tuple[float, ...]:
    """Return upper bounds of buckets from ``low`` up to at least ``high``, each 1.2 times (`BOUND_RATIO`) the previous one."""
    steps = math.ceil(math.log(high / low) / math.log(BOUND_RATIO) - 1e-9)
    return tuple(float(f"{low * BOUND_RATIO**step:.4g}") for step in range(steps + 1))


# The router's own bounds: dense in the range of SLOs, so that percentiles from its buckets are close to a client's.
ROUTER_TTFT_BOUNDS_S: Final = (0.001, 0.002, *geometric_bounds(0.005, 300.0), 640.0, 2560.0)
ESTIMATE_RATIO_BOUNDS: Final = (0.1, 0.25, 0.5, 0.67, 0.83, 0.95, 1.05, 1.2, 1.5, 2.0, 4.0, 10.0)
"""Bounds for the ratio of an estimate to the counted value: within 5%, and about a factor of 1.2, 1.5, 2, 4 and 10 in
either direction."""
ROUTER_ITL_BOUNDS_S: Final = (*geometric_bounds(0.001, 2.5), 5.0, 10.0, 20.0, 40.0, 80.0)


class BucketCounts:
    """A histogram: number of samples per bucket.

    Attributes:
        bounds: Upper bounds of the buckets, inclusive and strictly increasing, without +Inf.
        total: Sum of all samples, in the unit of the bounds.
        exemplars: Last traced sample of each bucket, by bucket index: trace ID, value, and Unix time in seconds.
    """

    __slots__ = ("_counts", "bounds", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create an empty histogram with these upper bounds, inclusive and strictly increasing, without +Inf."""
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, tuple[str, float, float]] = {}

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` samples of ``value``."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def exemplify(self, value: float, trace_id: str, now_s: float) -> None:
        """Store a traced sample as the exemplar (linked example) of its bucket, in place of the bucket's earlier one.

        Args:
            value: Value of the sample.
            trace_id: ID of its trace.
            now_s: Unix time in seconds.
        """
        self.exemplars[bisect_left(self.bounds, value)] = (trace_id, value, now_s)

    def cumulative(self) -> list[int]:
        """Return the number of samples at or below each bound; the last number, for +Inf, counts all samples."""
        return list(accumulate(self._counts))


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """Return a quantile, estimated as the geometric middle of the bucket that contains it.

    The middle of (a, b] deviates by at most sqrt(b/a) - 1 from any value in the bucket, however the samples are
    distributed in it; PromQL's linear interpolation deviates by up to b/a - 1. For the first bucket, which has no
    lower bound, half its upper bound is returned.

    Args:
        buckets: Pairs of upper bound and cumulative count, with increasing bounds.
        q: Rank in (0, 1].

    Returns:
        None without samples. If the quantile is in the infinite bucket, the largest finite bound.

    Example: with 10 samples in (0.1, 0.2] and 10 more in (0.2, 0.4], the median is 0.14 and the 75th percentile 0.28.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = q * buckets[-1][1]
    low = 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return low
            return math.sqrt(low * bound) if low else bound / 2
        low = bound
    return low


def share_within(
    buckets: Sequence[tuple[float, float]], bound_s: float, *, missed: float = 0.0
) -> float | None:
    """Return the fraction of samples up to a bound; samples in the bucket around it are assumed to be evenly distributed.

    Args:
        buckets: Pairs of upper bound and cumulative count, with increasing bounds.
        bound_s: The bound, at least 0.
        missed: Number of samples beyond the bound that are not in ``buckets``.

    Returns:
        None without samples. Samples in the infinite bucket are beyond every bound.

    Example: with 10 samples in (0.1, 0.2] and 10 more in (0.2, 0.4], three quarters are within 0.3.
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
