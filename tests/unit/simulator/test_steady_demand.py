"""Demand that stays as it is: the planner finds a fleet for it and keeps it."""

from itertools import pairwise

import pytest

from penstock.api import Role, RouterConfig
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock_planner.decide.config import DecideConfig, Mode

pytestmark = pytest.mark.slow  # half an hour of traffic
SETTLED_S = 600.0
STEADY = "poisson:rate=2.4,duration_s=3600,input_tokens=8000,output_tokens=300,max_tokens=24000"
"""One decode worker is filled to 0.3 by it on average, and for moments to 0.7."""


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_chance_does_not_move_a_fleet_to_and_fro(role, steady):
    """After ten minutes a role changes its direction four times in twenty minutes at most; by values alone decode does so six times."""
    grows = [change.desired > change.current for change in steady.changes if change.role is role]
    kept = [change.at_s >= SETTLED_S for change in steady.changes if change.role is role]
    turns = [
        now for (before, after), now in zip(pairwise(grows), kept[1:], strict=True) if before is not after
    ]
    assert sum(turns) <= 4


@pytest.fixture(name="steady", scope="module")
def _steady():
    model = ProfiledModel("a100-llama-8b-bf16-tp1", block_size=512)
    scenario = Scenario(
        pools=(PoolSpec(Role.PREFILL, 1, model), PoolSpec(Role.DECODE, 1, model)),
        router=RouterConfig(),
        planner=DecideConfig(mode=Mode.ADAPTIVE, max_gpu_budget=8, metric_pulling_interval_s=1.0),
        cold_start_s=30.0,
        max_gpus=8,
    )
    return Simulation(scenario, prepare(WorkloadSpec(STEADY, limit=4600), seed=0, qps=None).requests).run()
