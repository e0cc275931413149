"""A whole world that sleeps: no GPU while nobody asks, and the request that wakes it is served, not lost."""

import pytest

from penstock.api import Role
from penstock.simulator.baselines import configured
from penstock.simulator.jobs import JobOutcome
from penstock.simulator.scenario import (
    Fault,
    FaultPeriod,
    Faults,
    PoolSpec,
    ProfiledModel,
    Scenario,
    unbounded_router,
)
from penstock.simulator.simulation import Simulation
from penstock_planner.decide.config import DecideConfig, Mode

MODEL = ProfiledModel("a100-llama-8b-bf16-tp1")
COLD_START_S = 40.0
IDLE_S = 2000.0
SHAPES = {
    "apart": (PoolSpec(Role.PREFILL, 1, MODEL), PoolSpec(Role.DECODE, 1, MODEL)),
    "aggregated": (PoolSpec(Role.AGGREGATED, 1, MODEL),),
}


def world_of(shape, mode, requests, faults=None, **router):
    """Return a world whose graph goes to zero after five minutes."""
    pools = SHAPES[shape]
    config = DecideConfig(mode=Mode.ADAPTIVE, min_gpu_budget=0, scale_to_zero_after_s=300.0)
    scenario = Scenario(
        pools=pools,
        router=unbounded_router(
            "prefix-cost", prefillQueue={"maxWaitSeconds": 10.0, "maxWakeSeconds": 120.0, **router}
        ),
        planner=configured(config, mode, pools),
        cold_start_s=COLD_START_S,
        max_gpus=8,
        faults=faults or Faults(),
    )
    return Simulation(scenario, requests)


@pytest.mark.parametrize("mode", [Mode.ADAPTIVE, pytest.param(Mode.SLA, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shape", SHAPES)
def test_idle_means_zero_gpus_and_the_first_request_is_served_after_one_start(shape, mode, request_at):
    """Two requests half an hour apart: GPUs are held for a fraction of it, and both are answered."""
    world = world_of(shape, mode, [request_at(0.0, 1000, 20), request_at(IDLE_S, 1000, 20)])
    recording = world.run()
    assert [job.outcome for job in world.jobs] == [JobOutcome.OK, JobOutcome.OK]
    assert COLD_START_S < recording.requests.ttft_s[1] < COLD_START_S + 10.0
    gpus = len(SHAPES[shape])
    assert recording.gpu_s < gpus * (300.0 + 200.0)
    down = [each for each in recording.changes if each.desired == 0]
    up = [each for each in recording.changes if each.at_s >= IDLE_S and each.desired == 1]
    assert {each.role for each in down} == {each.role for each in up} == {p.role for p in SHAPES[shape]}
    assert len(down) == len(up) == gpus, "both at once, once each"


def test_without_a_wait_that_covers_the_start_the_request_is_refused(request_at):
    """What the option is for: ten seconds are less than the forty of a start, so the request that wakes is refused."""
    requests = [request_at(0.0, 1000, 20), request_at(IDLE_S, 1000, 20)]
    world = world_of("aggregated", Mode.ADAPTIVE, requests, maxWakeSeconds=None)
    world.run()
    assert [job.outcome for job in world.jobs] == [JobOutcome.OK, JobOutcome.REJECTED]


@pytest.mark.slow
def test_the_wait_for_a_start_is_learnt_and_ends_where_none_comes(request_at):
    """Three starts of 40 s: then a request waits twice that, not the two minutes allowed, before it is refused."""
    times_s = [0.0, 2000.0, 4000.0, 6000.0, 8000.0]
    faults = Faults([FaultPeriod(Fault.NEVER_READY, 7500.0, 9000.0)])
    world = world_of("apart", Mode.ADAPTIVE, [request_at(at_s, 1000, 20) for at_s in times_s], faults=faults)
    world.run()
    outcomes = [job.outcome for job in world.jobs]
    assert outcomes == [*[JobOutcome.OK] * 4, JobOutcome.REJECTED]
    assert COLD_START_S * 2 < world.jobs[-1].ended_s - times_s[-1] < (COLD_START_S + 3.0) * 2
