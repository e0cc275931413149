"""Simulated time and lateness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clock import LagTracker, SimulatedClock
from penstock.core.errors import ConfigError
from penstock.core.stamps import seconds, stamp


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_not_a_positive_number_is_refused(speed):
    """The message names the flag, so the user knows what to correct."""
    with pytest.raises(ConfigError, match="--speed"):
        SimulatedClock(speed)


@given(st.floats(0.001, 1000), st.floats(0, 1e6))
def test_real_and_modelled_durations_invert_each_other(speed, duration_s):
    """to_real_s and to_simulated_s are inverse within rounding."""
    clock = SimulatedClock(speed)

    assert pytest.approx(duration_s) == clock.to_simulated_s(clock.to_real_s(duration_s))


@pytest.mark.parametrize(
    ("samples", "window", "p99_s"),
    [
        ([], 4096, None),
        (range(1, 101), 4096, 99),
        ([-5.0], 4096, 0.0),
        ([100.0, 1.0, 1.0], 2, 1.0),
    ],
    ids=["unknown is none", "nearest rank", "early is not a lag", "an old spike leaves the window"],
)
def test_the_lag_is_the_99th_percentile_of_the_newest_samples(samples, window, p99_s):
    """The total remembers all of them."""
    lag = LagTracker(window=window)
    for value in samples:
        lag.record(value)

    assert lag.p99_s() == p99_s
    assert lag.total == len(samples)


@pytest.mark.parametrize("text", [None, 5, "", "yesterday", "2026-13-01T00:00:00Z"])
def test_what_is_no_time_is_unknown(text):
    """A hand-made annotation cannot break the operator."""
    assert seconds(text) is None


@given(st.integers(0, 4_000_000_000))
def test_times_survive_the_round_trip(at_s):
    """What is written on a pod is read back as the same second."""
    assert seconds(stamp(at_s + 0.5)) == at_s
