"""Figures of a run, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role, SloConfig
from penstock.simulator.frontend import FrontendCounters, GapHistogram
from penstock.simulator.jobs import Job
from penstock.simulator.observer import SimulatedChange
from penstock.simulator.scoreboard import (
    attainment_over_time,
    goodput,
    measures,
    reversals,
    score,
)
from penstock.simulator.simulation import Simulation
from penstock.simulator.sweep import add_regrets
from penstock.simulator.workload import Workload
from penstock.workload.arrivals import Spread
from penstock.workload.trace_info import ideal_hits
from penstock.workload.traces import TraceRequest


def workload_of(requests, warmup=0):
    """Wrap requests."""
    return Workload("test", tuple(requests), warmup, 1.0, 0, 0, Spread.NONE)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 1.0), (2, 0.95), (3, 0.85)], (2.5, False)),
        ([(1, 0.8), (2, 0.7)], (None, False)),
        ([(1, 1.0), (2, 0.9)], (2, True)),
        ([(1, 1.0), (2, 0.8), (3, 0.95), (4, 0.85)], (1.5, False)),
        ([], (None, False)),
    ],
)
def test_goodput_is_where_the_curve_leaves_the_share(points, expected):
    """Interpolated before the first rate that misses 90%; a bound where none misses it."""
    found, is_bound = goodput(points)

    assert (None if found is None else pytest.approx(found), is_bound) == expected


def test_capacity_counts_what_is_in_time_after_the_warm_up(simple_world, request_at):
    """One server, 1 s each, all at once, SLO 3.5 s: of requests 2 to 6 two are in time."""
    requests = [request_at(0.0, 1000, line=line) for line in range(1, 7)]
    scenario = simple_world(slo=SloConfig(ttft="3500ms"))

    figures = score(Simulation(scenario, requests).run(), workload_of(requests, warmup=1), scenario)

    assert (figures["judged"], figures["ok"], figures["on_time"]) == (5, 6, 0.4)
    assert figures["ttft_s"]["p50"] == pytest.approx(4.0)
    assert figures["busiest_share"] == 1.0


def test_hits_are_weighed_by_tokens_beside_their_bound(simple_world, request_at):
    """Two workers in turn: the second round hits, at half the bound's rate per shared prefix."""
    requests = [request_at(i * 10.0, 1024, ids=(1, 100 + i)) for i in range(4)]
    scenario = simple_world(2, policy="round-robin")

    figures = score(Simulation(scenario, requests).run(), workload_of(requests), scenario)

    assert figures["hit_rate"] == pytest.approx(2 * 512 / 4096)
    assert figures["hit_bound"] == pytest.approx(3 * 512 / 4096)
    assert figures["hit_share_of_bound"] == pytest.approx(2 / 3, abs=1e-6)


def test_attainment_is_counted_by_arrival(simple_world, request_at):
    """Ten requests in the first 10 s overload the server; one after 60 s is in time."""
    requests = [request_at(float(i), 3000) for i in range(10)] + [request_at(60.0, 1000)]
    recording = Simulation(simple_world(), requests).run()

    times, shares = attainment_over_time(recording, 5.0, window_s=10.0)

    assert times == [10.0, 70.0]
    assert shares == [pytest.approx(0.1), 1.0]


def test_the_bound_is_one_endless_cache(request_at):
    """Prefixes count up to the first new block; a repeated prompt computes one token."""
    requests = [
        request_at(0, 1024, ids=(1, 2)),
        request_at(1, 1536, ids=(1, 2, 3)),
        request_at(2, 1024, ids=(9, 2)),
        request_at(3, 1000, ids=(1, 2)),
    ]

    assert ideal_hits(requests) == [0, 1024, 0, 999]


@given(st.lists(st.tuples(st.floats(1e-4, 10.0), st.integers(1, 50)), min_size=1, max_size=40))
def test_gap_percentiles_are_exact_to_a_bin(pairs):
    """Within 1% of the nearest rank of the expanded list."""
    gaps = GapHistogram()
    for gap_s, count in pairs:
        gaps.add(gap_s, count)
    expanded = np.sort(np.repeat([gap for gap, _ in pairs], [count for _, count in pairs]))

    for share in (0.5, 0.9, 0.99):
        exact = expanded[int(np.ceil(share * expanded.size)) - 1]
        assert gaps.percentile(share) == pytest.approx(exact, rel=0.0051)


