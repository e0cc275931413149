"""What a run may neither lose nor make up: requests, tokens, the time between tokens, GPU time, room in a cache."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.api import Role
from penstock.simulator.jobs import JobOutcome
from penstock.simulator.planning import VirtualPlanner
from penstock.simulator.scenario import (
    Fault,
    FaultPeriod,
    Faults,
    ProfiledModel,
    Resize,
    SimulatedRouters,
    WorkerFailure,
    unbounded_router,
)
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock_planner.decide.config import DecideConfig

SMALL = ProfiledModel("a100-llama-8b-bf16-tp1", kv_tokens=9000)
"""A cache that three of the prompts below fill."""

ROWS = st.lists(
    st.tuples(st.floats(0, 0.5), st.integers(1, 4000), st.integers(1, 120)), min_size=1, max_size=20
)
"""(gap to the arrival before, prompt tokens, output tokens)."""

RESIZES = st.lists(
    st.tuples(st.floats(0, 6), st.sampled_from([Role.PREFILL, Role.DECODE]), st.integers(1, 4)), max_size=6
)

PATIENT = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def arrivals(request_at):
    """Return a function that makes requests of `ROWS`."""

    def make(rows):
        times = np.cumsum([gap_s for gap_s, _, _ in rows])
        return [
            request_at(float(at_s), tokens, outputs, line=line)
            for line, (at_s, (_, tokens, outputs)) in enumerate(zip(times, rows, strict=True), start=1)
        ]

    return make


def watched(world, look):
    """Run a world and look at it after every event."""
    return world.run(look, watch_events=1)


@PATIENT
@given(
    rows=ROWS,
    policy=st.sampled_from(["dualmap", "prefix-cost", "least-loaded"]),
    routers=st.integers(1, 3),
    bound=st.none() | st.integers(1, 4),
    wait_s=st.none() | st.floats(0.1, 3),
    resizes=RESIZES,
    deaths=st.lists(
        st.tuples(
            st.floats(0, 4), st.sampled_from(["prefill-0", "prefill-1", "decode-0"]), st.floats(0.1, 3)
        ),
        max_size=3,
    ),
    away=st.none() | st.tuples(st.floats(0, 3), st.floats(0.1, 2)),
)
def test_whatever_happens_every_request_ends_once_and_the_budget_holds(
    split_world, arrivals, *, rows, policy, routers, bound, wait_s, resizes, deaths, away
):
    """With bounded queues and waits, joins, leaves, deaths and a router that is away, each counts in one place.

    The world itself asserts the budget after every event.
    """
    periods = () if away is None else (FaultPeriod(Fault.ROUTER_DOWN, away[0], away[0] + away[1]),)
    given = {"maxRequests": bound, "maxWaitSeconds": wait_s}
    queue = {key: value for key, value in given.items() if value is not None}
    scenario = split_world(
        2,
        2,
        router=unbounded_router(policy, prefillQueue=queue),
        routers=SimulatedRouters(routers),
        cold_start_s=0.5,
        max_gpus=6,
        resizes=tuple(Resize(*each) for each in resizes),
        failures=tuple(WorkerFailure(at_s, name, at_s + down_s) for at_s, name, down_s in deaths),
        faults=Faults(periods),
    )
    world = Simulation(scenario, arrivals(rows))

    recording = world.run()

    requests = recording.requests
    assert len(requests.is_ok) == len(rows)
    assert all(job.outcome is not None for job in world.jobs)
    assert not (requests.is_ok & requests.is_rejected).any()
    assert (np.isnan(requests.ttft_s) == ~requests.is_ok).all()
    assert (np.isnan(requests.e2e_s) == ~requests.is_ok).all()
    assert all(sample.gpus <= 6 for sample in recording.samples)
    for worker in world.fleet:
        assert not worker.jobs
        assert (worker.pending_tokens, worker.prompt_tokens) == (0, 0)


@PATIENT
@given(rows=ROWS, split=st.booleans(), model=st.sampled_from([SMALL, ProfiledModel("h200-llama-3.1-8b-tp1")]))
def test_no_token_is_lost_or_made_up(split_world, simple_world, arrivals, *, rows, split, model):
    """Prompt tokens are computed or cached, and a request's gaps between tokens fill its time after the first."""
    scenario = split_world(2, 2, model=model) if split else simple_world(2, model=model)
    world = Simulation(scenario, arrivals(rows))

    recording = world.run()

    requests = recording.requests
    assert requests.is_ok.all()
    assert (
        sum(recording.computed_tokens.values()) + requests.cached_tokens.sum() == requests.prompt_tokens.sum()
    )
    assert world.gaps.total == (requests.output_tokens - 1).sum()
    assert world.gaps.sum_s == pytest.approx((requests.e2e_s - requests.ttft_s).sum())


def test_a_cache_is_filled_and_never_overfilled(split_world, request_at):
    """Twenty long answers on a cache for three of them: full most of the time, at no event above its room."""
    world = Simulation(
        split_world(2, 1, model=SMALL), [request_at(i * 0.05, 2000, 800, line=i + 1) for i in range(20)]
    )
    used = []

    recording = watched(
        world, lambda: used.extend(each.server.kv_usage_fraction(world.kernel.now_s) for each in world.fleet)
    )

    assert recording.requests.is_ok.all()
    assert 0.95 < max(used) <= 1.0


