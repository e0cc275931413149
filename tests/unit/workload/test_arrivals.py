"""Spreading and rates: order and mean rate are kept, batches never mix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.workload.arrivals import OnLong, Selection, Spread, mean_rate, rescale, select, spread
from penstock.workload.traces import TraceRequest


def _requests_at(*times):
    return [TraceRequest(at, 5, 5, None, line) for line, at in enumerate(times, start=1)]


def _times_of(requests):
    return [round(request.arrival_s, 6) for request in requests]


def _rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ((0, 0, 0, 3, 3), [0, 1, 2, 3, 4.5]),
        ((0, 0, 2.999, 2.999), [0, 1.4995, 2.999, 4.499]),
        ((0, 0, 9, 9), [0, 1.5, 9, 10.5]),
        ((5,), [5]),
        ((1, 2, 2.5), [1, 2, 2.5]),
    ],
)
def test_even_spreading_divides_the_interval(arrivals, expected):
    """Request i of n comes at i/n of three seconds, or of what is left before the next batch."""
    assert _times_of(spread(_requests_at(*arrivals), Spread.EVEN, rng=_rng())) == expected


batched = st.lists(st.integers(1, 9), min_size=2, max_size=20).map(
    lambda sizes: _requests_at(*[3.0 * index for index, size in enumerate(sizes) for _ in range(size)])
)


@given(batched, st.sampled_from(Spread))
def test_spreading_keeps_order_and_stays_in_its_interval(requests, how):
    """No request leaves its batch's three seconds, none overtakes another, none is lost."""
    moved = spread(requests, how, rng=_rng())

    assert [request.line for request in moved] == [request.line for request in requests]
    assert _times_of(moved) == sorted(_times_of(moved))
    for before, after in zip(requests, moved, strict=True):
        assert 0 <= after.arrival_s - before.arrival_s < 3.0


@given(batched, st.floats(0.01, 100))
def test_rate_sets_the_mean_and_keeps_the_shape(requests, rate):
    """The mean rate is the wanted one and every gap is stretched by the same factor."""
    scaled, factor = rescale(requests, rate_rps=rate)

    assert mean_rate(scaled) == pytest.approx(rate)
    assert factor == pytest.approx(rate / mean_rate(requests))
    assert [r.arrival_s * factor for r in scaled] == pytest.approx([r.arrival_s for r in requests])


def test_a_rate_is_said_once():
    """The message names both flags."""
    with pytest.raises(ConfigError, match=r"--rate and --rate-scale: .* give one"):
        rescale(_requests_at(0, 1), rate_rps=1.0, rate_scale=1.0)


def test_requests_that_all_come_at_once_have_no_rate():
    """Nothing can be stretched to a rate when no time passes."""
    assert mean_rate(_requests_at(3)) is None
    assert mean_rate(_requests_at(3, 3)) is None
    with pytest.raises(ConfigError, match="arrive at once"):
        rescale(_requests_at(3, 3), rate_rps=2.0)


REQUESTS = [TraceRequest(float(at), 100 * (at + 1), 5, None, at + 1) for at in range(10)]


def _lines(selected):
    return [request.line for request in selected[0]]


def test_the_window_is_closed_at_its_start_and_open_at_its_end():
    """Arrivals count from the window's begin."""
    selected = select(REQUESTS, Selection(start_s=2, duration_s=3))

    assert [request.arrival_s for request in selected[0]] == [0, 1, 2]
    assert _lines(selected) == [3, 4, 5]


def test_dropping_leaves_long_prompts_out_before_the_count():
    """The limit counts what is replayed; what was dropped is said."""
    selected = select(REQUESTS, Selection(start_s=1, max_input_tokens=400, on_long=OnLong.DROP, limit=3))

    assert _lines(selected) == [2, 3, 4]
    assert selected[1:] == (0, 0)
    assert select(REQUESTS, Selection(max_input_tokens=400, on_long=OnLong.DROP))[2] == 6


def test_truncating_keeps_the_beginning_and_its_ids():
    """A cut prompt has the limit's tokens and as many ids as they need."""
    request = TraceRequest(0, 2000, 5, (1, 2, 3, 4), 1)

    selected = select([request], Selection(max_input_tokens=600, on_long=OnLong.TRUNCATE))

    assert selected == ([TraceRequest(0, 600, 5, (1, 2), 1)], 1, 0)


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
