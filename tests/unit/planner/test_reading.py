from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_planner.decide.demand.reading import Quality, assess


@pytest.mark.parametrize(
    ("value", "age_s", "quality", "why"),
    [
        (0.0, 0.0, Quality.FRESH, ""),
        (1.0, 10.0, Quality.FRESH, ""),
        (0.93, -0.2, Quality.FRESH, ""),
        (0.5, 10.001, Quality.STALE, "10 s old, more than 10 s"),
        (0.5, 600.0, Quality.STALE, "600 s old, more than 10 s"),
        (None, 0.0, Quality.MISSING, "not reported"),
        (math.nan, 0.0, Quality.MISSING, "value is NaN"),
        (math.inf, 0.0, Quality.MISSING, "value is inf"),
        (-math.inf, 0.0, Quality.MISSING, "value is -inf"),
        (-0.01, 0.0, Quality.MISSING, "value -0.01 is negative"),
        (1.2, 0.0, Quality.MISSING, "value 1.2 is above 1"),
        (0.5, math.nan, Quality.MISSING, "its age is NaN"),
    ],
)
def test_a_number_is_fresh_stale_or_missing_with_the_reason(value, age_s, quality, why):
    """Only finite values in range and young enough may be decided on; everything else says why not."""
    reading = assess(value, age_s=age_s, max_age_s=10.0, source="router", upper=1.0)
    assert (reading.quality, reading.why) == (quality, why)
    assert reading.is_known == (quality is Quality.FRESH)
    assert (reading.value is None) == (quality is Quality.MISSING)


@given(st.floats(), st.floats(), st.floats(min_value=0, max_value=1e6))
def test_whatever_comes_in_a_known_value_is_a_fraction(value, age_s, max_age_s):
    """No float at all can pass as a fresh fraction outside 0 to 1 or older than allowed."""
    reading = assess(value, age_s=age_s, max_age_s=max_age_s, source="x", upper=1.0)
    if reading.is_known:
        assert 0.0 <= reading.value <= 1.0
        assert 0.0 <= reading.age_s <= max_age_s
