"""Twice the load that a fleet can serve, through the live router's core: with rejection TTFT is kept, without it grows."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.router.policy.busy import NO_THRESHOLDS, BusyThresholds
from penstock.simulator.jobs import JobOutcome
from penstock.simulator.scenario import PoolSpec, ProfiledModel, RouterGroup, Scenario, unbounded_router
from penstock.simulator.simulation import Simulation

PROFILE = ProfiledModel("a100-llama-8b-bf16-tp1")
POLICIES = ("least-loaded", "prefix-cost")
PROMPT_TOKENS, OUTPUT_TOKENS = 2000, 20


def world_of(
    policy,
    thresholds,
    request_at,
    *,
    gap_s,
    last_s,
    split=False,
    routers=RouterGroup(),  # noqa: B008 - frozen
    workers=2,
    limit=None,
    **more,
):
    """Make a world to which a request comes each ``gap_s``."""
    roles = (Role.PREFILL, Role.DECODE) if split else (Role.AGGREGATED,)
    admission = {
        "mode": "none" if thresholds is NO_THRESHOLDS else "token-capacity",
        "activeDecodeBlocksThreshold": thresholds.active_decode_blocks,
        "activePrefillTokensThreshold": thresholds.active_prefill_tokens,
    }
    router = unbounded_router(policy, admission=admission, prefillQueue={"order": "arrival"})
    model = replace(PROFILE, request_limit=limit, request_queue=2)
    scenario = Scenario(
        pools=[PoolSpec(role, workers, model) for role in roles], router=router, routers=routers, **more
    )
    count = int(last_s / gap_s)
    requests = [
        request_at(index * gap_s, PROMPT_TOKENS, OUTPUT_TOKENS, line=index + 1) for index in range(count)
    ]
    return Simulation(scenario, requests)


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


@pytest.mark.parametrize("split", [False, True])
def test_rejection_does_not_hide_demand_from_thresholds(split, request_at):
    """Mode load: one worker of each role at one and a half times its load grows, though nothing ever waits.

    Without it a third of all requests is rejected to the end.
    """
    world = world_of(
        "least-loaded", BusyThresholds(0.9, 4000), request_at, gap_s=0.09, last_s=120.0, split=split, workers=1,
        planner=DecideConfig(mode=Mode.LOAD), max_gpus=8, cold_start_s=5.0,
    )  # fmt: skip
    world.run()
    rejected = [job.request.arrival_s for job in world.jobs if job.outcome is JobOutcome.REJECTED]
    at_first, later = (sum(low <= at_s < low + 30 for at_s in rejected) for low in (0, 40))
    assert later < at_first / 4


@pytest.mark.parametrize("gap_s", [0.033, 0.0132])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_threshold_below_a_prompt_keeps_ttft_as_if_unloaded(policy, gap_s, request_at):
    """At twice and five times the load a worker takes a prompt only while it has none: within 1.2 times alone."""
    thresholds = BusyThresholds(0.9, PROMPT_TOKENS // 2)
    alone = world_of(policy, thresholds, request_at, gap_s=1.0, last_s=30.0)
    alone.run()
    loaded = world_of(policy, thresholds, request_at, gap_s=gap_s, last_s=30.0)
    loaded.run()
    assert max(ttft_by_third(loaded)) <= 1.2 * max(ttft_by_third(alone))
    served = sum(job.outcome is JobOutcome.OK for job in loaded.jobs)
    assert served / 30.0 > 10


@pytest.mark.parametrize("policy", ["prefix-cost", "dualmap", "least-loaded"])
@pytest.mark.parametrize("deaths", [(), (5.0, 10.0)])
def test_several_routers_oversubscribe_a_worker_by_a_prompt_at_most(policy, deaths, request_at):
    """As one does, also after its picker's death: the successor knows what is in flight."""
    limit = 8000
    gap_s = 0.02
    world = world_of(
        policy,
        BusyThresholds(None, limit),
        request_at,
        gap_s=gap_s,
        last_s=20.0,
        routers=RouterGroup(4, pick_delay_s=0.001, picker_deaths_s=deaths),
    )
    peaks = dict.fromkeys(("aggregated-0", "aggregated-1"), 0)

    def watch(_ended):
        for name in peaks:
            peaks[name] = max(peaks[name], tokens_of(world.routers[-1], name))

    world.run(watch, progress_events=1)

    assert limit < max(peaks.values()) <= limit + PROMPT_TOKENS
    assert any(job.outcome is JobOutcome.REJECTED for job in world.jobs)


def tokens_of(router, name):
    """Return the prompt tokens that one router has waiting for or running at a worker."""
    queue = router.core.entry_queue
    central = queue.backlog_tokens / 2
    return central or queue.queued_tokens(name) + queue.prompt_tokens.pending.get(name, 0)
