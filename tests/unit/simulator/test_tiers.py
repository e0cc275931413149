"""Tiers under twice the load that a fleet can serve, through the live router's core in virtual time."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.api import Role, Tier
from penstock.engine.serve.preemption_config import PreemptionFlag
from penstock.simulator.jobs import JobOutcome
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.scoreboard import tier_scores
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import Workload
from penstock.workload.arrivals import Spread

PROFILE = ProfiledModel("a100-llama-8b-bf16-tp1", preemption=PreemptionFlag())
PROMPT_TOKENS, OUTPUT_TOKENS, GAP_S, LAST_S = 2000, 20, 0.033, 60.0
"""A prompt takes about 0.13 s of prefill, so that two workers serve about half of the requests."""
ORDER = (Tier.STANDARD, Tier.BACKGROUND, Tier.STANDARD, Tier.BACKGROUND, Tier.PREMIUM)
SLO = {
    "premium": {"ttftSeconds": 1.0, "tpotSeconds": 0.1, "endToEndSeconds": 10.0},
    "standard": {"ttftSeconds": 3.0, "tpotSeconds": 0.2, "endToEndSeconds": 20.0},
    "background": {"endToEndSeconds": 60.0},
}
TIERS = {"enabled": True, "slo": SLO}
NO_TARGETS = {"ttftSeconds": None, "tpotSeconds": None, "endToEndSeconds": None}


def world_of(request_at, tiers, *, split=True, policy="prefix-cost"):
    """Make a world to which a fifth premium, two fifths standard and two fifths background requests come."""
    roles = (Role.PREFILL, Role.DECODE) if split else (Role.AGGREGATED,)
    scenario = Scenario(
        pools=[PoolSpec(role, 2, PROFILE) for role in roles], router=unbounded_router(policy, tiers=tiers)
    )
    requests = [
        replace(
            request_at(at * GAP_S, PROMPT_TOKENS, OUTPUT_TOKENS, line=at + 1), tier=ORDER[at % len(ORDER)]
        )
        for at in range(int(LAST_S / GAP_S))
    ]
    return Simulation(scenario, requests)


def ttft_p99_s(world, tier):
    """Return a tier's p99 TTFT, seconds."""
    return float(
        np.percentile(
            [
                job.first_token_s - job.request.arrival_s
                for job in world.jobs
                if job.request.tier is tier and job.first_token_s is not None
            ],
            99,
        )
    )


def outcomes(world, tier, outcome):
    """Return how many of a tier's jobs ended so."""
    return sum(job.outcome is outcome for job in world.jobs if job.request.tier is tier)


@pytest.mark.parametrize(
    ("split", "policy"), [(True, "prefix-cost"), (False, "prefix-cost"), (True, "least-loaded")]
)
def test_premium_keeps_its_ttft_where_a_single_queue_grows(split, policy, request_at):
    """Alike, all wait longer and longer; with tiers premium is ten times as fast, and background is shed."""
    alike = world_of(request_at, {"enabled": False}, split=split, policy=policy)
    alike.run()
    tiered = world_of(request_at, TIERS, split=split, policy=policy)
    tiered.run()

    assert ttft_p99_s(tiered, Tier.PREMIUM) < 1.0 < ttft_p99_s(alike, Tier.PREMIUM) / 10
    assert outcomes(tiered, Tier.PREMIUM, JobOutcome.REJECTED) == 0
    assert outcomes(tiered, Tier.BACKGROUND, JobOutcome.REJECTED) > 0
    ok = sum(job.outcome is JobOutcome.OK for job in tiered.jobs)
    rejected = sum(job.outcome is JobOutcome.REJECTED for job in tiered.jobs)
    assert ok + rejected == len(tiered.jobs)


def test_shed_requests_are_demand_to_the_planner(request_at):
    """The frontend counts each as an arrival and as refused, with its tokens."""
    world = world_of(request_at, TIERS)
    world.run()
    shed = sum(each.shed for each in world.routers[0].core.tiers.counts.values())
    demand = world.frontend.take(world.kernel.now_s, {})
    assert shed > 0
    assert demand.arrivals == len(world.jobs)
    assert demand.prompt_tokens == len(world.jobs) * PROMPT_TOKENS
    assert demand.refused == shed


def test_without_shedding_background_is_served_its_share(request_at):
    """Late, and not never."""
    slo = {**SLO, "standard": NO_TARGETS, "background": NO_TARGETS}
    tiers = {"enabled": True, "slo": slo, "shedding": {"enabled": False}}
    world = world_of(request_at, tiers)
    world.run()
    assert outcomes(world, Tier.BACKGROUND, JobOutcome.OK) == sum(
        job.request.tier is Tier.BACKGROUND for job in world.jobs
    )
    assert (
        ttft_p99_s(world, Tier.PREMIUM)
        < ttft_p99_s(world, Tier.STANDARD)
        < ttft_p99_s(world, Tier.BACKGROUND)
    )


def test_the_scores_tell_compliance_from_attainment(request_at):
    """A shed request attains nothing and breaks no promise to those admitted."""
    world = world_of(request_at, TIERS)
    recording = world.run()
    workload = Workload("synthetic", tuple(job.request for job in world.jobs), 100, None, 0, 0, Spread.NONE)
    scores = tier_scores(recording, workload, world.scenario)
    assert list(scores) == ["premium", "standard", "background"]
    assert sum(row["requests"] for row in scores.values()) == len(world.jobs) - 100
    background = scores["background"]
    assert background["rejected"] > 0
    assert background["attainment"] == pytest.approx(
        background["compliance"] * (1 - background["rejected"] / background["requests"]), abs=1e-5
    )
    assert scores["premium"]["compliance"] > 0.99
