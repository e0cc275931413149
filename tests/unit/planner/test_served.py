"""What was served corrects what the shadow fleets' model says of all fleets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock_planner.decide.config import Mode
from penstock_planner.decide.demand.load import Work, may_wait_s
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.objective.model_comparison import SHARE_LEAST, ModelComparison
from penstock_planner.decide.objective.shadow_fleets import PulledLoad
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay
from penstock_planner.sources.base import DISPATCHED_TTFT, ITL, TTFT

P = Role.PREFILL


def _load(*, arrivals=10.0, work_s=6.0, calm=False):
    """Return ten seconds of a request a second."""
    return PulledLoad(
        dt_s=10.0,
        arrivals=arrivals,
        work_gpu_s=work_s,
        work_s=work_s,
        may_wait_s=4.0,
        kv_busy_workers=0.0,
        workers_needed=1.0,
        workers_to_keep=1.0,
        startup_s=60.0,
        hold_s=60.0,
        sizes=4,
        served_at_once_by=1 if calm else None,
        is_in_time_first=True,
    )


def _after(pulls, known=None, *, late=0.0, late_alone=None, is_entry_late=True, usual_requests=500.0, **load):
    known = known or ModelComparison()
    for _ in range(pulls):
        known = known.followed(
            _load(**load),
            P,
            ready=1,
            first=10.0,
            late=late,
            late_alone=late_alone,
            is_entry_late=is_entry_late,
            slo_s=5.0,
            usual_requests=usual_requests,
        )
    return known


def test_a_model_that_is_right_stays_as_it_is():
    """Six seconds of work in ten for one worker, and nothing late: every worker does all of its throughput."""
    known = _after(100)
    assert (known.share, known.in_time, known.predicted_in_time) == (1.0, 1.0, 1.0)


def test_ten_late_requests_move_almost_nothing():
    """Of five hundred in half an hour: two hundredths; of five thousand a five-hundredth."""
    assert _after(1, late=10.0).share == pytest.approx(0.98)
    assert _after(1, late=10.0, usual_requests=5000.0).share == pytest.approx(0.998)


def test_requests_that_are_late_without_a_reason_lower_what_every_worker_is_taken_to_do():
    """Half of them late for ten minutes, in which the fluid has one worker idle for four seconds in ten."""
    known = _after(60, late=5.0)
    assert known.share == pytest.approx(SHARE_LEAST)
    assert known.in_time == pytest.approx(0.5)


def test_the_model_finds_to_what_was_served():
    """Where a fifth is late, and the share falls until the shadow of the real fleet has as many late, it stays there."""
    known, predicted = ModelComparison(), []
    for _ in range(400):
        share = known.share_of(P)
        known = known.followed(
            _load(work_s=8.0 / share),
            P,
            ready=1,
            first=10.0,
            late=2.0,
            late_alone=None,
            is_entry_late=True,
            slo_s=5.0,
            usual_requests=500.0,
        )
        predicted.append(known.predicted_in_time)
    assert known.in_time == pytest.approx(0.8)
    assert predicted[-1] == pytest.approx(0.8, abs=0.02)
    assert SHARE_LEAST < known.share < 0.8


def test_prompts_that_are_late_in_any_fleet_are_no_want_of_workers():
    """A tenth is late while a worker is idle and nothing waits: no share of the throughput explains them."""
    calm = _after(100, late=1.0, calm=True)
    assert calm.predicted_in_time == pytest.approx(0.9, abs=0.01)
    assert _after(100, calm, late=1.0).share == pytest.approx(calm.share, abs=0.02)
    assert calm.share > 0.9


def test_what_is_late_in_calm_is_counted_as_it_comes():
    """After a quarter of an hour of a tenth, half of ten are late in calm: all of them in any fleet, and none for lack of a worker.

    By the usual share four of them would be unexplained, and a worker more would be tried for long prompts.
    """
    after = _after(1, _after(100, late=1.0, calm=True), late=5.0, calm=True)
    assert (after.newest.predicted_late, after.unexplained) == (5.0, 0.0)


def test_what_is_late_after_its_dispatch_is_no_want_of_workers():
    """Half of ten are late while all workers are busy: those that a worker took too long for are so in any fleet, and no others."""
    known = _after(60, late=5.0, late_alone=5.0)
    assert (known.share, known.unexplained) == (1.0, 0.0)
    assert known.predicted_in_time == pytest.approx(0.5)
    assert _after(1, late=5.0, late_alone=2.0).unexplained == pytest.approx(3.0)
    assert _after(1, late=5.0).unexplained == pytest.approx(5.0), "without the count"


def test_what_waits_for_decode_says_nothing_of_prefill():
    """Late behind full decode workers: counted, and the model of prefill stays."""
    known = _after(60, late=5.0, is_entry_late=False)
    assert (known.share, known.in_time) == (1.0, pytest.approx(0.5))


def test_what_waits_for_decode_is_late_in_no_other_fleet():
    """Prefill idles and its queue is empty, as all wait inside decode workers: more of those would serve them in time."""
    after = _after(60, _after(60, late=5.0, is_entry_late=False, calm=True), calm=True)
    assert after.predicted_in_time == pytest.approx(1.0)


def test_another_graph_takes_the_correction_and_nothing_of_this_traffic():
    """An export has the share alone."""
    known = _after(60, late=5.0)
    assert known.for_other_graph() == ModelComparison(share=known.share)


@given(st.lists(st.tuples(st.floats(0, 40), st.floats(0, 40), st.integers(0, 8)), max_size=40))
def test_the_correction_keeps_within_its_bounds(windows):
    """Whatever is served: a worker does half of its throughput at least, and no more than all of it."""
    known = ModelComparison()
    for work_s, late, ready in windows:
        known = known.followed(
            _load(work_s=work_s),
            P,
            ready=ready,
            first=max(10.0, late),
            late=late,
            late_alone=None,
            is_entry_late=True,
            slo_s=5.0,
            usual_requests=500.0,
        )
        assert SHARE_LEAST <= known.share_of(P) <= 1.0
        assert known.backlog_s >= 0


def test_long_prompts_leave_a_queue_less_slack_than_the_mean_does():
    """A second of work belongs to a long prompt more often than to a short one; four fifths of its slack are for waiting."""
    assert may_wait_s((10_000.0,), 10_000, 5.0) == pytest.approx(0.8 * 4.0)
    assert may_wait_s((2_000.0, 18_000.0), 10_000, 5.0) == pytest.approx(0.8 * (2 * 4.8 + 18 * 3.2) / 20)
    assert may_wait_s((2_000.0, 90_000.0), 10_000, 5.0) == pytest.approx(0.8 * 4.8), "late in any fleet"
    assert may_wait_s((49_000.0,), 10_000, 5.0) == pytest.approx(1.0)
    assert may_wait_s((), 10_000, 5.0) == 4.0


@pytest.mark.parametrize(("sizes", "widest"), [((8000,), 2.0), ((1000, 15_000), 6.0)])
def test_the_spread_of_prompts_is_seen_in_the_sums_of_pulls(sizes, widest):
    """Pulls of two requests each: equal prompts have narrow quantiles, uneven ones wide ones; both have the mean."""
    work = Work()
    for step in range(400):
        tokens = sum(sizes[(step // 2 + each * (step % 2)) % len(sizes)] for each in range(2))
        demand = Demand(1.0, arrivals=2.0, uncached_tokens=float(tokens))
        work = work.followed(demand, 5.0, Role.PREFILL)
    ratio = work.sizes[-1] / work.sizes[0]
    assert (ratio < widest) if len(sizes) == 1 else (ratio > widest)
    assert replace(work, sized=0.0, sized_tokens=0.0).sizes == (0.0,) * 8


async def test_the_live_planner_counts_late_first_tokens_from_the_routers_histogram(world):
    """Of ten first tokens a second two are beyond the TTFT in time, one even from its dispatch; the first pull knows no difference."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE, metric_pulling_interval_s=1.0, ttft_slo_s=5.0)
    world.load.demand = lambda _now: Demand(
        1.0,
        arrivals=10.0,
        uncached_tokens=2000.0,
        prefilled_tokens=2000.0,
        prefilling_workers=0.5,
        ttft_count=10.0,
    )
    world.measure_latency(
        lambda at_s: {
            TTFT: ((5.0, 8 * at_s), (float("inf"), 10 * at_s)),
            DISPATCHED_TTFT: ((5.0, 9 * at_s), (float("inf"), 10 * at_s)),
        }
    )
    await world.run_until(60)
    for name, late in (("ttft_late", 2.0), ("dispatched_late", 1.0)):
        lates = [each["pull"]["demand"].get(name) for each in world.records("pull")]
        assert lates[0] is None
        assert set(lates[1:]) == {late}
    newest = world.records("decision")[-1]
    served = AdaptiveMemory.read(newest["state"]["learned"]).served
    assert served.in_time == pytest.approx(0.8)
    assert replay(read_ledger(world.folder)).differences == ()


async def test_the_live_planner_counts_late_gaps_from_the_routers_histogram(world):
    """Three of thirty gaps a second are beyond the ITL in time; without such a target none is counted."""
    config = replace(world.config, mode=Mode.ADAPTIVE, metric_pulling_interval_s=1.0, itl_slo_s=0.05)
    world.load.demand = lambda _now: Demand(1.0, arrivals=10.0, ttft_count=10.0, itl_count=30.0)
    world.measure_latency(lambda at_s: {ITL: ((0.05, 27 * at_s), (float("inf"), 30 * at_s))})
    world.config = config
    await world.run_until(10)
    lates = [each["pull"]["demand"].get("itl_late") for each in world.records("pull")]
    assert lates[0] is None
    assert set(lates[1:]) == {3.0}
