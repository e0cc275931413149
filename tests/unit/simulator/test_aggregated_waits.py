"""Waits of aggregated workers in the simulator against the queueing formula by which mode sla plans them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.api import Role
from penstock.engine import profiles
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock_planner.decide.capacity import queueing

PROFILE = "a100-llama-8b-bf16-tp1"
TTFT_S = 5.0
LOAD = "poisson:rate=8.6,duration_s=600,input_tokens=8000,output_tokens=300,max_tokens=24000"


@pytest.mark.slow
def test_prompts_wait_in_each_aggregated_worker_as_in_a_queue_of_its_own():
    """Eight workers, 0.6 busy: 2% late as eight queues have it, where one queue before all of them would have none."""
    workers = 8
    model = ProfiledModel(PROFILE, block_size=512)
    pools = (PoolSpec(Role.AGGREGATED, workers, model),)
    requests = prepare(WorkloadSpec(LOAD), seed=0, qps=None).requests
    router = unbounded_router("least-loaded")
    found = Simulation(Scenario(pools=pools, router=router), requests).run().requests
    late = float(np.mean(found.ttft_s > TTFT_S))

    prefill = profiles.load(PROFILE).latency().prefill
    own_s = np.array([prefill.ttft_s(int(tokens)) for tokens in found.prompt_tokens])
    service_s = float(own_s.mean())
    load = service_s * len(own_s) / float(found.arrival_s[-1])
    given = {
        "service_s": service_s,
        "variability": 1.0 + float(own_s.var()) / service_s**2,
        "may_wait_s": TTFT_S - service_s,
    }
    servers, own_load = queueing.queue_of(Role.AGGREGATED, workers, load)

    assert late / 2 < queueing.late_fraction(servers, own_load, **given) < late * 2
    assert queueing.late_fraction(workers, load, **given) < late / 10
