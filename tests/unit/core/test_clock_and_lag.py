"""Simulated time and lateness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError
from penstock.core.lag import LagTracker


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_not_a_positive_number_is_refused(speed):
    """The message names the flag, so the user knows what to correct."""
    with pytest.raises(ConfigError, match="--speed"):
        SimulatedClock(speed)


@given(st.floats(0.001, 1000), st.floats(0, 1e6))
def test_real_and_modelled_durations_invert_each_other(speed, duration_s):
    """to_real_s and to_model_s are inverse within rounding."""
    clock = SimulatedClock(speed)

    assert pytest.approx(duration_s) == clock.to_model_s(clock.to_real_s(duration_s))


def test_twenty_times_as_fast_is_a_twentieth_of_the_wait():
    """--speed 20 turns an interval of 30 simulated seconds into 1.5 real ones."""
    assert SimulatedClock(20).to_real_s(30) == 1.5


def test_two_clocks_of_one_speed_agree():
    """Processes of one host share the origin."""
    first, second = SimulatedClock(20), SimulatedClock(20)

    before = first.now_s()
    between = second.now_s()
    after = first.now_s()

    assert before <= between <= after


def test_no_samples_give_no_percentile():
    """Unknown is None, never 0."""
    assert LagTracker().p99_s() is None


def test_the_percentile_is_the_nearest_rank():
    """Of 1..100 the 99th percentile is 99 and the median 50."""
    lag = LagTracker()
    for value in range(1, 101):
        lag.record(value)

    assert lag.p99_s() == 99


def test_being_early_counts_as_no_lag():
    """Negative lateness is 0, and still counts as a sample."""
    lag = LagTracker()
    lag.record(-5.0)

    assert lag.p99_s() == 0.0
    assert lag.total == 1


def test_only_the_newest_window_counts():
    """An old spike leaves the window; the total remembers all samples."""
    lag = LagTracker(window=2)
    for value in (100.0, 1.0, 1.0):
        lag.record(value)

    assert lag.p99_s() == 1.0
    assert lag.total == 3
