"""What a planner is judged by, worked out by hand."""

import numpy as np
import pytest

from penstock.api import Role
from penstock.simulator.observer import PlannerChange
from penstock.simulator.scoreboard import measures, reversals, violation_s
from penstock.simulator.simulation import Simulation


def change(at_s, role, current, desired):
    """One change of the planner."""
    return PlannerChange(at_s, role, current, desired, "")


def test_a_reversal_is_a_change_against_the_roles_last_one():
    """Up, up, down, up of prefill are two; decode's single step is none."""
    made = [
        change(1, Role.PREFILL, 1, 2),
        change(2, Role.DECODE, 2, 1),
        change(3, Role.PREFILL, 2, 4),
        change(4, Role.PREFILL, 4, 3),
        change(5, Role.PREFILL, 3, 4),
    ]

    assert reversals(made) == 2
    assert reversals([]) == 0


def test_ten_seconds_with_fewer_than_nine_in_ten_in_time_are_violated():
    """9 of 10 are fine, 8 of 10 are not, a window without arrivals is neither."""
    arrivals = np.array([*np.linspace(0, 9, 10), *np.linspace(20, 29, 10)])
    good = np.array([True] * 9 + [False] + [True] * 8 + [False] * 2)

    assert violation_s(arrivals, good) == 10.0
    assert violation_s(np.empty(0), np.empty(0, dtype=bool)) == 0.0


def test_slow_tokens_miss_the_second_target_only(split_world, request_at):
    """A step takes 12 ms: 20 ms between tokens is in time, 10 ms is not; one token has no gap."""
    requests = [request_at(0.0, 1000, 50), request_at(5.0, 1000, 1)]
    shares = []
    for itl_slo_s in (0.02, 0.01):
        scenario = split_world(1, 1, itl_slo_s=itl_slo_s)
        shares.append(measures(Simulation(scenario, requests).run(), scenario)["in_time"])

    assert shares[0] == {"ttft": 1.0, "itl": 1.0, "both": 1.0}
    assert shares[1] == {"ttft": 1.0, "itl": 0.5, "both": 0.5}


def test_a_backlog_worked_out_by_hand(simple_world, request_at):
    """Five at once on a server of one a second, one more at 25 s: three of six are in time, ten seconds are bad."""
    scenario = simple_world(slo_s=2.5)
    requests = [*(request_at(0.0, line=line) for line in range(1, 6)), request_at(25.0)]

    recording = Simulation(scenario, requests).run()
    found = measures(recording, scenario)

    assert list(recording.requests.ttft_s) == pytest.approx([1, 2, 3, 4, 5, 1])
    assert found["in_time"]["ttft"] == 0.5
    assert found["violation_s"] == 10.0
    assert found["in_time_rps"] == pytest.approx(3 / 25)
    assert found["in_time_per_gpu_hour"] == pytest.approx(3 / (26 / 3600))
    assert (found["lost"], found["changes"], found["reversals"]) == (0, 0, 0)
