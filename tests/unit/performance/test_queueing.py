"""Waiting against values worked out by hand and against what must hold of any pool."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.performance.queueing import most_in_flight, wait_probability, wait_quantile_s


@pytest.mark.parametrize(
    ("servers", "load", "expected"),
    [
        (1, 0.5, 0.5),
        (2, 1.0, 1 / 3),
        (3, 2.0, 4 / 9),
        (2, 1.6, 0.7111),
        (10, 8.0, 0.4092),
        (1, 0.0, 0.0),
        (2, 2.0, 1.0),
        (2, 5.0, 1.0),
    ],
)
def test_erlangs_c(servers, load, expected):
    """Textbook values: M/M/1 waits with its utilisation, M/M/2 at load 1 with a third, M/M/3 at load 2 with 4/9."""
    assert wait_probability(servers, load) == pytest.approx(expected, abs=1e-4)


def test_the_wait_of_one_server():
    """M/M/1 at half load, service 0.1 s: a tenth waits longer than 0.2 s · ln 5."""
    found = wait_quantile_s(1, 5.0, 0.1, variability=1.0, quantile=0.9)

    assert found == pytest.approx(0.2 * math.log(5))


def test_half_the_variability_is_half_the_wait():
    """Fixed service times after Poisson arrivals: (1 + 0) / 2."""
    found = wait_quantile_s(1, 5.0, 0.1, variability=0.5, quantile=0.9)

    assert found == pytest.approx(0.1 * math.log(5))


def test_a_pool_that_cannot_keep_up_waits_for_ever():
    """At and above one server per request in service."""
    assert wait_quantile_s(2, 20.0, 0.1, variability=1.0, quantile=0.5) == math.inf


@given(st.integers(1, 200), st.floats(0, 300), st.floats(0.01, 3), st.floats(0.5, 0.999))
def test_another_server_never_lengthens_the_wait(servers, load, variability, quantile):
    """Monotone in replicas, whatever the load."""
    waits = [
        wait_quantile_s(count, load, 1.0, variability=variability, quantile=quantile)
        for count in (servers, servers + 1)
    ]

    assert waits[1] <= waits[0]
    assert 0 <= wait_probability(servers, load) <= 1


@given(st.floats(0.01, 1000), st.floats(0.5, 0.999))
def test_in_flight_exceeds_its_mean(mean, quantile):
    """The percentile of a Poisson number is no less than its mean."""
    assert most_in_flight(mean, quantile) >= mean
