"""Workers that go from one role to the other in a simulation."""

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.simulator.scenario import ProfiledModel, WorkerFailure
from penstock.simulator.simulation import SWITCH_S, Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Reason
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory

AGENTS_THEN_CHAT = (
    "poisson:rate=2,duration_s=400,input_tokens=8000,output_tokens=50,length_cv=0,"
    "shift_s=150,shift_input=0.1,shift_output=40"
)
CONFIG = DecideConfig(max_gpu_budget=4, min_total_gpus=4, switches_roles=True, kv_up=0.3, kv_down=0.1)


@pytest.fixture(name="shifted")
def _shifted(split_world):
    """A world of three prefill workers and a decode worker, whose prompts become short and answers long."""

    def make(config=CONFIG, **options):
        requests = prepare(WorkloadSpec(AGENTS_THEN_CHAT), seed=0).requests
        scenario = split_world(3, 1, planner=config, max_gpus=4, cold_start_s=120.0, **options)
        world = Simulation(scenario, requests)
        seen = []

        def watch():
            counts = {role: world.fleet.counts(role) for role in (Role.PREFILL, Role.DECODE)}
            seen.append((world.kernel.now_s, world.fleet.gpus, counts))

        world.run(watch, watch_events=1)
        return world, seen

    return make


def test_a_worker_serves_its_new_role_a_drain_later_with_the_gpus_it_had(shifted):
    """No GPU is freed or added meanwhile, each role has a ready worker throughout, and every request is served."""
    world, seen = shifted()

    moved = [each for each in world.control.taken.changed if each.switched]
    assert {role.role for each in moved for role in each.roles if role.desired > role.current} == {
        Role.DECODE
    }
    assert {gpus for _, gpus, _ in seen} == {4}
    assert all(pool.ready >= 1 for _, _, counts in seen for pool in counts.values())
    assert all(job.outcome.value == "ok" for job in world.jobs)
    decided_s = moved[0].at_s
    served_s = min(at_s for at_s, _, counts in seen if counts[Role.DECODE].ready == 2)
    assert SWITCH_S <= served_s - decided_s < 30


def test_while_it_switches_it_counts_once_and_in_its_new_role(shifted):
    """The sum of both roles never changes: what drains for the other is not a draining worker of its own."""
    _, seen = shifted()

    assert {sum(pool.existing for pool in counts.values()) for _, _, counts in seen} == {4}
    assert any(counts[Role.DECODE].switching for _, _, counts in seen)
    assert all(pool.draining == 0 for _, _, counts in seen for pool in counts.values())


def test_mode_adaptive_takes_from_a_role_that_only_keeps_its_workers_for_a_start_up(shifted):
    """Prefill is in its hold-down, so that it would let nothing go by itself; it says what the rest of it would do."""
    small = ProfiledModel("a100-llama-8b-bf16-tp1", kv_tokens=60_000)
    world, seen = shifted(replace(CONFIG, mode="adaptive"), model=small)

    moved = [each for each in world.control.taken.changed if each.switched]
    shrunk = [role for each in moved for role in each.roles if role.desired < role.current]
    assert {role.reason for role in shrunk} == {Reason.ROLE_SWITCH}
    assert "would be" in shrunk[0].sentence
    assert all(pool.ready >= 1 for _, _, counts in seen for pool in counts.values())
    known = AdaptiveMemory.read(world.control.planner.learnt(world.kernel.now_s))
    assert all(each.startup_s is None for each in known.roles.values())


def test_without_the_option_a_start_takes_its_time(shifted):
    """The same load: decode's second worker is there after a drain and a start-up."""
    world, seen = shifted(replace(CONFIG, switches_roles=False))

    assert not any(each.switched for each in world.control.taken.changed)
    grown = [at_s for at_s, _, counts in seen if counts[Role.DECODE].ready == 2]
    assert not grown or min(grown) > 150 + 120


def test_a_worker_that_dies_while_it_switches_comes_back_in_its_new_role(shifted):
    """Killed between decision and switch: its jobs continue elsewhere, and the new role gets it once it is back."""
    world, seen = shifted()
    decided_s = next(each.at_s for each in world.control.taken.changed if each.switched)
    dying = "prefill-2"
    failures = tuple(WorkerFailure(decided_s + 0.01, f"prefill-{n}", decided_s + 20.0) for n in range(3))
    world, seen = shifted(failures=failures)

    assert dying not in {worker.name for worker in world.fleet}
    assert {gpus for _, gpus, _ in seen} == {4}
    assert all(job.outcome.value == "ok" for job in world.jobs)
    assert world.fleet.counts(Role.DECODE).ready == max(counts[Role.DECODE].replicas for _, _, counts in seen)
