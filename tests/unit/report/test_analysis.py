"""GPU-hours, violations, demand, other fleets, curves and the view of a ledger, in exact numbers on hand-made records."""

from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.report import series
from penstock.report.analysis import GpuUse, gpu_use, violations
from penstock.report.counterfactual import Counterfactual, FleetKind, sentences, served_outcome
from penstock.report.findings import RunReport
from penstock.report.ledger_view import (
    DecisionMark,
    LoadOrigin,
    PlannerRun,
    RoleChange,
    view_of,
)
from penstock.workload.record import RequestStatus
from penstock.workload.results import LoadRun
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.demand.observation import NO_WORKERS, PoolCounts, Pull


def _pull(at_s, prefill=1, decode=1, draining=0):
    pools = {Role.PREFILL: PoolCounts(prefill), Role.DECODE: PoolCounts(decode, 0, draining)}
    return Pull(at_s, pools, NO_WORKERS, None)


def _mark(at_s, gpus_after):
    role = RoleChange(Role.DECODE, 1, 2, "up", "above_threshold", "decode 1 -> 2: KV", 0.95, "applied")
    return DecisionMark("d000001", at_s, (role,), gpus_after)


def _run(pulls, decisions=(), *, end_s, budget=8):
    return PlannerRun(DecideConfig(max_gpu_budget=budget), tuple(pulls), tuple(decisions), end_s=end_s)


def test_gpu_hours_are_what_was_held():
    """Two GPUs for an hour, three for half of one from the decision on, against eight and two all the time."""
    run = _run([_pull(0), _pull(3600), _pull(3700, decode=2)], [_mark(3600, 3)], end_s=5400)

    use = gpu_use(run, start_s=0, end_s=5400)

    assert use.used_hours == pytest.approx(2 + 1.5)
    assert use.static_max_hours == pytest.approx(12)
    assert use.static_min_hours == pytest.approx(3)
    assert (use.peak_gpus, use.budget_gpus) == (3, 8)
    assert use.saved_fraction == pytest.approx(1 - 3.5 / 12)


STEPS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), min_size=1, max_size=20)


@given(steps=STEPS, cut_s=st.floats(0, 100))
def test_the_hours_of_two_halves_are_those_of_the_whole(steps, cut_s):
    """Wherever a run is cut; never below the least that was held nor above the peak."""
    run = _run([_pull(at_s, decode=count) for at_s, count in sorted(steps)], end_s=120.0)
    start_s = run.pulls[0].at_s

    whole = gpu_use(run, start_s=-9, end_s=200.0)
    halves = [gpu_use(run, start_s=0, end_s=cut_s), gpu_use(run, start_s=cut_s, end_s=120.0)]

    assert whole.used_hours == pytest.approx(sum(half.used_hours for half in halves if half is not None))
    hours = (120.0 - start_s) / 3600
    assert (whole.start_s, whole.end_s) == (start_s, 120.0)  # what the ledger saw
    assert min(gpus for _, gpus in run.gpu_steps()) * hours <= whole.used_hours * (1 + 1e-9)
    assert whole.used_hours <= whole.peak_gpus * hours * (1 + 1e-9)


@pytest.mark.parametrize(
    ("from_s", "to_s", "note"),
    [
        (0, 700, None),
        (0, 300, "the ledger covers 300 s of the load run's 600 s"),
        (900, 1000, "the ledger covers 0 s of the load run's 600 s"),
    ],
)
def test_a_ledger_that_saw_part_of_the_run_says_so(from_s, to_s, note):
    """Figures over half of a run are not passed off as the whole's."""
    run = _run([_pull(from_s)], end_s=to_s)
    load = LoadRun({"throughput": {"duration_s": 600.0}}, ())
    report = RunReport(load, run, gpu_use(run, start_s=0, end_s=600.0), _nothing_missed())

    assert report.notes == (() if note is None else (note,))


def _nothing_missed():
    return violations([], ttft_target_s=None, itl_target_s=None)


def test_violations_count_requests_that_got_nothing(result_of):
    """At the target is within it; failed and rejected requests missed it."""
    results = [
        result_of(itl_s=array("f", [0.1, 0.3]), tpot_s=0.2),
        result_of(ttft_s=1.1, tpot_s=0.21),
        result_of(status=RequestStatus.FAILED),
        result_of(status=RequestStatus.REJECTED, ttft_s=None),
    ]

    missed = violations(results, ttft_target_s=1.0, itl_target_s=0.2)

    assert (missed.late_first_tokens, missed.requests) == (3, 4)
    assert (missed.long_gaps, missed.gaps, missed.slow_requests) == (1, 2, 3)
    assert missed.lines() == [
        "TTFT target 1 s: missed by 3 of 4 requests (75.0%), failed and rejected ones included",
        "ITL target 0.2 s: exceeded by 1 of 2 gaps (50.0%); on average (TPOT) by 3 of 4 requests (75.0%)",
    ]
    assert violations(results, ttft_target_s=None, itl_target_s=None).lines() == []


ORIGIN = LoadOrigin(simulated_s=100_000.0, unix_s=1_700_000_000.0, speed=20.0)


