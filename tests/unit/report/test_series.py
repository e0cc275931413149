"""Numbers behind the pictures."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.report import series
from penstock.workload.record import RequestStatus


def _result(sent_s, ended_s, **changes):
    fields = {"sent_s": sent_s, "ended_s": ended_s, "arrival_s": sent_s, "status": RequestStatus.OK}
    return SimpleNamespace(**{**fields, **changes})


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5000))
def test_a_distribution_is_thinned_and_ends_at_one(values):
    """Values and shares rise; the largest value has share 1."""
    shown, share = series.cdf(values)

    assert shown.size <= series.MAX_CURVE_POINTS
    assert (np.diff(shown) >= 0).all()
    assert (np.diff(share) > 0).all()
    assert (shown[-1], share[-1]) == (max(values), 1.0)


def test_running_percentiles_see_their_window_only():
    """A window without values is a gap, not a zero."""
    times, values = np.array([0.0, 1.0, 100.0]), np.array([1.0, 3.0, 9.0])

    centres, found = series.running_percentiles(times, values, ranks=(50, 99), window_s=10.0)

    assert list(centres[:2]) == [0.0, 5.0]
    assert list(found[:, 0]) == [1.0, 3.0]
    assert np.isnan(found[0, 5])
    assert found[0, -1] == 9.0
    assert series.running_percentiles(np.empty(0), np.empty(0), ranks=(50,), window_s=1.0)[0].size == 0


def test_gaps_are_placed_at_their_tokens():
    """A gap's time is when the later token came; failed requests have none."""
    good = _result(10.0, 12.0, ttft_s=1.0, itl_s=array("f", [0.5, 0.25]))
    bad = _result(0.0, 1.0, ttft_s=1.0, itl_s=array("f", [9.0]), status=RequestStatus.FAILED)

    times, gaps = series.token_gaps([good, bad])

    assert list(times) == [11.5, 11.75]
    assert list(gaps) == [0.5, 0.25]
    assert series.token_gaps([bad])[0].size == 0


def test_requests_in_flight_are_averaged_over_time():
    """Two requests over half a bin each are one on average; the peak counts those that began before."""
    edges, mean, peak = series.in_flight([_result(0.0, 1.5), _result(0.5, 1.0), _result(2.0, 2.5)])

    assert list(edges) == [0.0, 1.0, 2.0, 3.0]
    assert list(mean) == pytest.approx([1.5, 0.5, 0.5])
    assert list(peak) == [2.0, 1.0, 1.0]
    assert series.in_flight([])[1].size == 0


def test_arrivals_are_counted_per_second():
    """Bins are whole seconds and widen for long runs."""
    edges, rate = series.arrivals_per_s([_result(0.0, 1), _result(0.5, 1), _result(2.0, 3)])
    wide, _ = series.arrivals_per_s([_result(0.0, 1), _result(3599.0, 3600)])

    assert list(rate) == [2.0, 0.0, 1.0]
    assert edges[1] - edges[0] == 1.0
    assert wide[1] - wide[0] == 30.0
    assert series.arrivals_per_s([])[1].size == 0
