"""ITL counts while all streams decode, and not while prompts are still read."""

from array import array

import pytest

from penstock.profiler.measure import Stream, steady


def stream(first_s, gaps_s):
    """A stream of single tokens."""
    return Stream(first_s, array("f", gaps_s), len(gaps_s) + 1)


def test_equal_streams_show_their_gap():
    """Two streams of 10 ms make 200 tokens a second."""
    found = steady([stream(0.0, [0.01] * 40), stream(0.05, [0.01] * 40)])

    assert found.itl_s == pytest.approx(0.01)
    assert found.tokens_per_s == pytest.approx(200)


def test_gaps_before_the_last_stream_begins_do_not_count():
    """While the second prompt was read, the first stream stood still for a second."""
    late = stream(1.0, [0.01] * 30)

    assert steady([stream(0.0, [0.9, 0.09] + [0.01] * 30), late]).itl_s == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("start_s", [0.35, 5.0])
def test_streams_that_hardly_overlap_show_nothing(start_s):
    """Too few tokens, or none: the engine did not run both at once."""
    assert steady([stream(0.0, [0.01] * 40), stream(start_s, [0.01] * 40)]) is None
