"""Bounds by the formulas of the planner's document."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.performance.recommend import Bounds, kv_bounds, queue_bounds

SECONDS = st.floats(1e-3, 100)


def test_the_documents_own_example():
    """Its output shows 0.24/0.10 for TTFT 48.37 ms, which is a target of 50 ms, and 0.20/0.10 for an empty cache."""
    assert queue_bounds(0.05, 0.04837) == Bounds(0.24, 0.1)
    assert kv_bounds(0.004) == Bounds(0.2, 0.1)


@pytest.mark.parametrize(
    ("kv_usage", "upper", "lower"), [(0.5, 0.7, 0.3), (0.9, 1.0, 0.7), (1.0, 1.0, 0.8), (0.05, 0.25, 0.1)]
)
def test_kv_bounds_are_clipped(kv_usage, upper, lower):
    """± 0.2, within 0.1 to 1."""
    assert kv_bounds(kv_usage) == Bounds(upper, lower)


@given(SECONDS, SECONDS)
def test_the_upper_bound_is_above_the_lower(target_s, ttft_s):
    """Whatever was measured, a planner accepts the bounds."""
    found = queue_bounds(target_s, ttft_s)
    assert found.upper > found.lower >= 0.1


@given(st.floats(0, 2))
def test_kv_bounds_are_thresholds_that_a_planner_accepts(kv_usage):
    """Both in (0, 1], the upper one above the lower."""
    found = kv_bounds(kv_usage)
    assert 0.1 <= found.lower < found.upper <= 1