def test_start_ups_can_vary_about_their_mean(simple_world, request_at):
    """Log-normal: 200 replicas with a mean of 100 s and a coefficient of variation of a half."""
    resizes = (Resize(0.0, Role.AGGREGATED, 201),)
    scenario = simple_world(1, resizes=resizes, cold_start_s=100.0, cold_start_cv=0.5)

    samples = Simulation(scenario, [request_at(600.0, 1000)]).run().samples
    ready = np.array([sample.replicas[Role.AGGREGATED][0] for sample in samples])
    lasted = np.repeat([sample.at_s for sample in samples[1:]], np.maximum(0, np.diff(ready)))

    assert lasted.mean() == pytest.approx(100, rel=0.1)
    assert lasted.std() / lasted.mean() == pytest.approx(0.5, rel=0.2)


@PATIENT
@given(
    rows=ROWS,
    resizes=RESIZES,
    policy=st.sampled_from(["dualmap", "prefix-cost", "least-loaded", "round-robin"]),
)
@example(
    rows=[(0.05, 3000, 100)] * 12,
    resizes=[(0.5, Role.PREFILL, 1), (0.8, Role.DECODE, 1)],
    policy="least-loaded",
)
def test_scaling_loses_nothing_and_repeats_nothing(split_world, arrivals, *, rows, resizes, policy):
    """Whatever pools are resized to, all are served at the first try, by workers that hold their GPUs until then.

    What drains is gone in the end. GPU-seconds are the integral of the GPUs held, to a sample's length for each GPU that
    comes or goes.
    """
    ordered = sorted(resizes, key=lambda each: each[0])
    resized = tuple(Resize(*each) for each in ordered)
    scenario = split_world(3, 3, router=unbounded_router(policy), cold_start_s=0.5, resizes=resized)
    world = Simulation(scenario, arrivals([*rows, (60.0, 10, 1)]))
    held = [(0.0, 6)]

    def look():
        held.append((world.kernel.now_s, world.fleet.placed_gpus))
        present = {worker.name for worker in world.fleet}
        for job in world.jobs:
            if job.outcome is None and job.dispatched_s is not None:
                assert (job.decoder or job.worker) in present

    recording = watched(world, look)

    assert recording.requests.is_ok.all()
    assert {job.tries.retries for job in world.jobs} == {0}
    wanted = {Role.PREFILL: 3, Role.DECODE: 3} | {role: count for _, role, count in ordered}
    assert recording.samples[-1].replicas == {role: (count, 0, 0) for role, count in wanted.items()}
    times = np.array([at_s for at_s, _ in held] + [recording.end_s])
    gpus = np.array([count for _, count in held])
    moved = np.abs(np.diff(gpus)).sum()
    expected = (np.diff(times) * gpus).sum()
    assert recording.gpu_s == pytest.approx(expected, abs=scenario.sample_s * moved + 1e-6)


class _Recorder(VirtualPlanner):
    """Keeps every observation and decides nothing."""

    def __init__(self) -> None:
        super().__init__(DecideConfig(adjustment_interval_s=1e9), lambda _decision: None)
        self.seen = []

    def tick(self, now_s, seen, scale):
        self.seen.append(seen)
        self.at_s = now_s
        return super().tick(now_s, seen, scale)


@pytest.mark.parametrize("aggregated", [False, True])
def test_a_world_shows_its_planner_every_request(split_world, aggregated):
    """Over a run the sums are the workload's, and tokens that arrived were computed, wait or are in flight.

    A request whose worker died waits again and is not a second arrival.
    """
    workload = prepare(WorkloadSpec("mooncake", limit=120), seed=0)
    scenario = split_world(2, 1, planner=DecideConfig(max_gpu_budget=None))
    if aggregated:
        pool = replace(scenario.pool(Role.PREFILL), role=Role.AGGREGATED)
        scenario = replace(scenario, pools=(pool,))
    entry = f"{scenario.entry_role.value}-0"
    world = Simulation(replace(scenario, failures=(WorkerFailure(30.2, entry, 40.0),)), workload.requests)
    world.control.planner = recorder = _Recorder()

    world.run()

    seen = [each.demand for each in recorder.seen]
    balance = 0.0
    for demand in seen:
        balance += demand.uncached_tokens - demand.prefilled_tokens
        assert balance == demand.waiting_tokens + demand.in_flight_tokens
    assert any(job.tries.retries for job in world.jobs)
    assert sum(demand.arrivals for demand in seen) == 120
    assert sum(demand.prompt_tokens for demand in seen) == sum(r.input_tokens for r in workload.requests)
    begun = [job for job in world.jobs if (job.first_token_s or np.inf) < recorder.at_s]
    ended = [job for job in begun if job.outcome is JobOutcome.OK and job.ended_s < recorder.at_s]
    assert sum(demand.ttft_count for demand in seen) == len(begun)
    assert sum(demand.completed for demand in seen) == len(ended)
    assert aggregated or any(demand.oldest_wait_s for demand in seen)
    assert any(demand.prefilling_workers == 2 for demand in seen)
    role = Role.AGGREGATED if aggregated else Role.DECODE
    assert any(demand.in_flight[role] for demand in seen)
    assert all(count >= 0 for each in recorder.seen for count in each.worker_waiting.values())
