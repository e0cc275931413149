"""The schedule that knows every arrival, and the queue and the search that make it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.api import Role, SloConfig
from penstock.core.errors import ConfigError
from penstock.simulator.baselines import configured
from penstock.simulator.oracle import (
    ScheduleTarget,
    Utilisation,
    needs,
    prefill_s,
    reachable,
    schedule,
    share_in_time,
    shared_tokens,
    worker_changes,
)
from penstock.simulator.oracle_search import search, with_best_schedule, with_schedule
from penstock.simulator.scoreboard import measures
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock_planner.decide.config import ADAPTIVE_INTERVAL_S, DecideConfig, Mode
from penstock_planner.decide.policies.baselines.oracle import size_at

AT = Utilisation(0.8, 0.9)
AIM = ScheduleTarget(0.75, 0.8)
FREE, ONE_STEP = Mode.ORACLE, Mode.ORACLE_ONE_STEP


def steady(rate, duration_s=300):
    """Equal prompts of 8,000 tokens, 0.532 s each, at equal gaps."""
    text = f"constant:rate={rate},duration_s={duration_s},input_tokens=8000,output_tokens=100,length_cv=0"
    return prepare(WorkloadSpec(text), seed=0).requests


def tripled():
    """Two a second, six from 120 s to 160 s."""
    text = "step:rate=2,peak=3,step_s=120,step_length_s=40,duration_s=200,input_tokens=8000,length_cv=0"
    return prepare(WorkloadSpec(text), seed=0).requests


@pytest.fixture
def oracle_world(split_world):
    """Make a scenario that an oracle plans."""

    def make(mode=FREE, *, prefill=2, decode=1, budget=12, **options):
        scenario = split_world(prefill, decode, max_gpus=budget, **options)
        config = configured(DecideConfig(max_gpu_budget=budget), mode, scenario.pools)
        return replace(scenario, planner=config)

    return make


def test_needs_are_the_work_of_the_arrivals(split_world):
    """3/s x 0.532 s / 0.8 are two prefill workers; decoding needs a part of one."""
    found = needs(steady(3), split_world(), AT)

    assert found[Role.PREFILL][50:250].mean() == pytest.approx(3 * 0.532 / 0.8, rel=0.02)
    assert 0 < found[Role.DECODE][50:250].mean() < 1
    assert found[Role.PREFILL][320:].max() == 0


def test_prefixes_that_arrived_before_are_shared(request_at):
    """Whole blocks of 512 tokens that an earlier prompt began with too; a repeated prompt computes its last block."""
    first = request_at(0.0, 2048, ids=(1, 2, 3, 4))
    repeated = request_at(1.0, 2048, ids=(1, 2, 3, 4))
    longer = request_at(2.0, 3000, ids=(1, 2, 9, 4, 5, 6))

    assert shared_tokens([first, repeated, longer]) == [0, 1536, 1024]


def test_cached_prefixes_are_not_computed(split_world, request_at):
    """The work is the engine's step of what is left; with half of the prefixes found it lies in between."""
    ids = tuple(range(32))
    requests = [request_at(at_s, 16_384, ids=ids) for at_s in (0.0, 1.0)]
    world = split_world()

    none, half, all_found = (prefill_s(requests, world, cached=share) for share in (0.0, 0.5, 1.0))

    assert none[0] == none[1] == half[0] == all_found[0]
    assert none[1] > half[1] > all_found[1] > 0


def test_spans_that_the_queue_does_not_need_are_cut_out_of_a_run(oracle_world):
    """A run that held six prefill workers throughout keeps fewer, and as many requests are in time on the queue."""
    sizes = {Role.PREFILL: ((0.0, 6),), Role.DECODE: ((0.0, 1),)}
    scenario = oracle_world(prefill=6)

    found = schedule(steady(3), scenario, replace(AIM, sizes=sizes))

    assert min(count for _, count in found[Role.PREFILL]) < 6
    assert max(count for _, count in found[Role.PREFILL]) <= 6
    assert {count for _, count in found[Role.DECODE]} == {1}


# -- the queue --------------------------------------------------------------------------------------


def test_the_queue_counts_who_is_served_in_time():
    """One worker, a second each, five at once: two of them end within 2.5 s; with a second worker at 1 s, three."""
    arrivals, work = [0.0] * 5, [1.0] * 5

    assert share_in_time(arrivals, work, work, [], start=1, deadline_s=2.5) == pytest.approx(2 / 5)
    assert share_in_time(arrivals, work, work, [(1.0, 1)], start=1, deadline_s=2.5) == pytest.approx(3 / 5)
    assert share_in_time(arrivals, work, work, [(0.5, -1)], start=1, deadline_s=9.0) == pytest.approx(1 / 5)


