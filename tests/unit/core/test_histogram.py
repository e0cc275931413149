"""Bucket counts."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.histogram import (
    TOKEN_GAP_BOUNDS_S,
    BucketCounts,
)


def test_bounds_are_inclusive_and_counts_cumulative():
    """A sample on a bound counts below it; what exceeds all bounds counts in the last number only."""
    histogram = BucketCounts((1.0, 2.0))
    histogram.observe(1.0, 3)
    histogram.observe(1.5)
    histogram.observe(9.0, 2)
    assert histogram.cumulative() == [3, 4, 6]
    assert histogram.total == 22.5


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(0, 50))))
def test_cumulative_counts_rise_to_the_number_of_samples(samples):
    """Whatever is observed, counts never fall from bucket to bucket and end at the number of samples."""
    histogram = BucketCounts(TOKEN_GAP_BOUNDS_S)
    for value, count in samples:
        histogram.observe(value, count)
    counts = histogram.cumulative()
    assert counts == sorted(counts)
    assert counts[-1] == sum(count for _, count in samples)
