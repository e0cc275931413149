"""Twice the load that a fleet can serve, through the live router's core: with rejection TTFT is kept, without it grows."""

import numpy as np
import pytest

from penstock_api import Role
from penstock_router.policy.busy import NO_THRESHOLDS, BusyThresholds
from penstock_simulator.jobs import JobOutcome
from penstock_simulator.scenario import PoolSpec, ProfiledModel, RouterSpec, Scenario
from penstock_simulator.world import World

PROFILE = ProfiledModel("a100-llama-8b-bf16-tp1")
POLICIES = ("least-loaded", "prefix-cost")
PROMPT_TOKENS, OUTPUT_TOKENS = 2000, 20


def world_of(policy, thresholds, request_at, *, gap_s, last_s, split=False, routers=1, delay_s=0.0, workers=2):
    """Make a world to which a request comes each ``gap_s``."""
    roles = (Role.PREFILL, Role.DECODE) if split else (Role.AGGREGATED,)
    router = RouterSpec(policy, thresholds=thresholds, routers=routers, propagation_delay_s=delay_s)
    scenario = Scenario(pools=[PoolSpec(role, workers, PROFILE) for role in roles], router=router)
    count = int(last_s / gap_s)
    requests = [
        request_at(index * gap_s, PROMPT_TOKENS, OUTPUT_TOKENS, line=index + 1) for index in range(count)
    ]
    return World(scenario, requests)


def ttft_by_third(world):
    """Return the p99 TTFT of the accepted requests of each third of a run, seconds."""
    jobs = [job for job in world.jobs if job.outcome is JobOutcome.OK]
    last_s = world.jobs[-1].request.arrival_s
    thirds = [[], [], []]
    for job in jobs:
        third = min(2, int(3 * job.request.arrival_s / last_s))
        thirds[third].append(job.first_token_s - job.request.arrival_s)
    return [float(np.percentile(each, 99)) for each in thirds]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_accepted_requests_keep_their_ttft_under_twice_the_load(policy, split, request_at):
    """A request takes about 0.13 s of prefill; two workers get one each 0.033 s for 60 s."""
    shape = {"gap_s": 0.033, "last_s": 60.0, "split": split}
    with_it = world_of(policy, BusyThresholds(0.9, 4000), request_at, **shape)
    with_it.run()
    without = world_of(policy, NO_THRESHOLDS, request_at, **shape)
    without.run()

    kept, grown = ttft_by_third(with_it), ttft_by_third(without)
    assert max(kept) < 1.0
    assert kept[2] < 1.5 * kept[0]
    assert grown[2] > 4 * grown[0] / 3 > 4
    rejected = sum(job.outcome is JobOutcome.REJECTED for job in with_it.jobs)
    served = sum(job.outcome is JobOutcome.OK for job in with_it.jobs)
    assert rejected + served == len(with_it.jobs)
    assert 0.3 < rejected / len(with_it.jobs) < 0.7


def test_below_its_capacity_nothing_is_rejected(request_at):
    """Half the load."""
    world = world_of("prefix-cost", BusyThresholds(0.9, 8000), request_at, gap_s=0.14, last_s=30.0)
    world.run()
    assert all(job.outcome is JobOutcome.OK for job in world.jobs)
