"""Quantiles and shares of latency buckets, as the planner and the report read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.histogram import (
    ROUTER_ITL_BOUNDS_S,
    ROUTER_TTFT_BOUNDS_S,
    BucketCounts,
    quantile,
    share_within,
)

INF = math.inf


@pytest.mark.parametrize(
    ("buckets", "q", "value"),
    [
        (((0.1, 0.0), (0.2, 10.0), (0.4, 20.0), (INF, 20.0)), 0.5, math.sqrt(0.02)),
        (((0.1, 0.0), (0.2, 10.0), (0.4, 20.0), (INF, 20.0)), 0.75, math.sqrt(0.08)),
        (((0.1, 10.0), (INF, 10.0)), 0.25, 0.05),
        (((0.1, 0.0), (0.2, 0.0), (INF, 5.0)), 0.5, 0.2),
        (((0.1, 0.0), (INF, 0.0)), 0.5, None),
        ((), 0.5, None),
    ],
)
def test_a_quantile_is_the_geometric_middle_of_its_bucket(buckets, q, value):
    """Half of the first bucket, the largest bound of the infinite one, None without samples."""
    found = quantile(buckets, q)
    assert found == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [(ROUTER_TTFT_BOUNDS_S, 0.005, 300.0), (ROUTER_ITL_BOUNDS_S, 0.001, 2.5)],
    ids=["ttft", "itl"],
)
@given(data=st.data())
def test_percentiles_of_the_routers_buckets_are_within_a_tenth_of_the_samples(bounds, low, high, data):
    """p50 and p99 as a client computes them from its own list, for any latencies in the range that matters."""
    samples = data.draw(st.lists(st.floats(low, high, exclude_min=True), min_size=1, max_size=200))
    counts = BucketCounts(bounds)
    for sample in samples:
        counts.observe(sample)
    buckets = tuple(zip((*bounds, INF), map(float, counts.cumulative()), strict=True))
    ordered = sorted(samples)
    for q in (0.5, 0.99):
        exact = ordered[math.ceil(q * len(ordered)) - 1]
        assert quantile(buckets, q) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize(
    ("bound_s", "missed", "share"),
    [(0.1, 0, 0.0), (0.2, 0, 0.5), (0.3, 0, 0.75), (0.4, 0, 1.0), (0.4, 20, 0.5), (9.0, 0, 1.0)],
)
def test_the_share_within_a_bound_counts_its_bucket_in_part(bound_s, missed, share):
    """Ten samples in (0.1, 0.2], ten in (0.2, 0.4]; what was missed is beyond any bound."""
    buckets = ((0.1, 0.0), (0.2, 10.0), (0.4, 20.0), (INF, 20.0))
    assert share_within(buckets, bound_s, missed=missed) == pytest.approx(share)
