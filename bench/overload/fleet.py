"""The same traffic through the router's core as a graph has it that enables tiers and sets nothing but their targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from worker import BATCH_TOKENS, BLOCK_TOKENS, KV_BLOCKS, MAX_SEQS, PROFILE, TARGETS_S
from workload import TIERS, traffic

from penstock.api import Role, RouterConfig, Tier
from penstock.core.durations import duration_text
from penstock.core.tiers import TierPriority
from penstock.engine.serve.settings import PreemptionFlag
from penstock.simulator.jobs import Job, JobOutcome
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest

NO_TARGET_S = 86_400.0
"""Longer than any run."""


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier at one load.

    Attributes:
        arrived: Requests.
        rejected: Shed, or refused because they waited too long.
        p99_ms: TTFT of the served, milliseconds; None: none was.
        in_time: Share of the served whose TTFT met the tier's target; None: it has none.
    """

    arrived: int
    rejected: int
    p99_ms: float | None
    in_time: float | None


def run_fleet(rate: float, seconds: float) -> dict[TierPriority, TierFigures]:
    """Return what became of ``seconds`` of traffic at ``rate`` requests/s outside of surges."""
    requests = [
        TraceRequest(
            each.arrival_s, each.prompt_tokens, each.output_tokens, None, line, tier=Tier[each.tier.name]
        )
        for line, each in enumerate(traffic(rate, seconds, seed=0), 1)
    ]
    model = ProfiledModel(
        PROFILE,
        kv_tokens=KV_BLOCKS * BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=BATCH_TOKENS,
        max_num_seqs=MAX_SEQS,
        preemption=PreemptionFlag(),
    )
    slo = {
        tier.name.lower(): {"ttft": duration_text(TARGETS_S.get(tier, NO_TARGET_S)), "endToEnd": None}
        for tier in TIERS
    }
    router = RouterConfig.model_validate({"tiers": {"enabled": True, "slo": slo}})
    world = Simulation(Scenario([PoolSpec(Role.AGGREGATED, 1, model)], router), requests)
    world.run()
    return {
        tier: _figures(tier, [job for job in world.jobs if job.tier is Tier[tier.name]]) for tier in TIERS
    }


def _figures(tier: TierPriority, jobs: list[Job]) -> TierFigures:
    served = [
        job.first_token_s - job.request.arrival_s
        for job in jobs
        if job.outcome is JobOutcome.OK and job.first_token_s is not None
    ]
    target_s = TARGETS_S.get(tier)
    return TierFigures(
        arrived=len(jobs),
        rejected=sum(job.outcome is JobOutcome.REJECTED for job in jobs),
        p99_ms=1000 * float(np.percentile(served, 99)) if served else None,
        in_time=sum(ttft_s <= target_s for ttft_s in served) / len(served) if served and target_s else None,
    )
