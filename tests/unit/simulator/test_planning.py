"""The planner in virtual time: the live rhythm around the same rules."""

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action
from penstock.planner.decide.observation import PoolCounts
from penstock.simulator.planning import SimulatedObservation, VirtualPlanner
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare

BUSY = SimulatedObservation(
    pools={Role.PREFILL: PoolCounts(2, gpus=1), Role.DECODE: PoolCounts(2, gpus=1)},
    is_adjusting=False,
    kv={"decode-0": 0.7, "decode-1": 0.7},
    waiting=10,
    age_s=0.0,
)


def ticks(planner, seen, count):
    """Tick at the planner's own times; return what it decided."""
    known = len(planner.decisions)
    for _ in range(count):
        planner.tick(planner.next_s, seen, lambda _change: None)
    return planner.decisions[known:]


def test_thirty_pulls_make_a_decision():
    """Pulled each second, decided at 30 s: the queue asks for one more prefill worker."""
    planner = VirtualPlanner(DecideConfig())

    (decision,) = ticks(planner, BUSY, 30)

    assert decision.at_s == 30.0
    assert {role.role: role.action for role in decision.roles} == {
        Role.PREFILL: Action.UP,
        Role.DECODE: Action.HOLD,
    }


def test_nothing_is_decided_while_a_change_is_under_way():
    """100 s of adjusting are 100 s of silence; the next interval begins when it is over."""
    planner = VirtualPlanner(DecideConfig())
    ticks(planner, BUSY, 30)

    starting = BUSY.pools | {Role.PREFILL: PoolCounts(2, starting=1, gpus=1)}
    ready = BUSY.pools | {Role.PREFILL: PoolCounts(3, gpus=1)}

    assert ticks(planner, replace(BUSY, is_adjusting=True, pools=starting), 100) == []
    assert planner.next_s == pytest.approx(131.0)
    assert [decision.at_s for decision in ticks(planner, replace(BUSY, pools=ready), 31)] == [161.0]


def test_readings_older_than_ten_seconds_are_stale():
    """Unknown metrics scale nothing."""
    planner = VirtualPlanner(DecideConfig())

    (decision,) = ticks(planner, replace(BUSY, age_s=11.0), 30)

    assert decision.changes == ()


def test_the_planner_scales_a_world_inside_its_budget(split_world):
    """From 1 + 1 workers under a trace: it grows, never past 6 GPUs, and everybody is served."""
    workload = prepare(WorkloadSpec("mooncake", limit=400), seed=0)
    config = DecideConfig(max_gpu_budget=6)
    world = Simulation(split_world(1, 1, planner=config, max_gpus=6), workload.requests)

    recording = world.run()

    assert recording.requests.is_ok.all()
    assert recording.changes[0].role is Role.PREFILL
    assert recording.changes[0].at_s == 30.0
    assert max(sample.gpus for sample in recording.samples) in {5, 6}


def test_without_a_planner_nothing_is_decided(split_world):
    """The pools stay as they are."""
    workload = prepare(WorkloadSpec("mooncake", limit=50), seed=0)

    recording = Simulation(split_world(2, 1), workload.requests).run()

    assert (recording.decisions, recording.changes) == (0, ())
    assert {sample.gpus for sample in recording.samples} == {3}
