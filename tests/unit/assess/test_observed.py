"""Series as a Prometheus gives them: gaps, histograms, windows, burstiness."""

from __future__ import annotations

import math

import numpy as np
import pytest
from observed_fleets import observed

from penstock.assess.observed import arrivals_of, buckets_of, busiest_window, dispersion, filled, gaps_in

NAN = math.nan


def test_a_histogram_is_read_by_bucket_and_an_unknown_step_stays_unknown():
    """Cumulative series become counts; a step that no series has is NaN, not zero."""
    found = buckets_of(
        {"1": np.array([2.0, NAN]), "+Inf": np.array([5.0, NAN]), "0.5": np.array([1.0, NAN])},
        np.array([9.0, NAN]),
    )
    assert found.bounds == (0.5, 1.0, math.inf)
    assert found.counts[0].tolist() == [1, 1, 3]
    assert np.isnan(found.counts[1]).all()
    assert found.mean() == 9 / 5


def test_extrapolated_rates_never_give_negative_counts():
    """A larger bucket that reads a little less than a smaller one holds nothing more."""
    found = buckets_of({"1": np.array([3.02]), "+Inf": np.array([3.0])}, np.array([1.0]))
    assert found.counts.tolist() == [[3.02, 0.0]]


def test_arrivals_are_first_tokens_and_what_the_queue_has_grown_by():
    """Ten first tokens while four more wait are fourteen arrivals; a queue that empties is none of its own."""
    first, waiting = np.array([10.0, 10.0, 10.0]), np.array([0.0, 4.0, 0.0])
    assert arrivals_of(first, waiting).tolist() == [10, 14, 6]
    assert arrivals_of(first, None) is first


def test_unknown_values_take_the_one_before_and_gaps_are_listed():
    """The first known value also stands for what is before it."""
    values = np.array([NAN, 2.0, NAN, NAN, 3.0, NAN])
    assert filled(values).tolist() == [2, 2, 2, 2, 3, 3]
    assert gaps_in(values) == [(0, 1), (2, 4), (5, 6)]


@pytest.mark.parametrize(
    ("arrivals", "most", "window"),
    [
        ([10, 10, 50, 10, 10], 1000, (0, 5)),
        ([10, 10, 50, 10, 10], 70, (1, 4)),
        ([10, 10, 50, 10, 10], 1, (2, 3)),
        ([10, *[NAN] * 11, 10, 50, 10], 1000, (12, 15)),
        ([10, NAN, 10, 50, 10], 1000, (0, 5)),
    ],
)
def test_the_simulated_window_surrounds_the_busiest_step_and_crosses_no_long_gap(arrivals, most, window):
    """A day without samples is not simulated as an idle one; a lost scrape does not end the window."""
    assert busiest_window(observed(arrivals), most) == window


def test_burstiness_is_1_for_poisson_and_does_not_see_a_slow_trend():
    """Counts that only follow a rising rate are as regular as Poisson's; those that come in clumps are not."""
    rng = np.random.default_rng(1)
    rising = rng.poisson(np.linspace(5, 50, 2000))
    assert dispersion(rising) == pytest.approx(1.0, abs=0.1)
    assert dispersion(rng.poisson(np.repeat(rng.gamma(2, 10, 2000), 1))) > 5
    assert dispersion([4, 0, 9]) == 1.0
