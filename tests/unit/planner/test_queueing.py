"""The wait that a number of workers implies, against what queueing theory has in closed form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_planner.decide.capacity import queueing


def test_one_worker_with_random_gaps_and_services_is_an_m_m_1_queue():
    """Rho / (1 - rho) services of wait, and an exponential tail with rate (1 - rho) / s."""
    assert queueing.mean_wait_s(1, 0.8, service_s=1.0, variability=2.0) == pytest.approx(4.0)
    late = queueing.late_fraction(1, 0.8, service_s=1.0, variability=2.0, may_wait_s=5.0)
    assert late == pytest.approx(0.8 * math.exp(-0.2 * 5.0))


def test_constant_services_wait_half_as_long():
    """Pollaczek and Khinchine: M/D/1 waits half of M/M/1."""
    constant = queueing.mean_wait_s(1, 0.8, service_s=1.0, variability=1.0)
    assert constant == pytest.approx(2.0)


@given(
    workers=st.integers(1, 200),
    service_s=st.floats(0.01, 10),
    variability=st.floats(0.25, 8),
    may_wait_s=st.floats(0.01, 60),
    late=st.floats(0.001, 0.5),
)
def test_the_greatest_load_is_the_one_at_which_the_share_is_reached(
    workers, service_s, variability, may_wait_s, late
):
    """What is found keeps the share, and a hundredth more of the workers' time does not."""
    given_ = {"service_s": service_s, "variability": variability, "may_wait_s": may_wait_s}
    load = queueing.max_load(workers, **given_, late=late)
    assert 0 <= load <= workers
    assert queueing.late_fraction(workers, load * (1 - 1e-6), **given_) <= late
    above = min(load + 0.01 * workers, workers)
    assert above == workers or queueing.late_fraction(workers, above, **given_) > late
