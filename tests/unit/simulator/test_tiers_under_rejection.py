"""Rejection keeps tiers: two and three times the load, premium at 40% of the capacity and so inside its half."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from penstock.api import Role, RouterConfig, Tier
from penstock.engine.serve.settings import PreemptionFlag
from penstock.router.policy.busy import NO_THRESHOLDS, BusyThresholds
from penstock.simulator.jobs import JobOutcome
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest

SHARED = (Tier.PREMIUM, Tier.STANDARD, Tier.BACKGROUND)
CAPACITY_RPS, SECONDS = 17.0, 40.0
PREMIUM, STANDARD = 0.4, 0.3
DEFAULTS = BusyThresholds(0.85, 100_000)
SLO = {"ttftSeconds": None, "tpotSeconds": None, "endToEndSeconds": 60.0}


def traffic(factor, *, prompt_tokens=2000, output_tokens=20, rate=CAPACITY_RPS, seconds=SECONDS):
    """Premium and standard inside their shares; all that is beyond is background."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / (rate * factor), int(rate * factor * seconds * 1.3)))
    times = times[times < seconds]
    shares = [PREMIUM / factor, STANDARD / factor, 1 - (PREMIUM + STANDARD) / factor]
    tiers = rng.choice(len(SHARED), times.size, p=shares)
    return [
        TraceRequest(float(at_s), prompt_tokens, output_tokens, None, line, tier=SHARED[tier])
        for line, (at_s, tier) in enumerate(zip(times, tiers, strict=True), 1)
    ]


def run(policy, thresholds, model, is_split, requests):
    """Return the jobs of two workers a role behind a router with tiers and a queue of at most 60 s."""
    admission = {
        "mode": "none" if thresholds is NO_THRESHOLDS else "token-capacity",
        "activeDecodeBlocksThreshold": thresholds.active_decode_blocks,
        "activePrefillTokensThreshold": thresholds.active_prefill_tokens,
    }
    tiers = {"enabled": True, "slo": dict.fromkeys(SHARED, SLO), "shedding": {"enabled": False}}
    router = RouterConfig.model_validate({"policy": policy, "admission": admission, "tiers": tiers})
    roles = (Role.PREFILL, Role.DECODE) if is_split else (Role.AGGREGATED,)
    world = Simulation(Scenario([PoolSpec(role, 2, model) for role in roles], router), requests)
    world.run()
    return world.jobs


@cache
def outcome(policy, thresholds, factor, is_split, *, is_short_of_kv=False, request_limit=None):
    """Return each tier's share of the prompts served and part of its requests rejected."""
    model = ProfiledModel("a100-llama-8b-bf16-tp1", request_limit=request_limit, request_queue=2)
    shape = {}
    if is_short_of_kv:
        model = replace(model, kv_tokens=16_000)
        shape = {"prompt_tokens": 500, "output_tokens": 300, "rate": 6.5}
    if request_limit is not None:
        shape = {"prompt_tokens": 500, "output_tokens": 100, "rate": 7.0}
    jobs = run(policy, thresholds, model, is_split, traffic(factor, **shape))
    arrived = Counter(job.tier for job in jobs)
    rejected = Counter(job.tier for job in jobs if job.outcome is JobOutcome.REJECTED)
    served = arrived - rejected
    return {tier: (served[tier] / served.total(), rejected[tier] / arrived[tier]) for tier in SHARED}


@pytest.mark.parametrize("factor", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("thresholds", [DEFAULTS, BusyThresholds(0.9, 8000), BusyThresholds(0.9, 1000)])
@pytest.mark.parametrize(
    ("policy", "is_split"), [("prefix-cost", False), ("least-loaded", False), ("prefix-cost", True)]
)
def test_tiers_inside_their_shares_are_not_rejected(policy, is_split, thresholds, factor):
    """Background alone is, however low the threshold, and gets the 30% that is left, and what waits at the end."""
    found = outcome(policy, thresholds, factor, is_split)
    assert [found[tier][1] for tier in (Tier.PREMIUM, Tier.STANDARD)] == [0.0, 0.0]
    assert 0.1 < found[Tier.BACKGROUND][0] < 0.45
    assert found[Tier.BACKGROUND][1] > 0.5


@pytest.mark.parametrize("is_split", [False, True])
def test_kv_blocks_are_shared_by_tiers_too(is_split):
    """Where answers fill the KV cache and prompts hardly count, background alone is rejected."""
    found = outcome("prefix-cost", DEFAULTS, 3, is_split, is_short_of_kv=True)
    assert [found[tier][1] for tier in (Tier.PREMIUM, Tier.STANDARD)] == [0.0, 0.0]
    assert found[Tier.BACKGROUND][1] > 0.2


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded"])
def test_the_slots_of_workers_with_a_request_limit_go_by_tier(policy):
    """Four requests a worker: what is beyond waits by tier in the router, and premium gets no 503 behind background.

    Where it waits in the workers' own queues, premium is refused 7 to 12% and standard 37 to 47%.
    """
    found = outcome(policy, NO_THRESHOLDS, 2, False, request_limit=4)
    assert [found[tier][1] for tier in (Tier.PREMIUM, Tier.STANDARD)] == [0.0, 0.0]
    assert found[Tier.BACKGROUND][1] > 0.2


def test_a_background_request_waits_in_the_router_and_not_at_a_full_decode_worker():
    """Three times the load, decode batches full, no thresholds: no first token comes long after the queue's 60 s.

    Premium is as fast as without load. Where all went on to the decode workers, background waited up to 228 s.
    """
    preemption = PreemptionFlag(maxPerRequest=3, premiumReservedFraction=0.3, swapGigabytes=16)
    model = ProfiledModel("a100-llama-8b-bf16-tp1", max_num_seqs=16, preemption=preemption)
    requests = traffic(3, prompt_tokens=500, output_tokens=300, rate=6.5, seconds=120.0)
    jobs = run("prefix-cost", NO_THRESHOLDS, model, True, requests)
    ttft_s = {tier: [] for tier in SHARED}
    for job in jobs:
        if job.outcome is JobOutcome.OK:
            ttft_s[job.tier].append(job.first_token_s - job.request.arrival_s)
    assert np.median(ttft_s[Tier.PREMIUM]) < 0.2
    assert max(ttft_s[Tier.BACKGROUND]) < 80
