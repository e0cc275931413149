"""The share served in time alongside the share that the planner's model predicts: of decisions, of ten minutes, over a run."""

from __future__ import annotations

import pytest

from penstock_planner.served_shares import LEAST_REQUESTS, ServedShares, agreement, served_of, share_windows


def _known(requests=50.0, late=0.0, arrivals=50.0, predicted_late=0.0):
    return ServedShares(0.9, 0.8, requests, late, arrivals, predicted_late)


def test_only_the_role_that_requests_reach_first_has_shares():
    """Its step of hindsight has both; another role's has neither, and one alone says nothing."""
    both = {"served_in_time": 0.9, "predicted_in_time": 0.8, "requests": 4.0, "late": 1.0}
    assert served_of([("demand", {}), ("hindsight", both)]) == ServedShares(0.9, 0.8, 4.0, 1.0)
    assert served_of([("hindsight", {"floor": 2})]) is None
    assert served_of([("hindsight", {**both, "predicted_in_time": None})]) is None


def test_ten_minutes_compare_first_tokens_with_arrivals():
    """Two decisions of one window: 5 of 100 late, 6 of 100 predicted; the next window begins at 600 s."""
    first, second = share_windows(
        [
            (0.0, _known(60.0, 5.0, 40.0, 2.0)),
            (599.0, _known(40.0, 0.0, 60.0, 4.0)),
            (600.0, _known(requests=100.0, arrivals=100.0)),
        ]
    )
    assert (first.at_s, first.requests, first.served) == (0.0, 100.0, 0.95)
    assert first.predicted == pytest.approx(0.94)
    assert (second.at_s, second.served, second.predicted) == (600.0, 1.0, 1.0)


@pytest.mark.parametrize(("predicted_late", "agreed"), [(1.0, 1.0), (1.2, 0.0)])
def test_windows_agree_within_a_point(predicted_late, agreed):
    """One predicted late of a hundred is a point, none was; a point and a fifth is too much."""
    windows = share_windows([(0.0, _known(100.0, 0.0, 100.0, predicted_late))])
    assert agreement(windows) == agreed


def test_few_requests_say_nothing():
    """One too few makes no window, and without windows there is no share of them."""
    few, enough = LEAST_REQUESTS - 1.0, 1.0 * LEAST_REQUESTS
    assert share_windows([(0.0, _known(few, 0.0, enough)), (600.0, _known(enough, 0.0, few))]) == ()
    assert agreement(()) is None