def test_the_view_counts_from_the_load_runs_zero(ledger_records):
    """One host: the shared simulated clock; the first pull of the synthetic ledger is 19 s before zero."""
    run = view_of(ledger_records, origin=ORIGIN)

    assert run.pulls[0].at_s == pytest.approx(-19)
    assert run.notes == ()
    assert run.decisions[0].at_s == pytest.approx(10)
    outcomes = {role.outcome for mark in run.decisions for role in mark.roles if role.action != "hold"}
    assert outcomes == {"applied"}
    assert all(role.mean is not None for mark in run.decisions for role in mark.roles)
    assert len(run.adjusting) == sum(mark.is_change for mark in run.decisions)
    assert all(end_s - begin_s == pytest.approx(8) for begin_s, end_s in run.adjusting)


def test_other_clocks_are_matched_by_the_wall(ledger_records):
    """Another host's monotonic clock has another origin, which is said; times from before a reboot are left out."""
    run = view_of(ledger_records, origin=replace(ORIGIN, simulated_s=5.0))
    rebooted = view_of(
        [{**ledger_records[0], "timeline": "boot-0", "at_s": 9e9}, *ledger_records], origin=ORIGIN
    )

    assert run.pulls[0].at_s == pytest.approx(-19, abs=1e-3)
    assert "different clocks" in run.notes[0]
    assert rebooted.pulls[0].at_s == pytest.approx(-19)


def test_a_planner_that_goes_on_is_shaded_while_replicas_start_or_drain(ledger_records):
    """It settles nothing: from the first pull with a starting replica to the first without."""
    header, *others = [record for record in ledger_records if record["type"] in ("header", "pull")]
    header = {**header, "config": {**header["config"], "mode": "hpa"}}
    for record in others[4:9]:
        record["pull"]["pools"]["decode"]["starting"] = 1
    run = view_of([header, *others], origin=ORIGIN)
    assert run.adjusting == ((run.pulls[4].at_s, run.pulls[9].at_s),)
    others[-1]["pull"]["pools"]["prefill"]["draining"] = 1
    assert view_of([header, *others], origin=ORIGIN).adjusting[1:] == ((run.end_s, run.end_s),)


def _use(end_s=100.0):
    return GpuUse(0.0, end_s, 2.0, 4.0, 1.0, 3, 4)


def _served(results, use=None):
    return served_outcome(results, use, name="adaptive", slo_s=5.0, duration_s=100.0)


def test_what_was_served_counts_lost_requests_as_late(result_of):
    """A rejected request, and one that failed after its first token, were not served in time."""
    results = [
        result_of(ttft_s=1.0),
        result_of(ttft_s=6.0),
        result_of(ttft_s=None, status=RequestStatus.REJECTED),
    ]
    results.append(result_of(ttft_s=1.0, status=RequestStatus.FAILED))

    served = _served(results, _use())

    assert (served.in_time, served.lost, served.gpu_hours) == (0.25, 2, 2.0)
    assert served.ttft_p99_s == 6.0
    assert served.source == "measured"
    # Unknown is never zero, and a part of a run is not passed off as the whole.
    assert [_served(results, use).gpu_hours for use in (None, _use(end_s=98.0))] == [None, None]


def test_the_sentences_say_what_a_fixed_fleet_would_have_cost(result_of):
    """Cost and attainment, each alongside what was served, and the planner's own row as the simulation's error."""
    served = _served([result_of(ttft_s=1.0), result_of(ttft_s=9.0)], _use())
    planner = replace(served, is_measured=False, gpu_hours=2.2)
    changes = {"name": "3P+1D", "kind": FleetKind.FIXED, "in_time": 0.75, "gpu_hours": 3.0}
    fixed = replace(planner, **changes, remark="cheapest")

    lines = sentences(Counterfactual(5.0, (served, planner, fixed), (fixed,), ()))

    assert lines[0].startswith(
        "adaptive itself, simulated: cost 2.200 GPU-hours (+10%) and kept 50.0% in time"
    )
    assert "the simulation's error" in lines[0]
    assert lines[1] == (
        "a fixed 3P+1D would have cost 3.000 GPU-hours (+50%) and kept 75.0% in time (+25.0 points) (cheapest)"
    )


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


def test_gaps_are_placed_at_their_tokens(result_of):
    """A gap's time is when the later token came; failed requests have none."""
    good = result_of(arrival_s=10.0, itl_s=array("f", [0.5, 0.25]))
    bad = result_of(itl_s=array("f", [9.0]), status=RequestStatus.FAILED)

    times, gaps = series.token_gaps([good, bad])

    assert list(times) == [11.5, 11.75]
    assert list(gaps) == [0.5, 0.25]
    assert series.token_gaps([bad])[0].size == 0


def test_requests_in_flight_are_counted(result_of):
    """One that begins as another ends is counted alongside it."""
    spans = ((0.0, 1.5), (0.5, 1.0), (1.5, 2.5))
    times, count = series.in_flight([result_of(arrival_s=begin, ended_s=end) for begin, end in spans])

    assert list(zip(times, count, strict=True)) == [(0, 1), (0.5, 2), (1, 1), (1.5, 2), (1.5, 1), (2.5, 0)]
    assert series.in_flight([])[1].size == 0
