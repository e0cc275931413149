"""The planner in virtual time: the live rhythm around the same rules."""

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare


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
