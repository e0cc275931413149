"""Window, sample, length limit and count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.workload.arrivals import OnLong, Selection, select
from penstock.workload.traces import TraceRequest

REQUESTS = [TraceRequest(float(at), 100 * (at + 1), 5, None, at + 1) for at in range(10)]


def _lines(selected):
    return [request.line for request in selected.requests]


def test_the_window_is_closed_at_its_start_and_open_at_its_end():
    """Arrivals count from the window's begin."""
    selected = select(REQUESTS, Selection(start_s=2, duration_s=3))

    assert [request.arrival_s for request in selected.requests] == [0, 1, 2]
    assert _lines(selected) == [3, 4, 5]


def test_dropping_leaves_long_prompts_out_before_the_count():
    """The limit counts what is replayed; what was dropped is said."""
    selected = select(REQUESTS, Selection(start_s=1, max_input_tokens=400, on_long=OnLong.DROP, limit=3))

    assert _lines(selected) == [2, 3, 4]
    assert (selected.truncated, selected.dropped) == (0, 0)
    assert select(REQUESTS, Selection(max_input_tokens=400, on_long=OnLong.DROP)).dropped == 6


def test_truncating_keeps_the_beginning_and_its_ids():
    """A cut prompt has the limit's tokens and as many ids as they need."""
    request = TraceRequest(0, 2000, 5, (1, 2, 3, 4), 1)

    selected = select([request], Selection(max_input_tokens=600, on_long=OnLong.TRUNCATE))

    assert selected.requests == (TraceRequest(0, 600, 5, (1, 2), 1),)
    assert selected.truncated == 1


@given(st.integers(0, 5), st.floats(0.05, 0.5))
def test_a_sample_repeats_under_a_seed_and_grows_with_its_share(seed, share):
    """The same seed keeps the same rows in any window; a smaller share is a subset."""
    requests = [TraceRequest(float(at), 1, 1, None, at + 1) for at in range(300)]
    small = _lines(select(requests, Selection(sample=share), seed=seed))
    large = _lines(select(requests, Selection(sample=share * 2), seed=seed))
    late = _lines(select(requests, Selection(sample=share * 2, start_s=100), seed=seed))

    assert set(small) <= set(large)
    assert late == [line for line in large if line > 100]
    assert _lines(select(requests, Selection(sample=share), seed=seed)) == small


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"start_s": -1.0}, "--start-s"),
        ({"start_s": float("inf")}, "--start-s"),
        ({"duration_s": 0.0}, "--duration-s"),
        ({"sample": 0.0}, "--sample"),
        ({"sample": 1.1}, "--sample"),
        ({"limit": 0}, "--limit"),
        ({"max_input_tokens": 0, "on_long": OnLong.DROP}, "--max-input-tokens: 0"),
        ({"max_input_tokens": 5}, "--max-input-tokens and --on-long go together"),
        ({"on_long": OnLong.DROP}, "--max-input-tokens and --on-long go together"),
    ],
)
def test_a_selection_out_of_bounds_is_refused(keywords, message):
    """The message names the flag."""
    with pytest.raises(ConfigError, match=message):
        Selection(**keywords)


def test_an_empty_selection_says_how_far_the_trace_reaches():
    """A window past the end is the likeliest mistake."""
    with pytest.raises(ConfigError, match=r"no request is left .* the trace ends at 9 s"):
        select(REQUESTS, Selection(start_s=50))
