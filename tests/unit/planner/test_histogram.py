from __future__ import annotations

import math

import pytest

from penstock_planner.histogram import gained, quantile

INF = math.inf


@pytest.mark.parametrize(
    ("buckets", "q", "value"),
    [
        (((0.1, 10.0), (0.2, 20.0), (INF, 20.0)), 0.5, 0.1),
        (((0.1, 10.0), (0.2, 20.0), (INF, 20.0)), 0.75, 0.15),
        (((0.1, 10.0), (0.2, 20.0), (INF, 20.0)), 0.25, 0.05),
        (((0.1, 0.0), (0.2, 0.0), (INF, 5.0)), 0.5, 0.2),
        (((0.1, 0.0), (INF, 0.0)), 0.5, None),
        ((), 0.5, None),
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(buckets, q, value):
    """As PromQL does it; None without samples."""
    found = quantile(buckets, q)
    assert found == (None if value is None else pytest.approx(value))


def test_only_what_was_gained_counts():
    """The interval's own samples, not those since the router's start."""
    before = ((0.1, 10.0), (INF, 10.0))
    after = ((0.1, 10.0), (INF, 14.0))
    assert gained(before, after) == ((0.1, 0.0), (INF, 4.0))


def test_a_restarted_counter_counts_from_zero():
    """A count that fell is a new process."""
    assert gained(((0.1, 10.0), (INF, 10.0)), ((0.1, 2.0), (INF, 3.0))) == ((0.1, 2.0), (INF, 3.0))
    assert gained((), ((0.1, 2.0), (INF, 3.0))) == ((0.1, 2.0), (INF, 3.0))