def test_gaps_above_the_target_are_counted_for_the_planner():
    """Of nine gaps the five of 60 ms are above 50 ms; without a target none is late; each pull has its own."""
    for slo_s, late in ((0.05, 5), (None, 0)):
        gaps = GapHistogram(slo_s)
        frontend = FrontendCounters(gaps, 5.0)
        gaps.add(0.05, 4)
        gaps.add(0.06, 5)
        first, second = (frontend.collect(at_s, {}, {}) for at_s in (1.0, 2.0))
        assert (first.itl_count, first.itl_late) == (9, late)
        assert (second.itl_count, second.itl_late) == (0, 0)


def test_first_tokens_are_late_from_arrival_or_even_from_dispatch():
    """Three come after 6 s, with 5 s in time: two waited two seconds for a worker, which then had time enough; one half a second."""
    frontend = FrontendCounters(GapHistogram(), 5.0)
    for index, dispatched_s in enumerate((2.0, 0.5, 2.0)):
        job = Job(index, TraceRequest(0.0, 100, 10, None, index), ())
        job.dispatched_s = dispatched_s
        frontend.first_token(job, 6.0)
    demand = frontend.collect(6.0, {}, {})
    assert (demand.ttft_count, demand.ttft_late, demand.dispatched_late) == (3, 3, 1)


def test_regret_is_against_the_oracle_beside_the_same_router_and_rate():
    """1.5 GPU-hours of 1.0 and of 1.2; another router's oracle and another rate's do not count."""

    def row(planner, gpu_hours, qps=None, policy="dualmap"):
        named = {"policy": policy, "planner": planner, "router_count": 1, "qps": qps}
        return {**named, "gpu_hours": gpu_hours}

    rows = [row("hpa", 1.5), row("oracle", 1.0), row("oracle-one-step", 1.2), row("hpa", 1.5, qps=2.0)]
    routed = [row("hpa", 3.0), row("oracle", 2.0), row("hpa", 3.0, policy="preble")]
    add_regrets(rows)
    add_regrets(routed)

    assert [each["regret"] for each in rows] == [
        {"oracle": 1.5, "oracle-one-step": 1.25},
        {"oracle": 1.0, "oracle-one-step": 0.833333},
        {"oracle": 1.2, "oracle-one-step": 1.0},
        {},
    ]
    assert [each["regret"] for each in routed] == [{"oracle": 1.5}, {"oracle": 1.0}, {}]


def change(at_s, role, current, desired):
    """One change of the planner."""
    return SimulatedChange(at_s, role, current, desired, "")


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


def test_slow_tokens_miss_the_second_target_only(split_world, request_at):
    """A step takes 12 ms: 20 ms between tokens is in time, 10 ms is not; one token has no gap."""
    requests = [request_at(0.0, 1000, 50), request_at(5.0, 1000, 1)]
    shares = []
    for itl in ("20ms", "10ms"):
        scenario = split_world(1, 1, slo=SloConfig(itl=itl))
        shares.append(measures(Simulation(scenario, requests).run(), scenario)["in_time"])

    assert shares[0] == {"ttft": 1.0, "itl": 1.0, "both": 1.0}
    assert shares[1] == {"ttft": 1.0, "itl": 0.5, "both": 0.5}


def test_a_backlog_worked_out_by_hand(simple_world, request_at):
    """Five at once on a server of one a second, one more at 25 s: three of six are in time, ten seconds are bad."""
    scenario = simple_world(slo=SloConfig(ttft="2500ms"))
    requests = [*(request_at(0.0, line=line) for line in range(1, 6)), request_at(25.0)]

    recording = Simulation(scenario, requests).run()
    found = measures(recording, scenario)

    assert list(recording.requests.ttft_s) == pytest.approx([1, 2, 3, 4, 5, 1])
    assert found["in_time"]["ttft"] == 0.5
    assert found["violation_s"] == 10.0
    assert found["in_time_rps"] == pytest.approx(3 / 25)
    assert found["in_time_per_gpu_hour"] == pytest.approx(3 / (26 / 3600))
    assert (found["lost"], found["changes"], found["reversals"]) == (0, 0, 0)