def test_workers_serve_after_their_start_up_and_the_newest_leaves_first():
    """Two asked for at 10 s serve at 40 s; one given back at 20 s never does; given back at 50 s, one leaves then."""
    assert worker_changes(((0.0, 1), (10.0, 3)), 1, 30.0) == [(40.0, 1), (40.0, 1)]
    assert worker_changes(((0.0, 1), (10.0, 3), (20.0, 2)), 1, 30.0) == [(40.0, 1)]
    assert worker_changes(((0.0, 1), (10.0, 2), (50.0, 1)), 1, 30.0) == [(40.0, 1), (50.0, -1)]


# -- schedules --------------------------------------------------------------------------------------


def test_replicas_are_asked_for_their_start_up_before_they_are_needed(oracle_world):
    """The rate triples at 120 s: with 60 s to start, prefill has grown by 65 s and not yet at 20 s."""
    found = schedule(tripled(), oracle_world(cold_start_s=60.0), AIM)[Role.PREFILL]

    assert size_at(found, 20.0) < size_at(found, 65.0)
    assert size_at(found, 65.0) >= 3


@pytest.mark.parametrize(
    ("wanted", "start", "expected"),
    [
        ([2, 2, 2, 5, 1, 1], 2, [2, 3, 4, 5, 4, 3]),
        ([1, 6, 6, 6], 1, [1, 2, 3, 4]),
        ([4, 1, 1, 1, 1], 4, [4, 3, 2, 1, 1]),
    ],
)
def test_one_step_grows_ahead_of_time_and_gives_back_slowly(wanted, start, expected):
    """The smallest numbers that reach what is wanted, from what is there."""
    assert reachable(np.array(wanted), start, 1).tolist() == expected


def test_a_fleet_can_be_held(oracle_world):
    """From the first decision on at once, or a replica each decision of the planner's default."""
    free, one_step = (
        schedule(steady(3), oracle_world(mode), ScheduleTarget(1.0, 0.8, (4, 2)))[Role.PREFILL]
        for mode in (FREE, ONE_STEP)
    )

    assert free == ((0.0, 2), (1.0, 4))
    assert one_step == ((0.0, 2), (ADAPTIVE_INTERVAL_S, 3), (2 * ADAPTIVE_INTERVAL_S, 4))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [FREE, ONE_STEP])
def test_an_oracle_serves_a_step_that_it_foresaw(oracle_world, mode):
    """Nearly all in time, through the planner itself, by one replica per decision where that is the rule."""
    scenario = with_best_schedule(oracle_world(mode, cold_start_s=30.0), tripled())

    recording = Simulation(scenario, tripled()).run()

    assert measures(recording, scenario)["in_time"]["both"] >= 0.99
    sizes = [abs(change.desired - change.current) for change in recording.changes]
    assert sizes
    assert mode is FREE or max(sizes) == 1


def test_what_a_search_found_is_what_a_run_shows(oracle_world):
    """Share in time and GPU-seconds are the simulated ones of its schedule."""
    scenario, requests = oracle_world(), steady(3, duration_s=40)
    found = search(scenario, requests)

    known = with_schedule(scenario, requests, found.target)
    recording = Simulation(known, requests).run()

    assert recording.gpu_s == found.gpu_s
    assert measures(recording, known)["in_time"]["both"] == found.in_time >= 0.99


def test_only_a_simulation_with_a_profile_has_an_oracle(simple_world):
    """The simple server has no profile; the message says what to give."""
    with pytest.raises(
        ConfigError, match=r"mode oracle: it plans with a latency profile.*--profile one of a100"
    ):
        configured(DecideConfig(), FREE, simple_world().pools)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=40),
    tokens=st.sampled_from([500, 8000, 60_000]),
    outputs=st.integers(1, 2000),
    budget=st.integers(2, 12),
    cold_s=st.sampled_from([0.0, 7.5, 60.0]),
    itl=st.sampled_from([None, "11ms"]),
    mode=st.sampled_from([FREE, ONE_STEP]),
)
@example(gaps=[0.2] * 40, tokens=60_000, outputs=10, budget=3, cold_s=7.5, itl="11ms", mode=FREE)
def test_a_schedule_can_be_carried_out(
    oracle_world, request_at, *, gaps, tokens, outputs, budget, cold_s, itl, mode
):
    """At each second every role has a replica and, by any step, all together the GPUs that there are; nothing is lost."""
    times = np.cumsum(gaps)
    requests = [
        request_at(float(at_s), tokens, outputs, line=line) for line, at_s in enumerate(times, start=1)
    ]
    terms = {"budget": budget, "cold_start_s": cold_s, "slo": SloConfig(itl=itl)}
    scenario = with_schedule(oracle_world(mode, prefill=1, **terms), requests, AIM)
    found = scenario.planner.parameters.schedule

    assert min(count for sizes in found.values() for _, count in sizes) >= 1
    if mode is FREE:
        for second in {at_s for sizes in found.values() for at_s, _ in sizes}:
            assert sum(size_at(sizes, second) for sizes in found.values()) <= budget
    assert Simulation(scenario, requests).run().requests.is_ok.all()
