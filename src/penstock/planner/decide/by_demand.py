"""Modes ``adaptive`` and ``sla``: one policy, which knows a profile and targets or learns what workers do; and their memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.planner.decide.adaptive import memory as adaptive_memory
from penstock.planner.decide.adaptive import supply
from penstock.planner.decide.adaptive.memory import AdaptiveMemory
from penstock.planner.decide.adaptive.policy import case_of, followed, proposed
from penstock.planner.decide.adaptive.rules import arriving_per_s
from penstock.planner.decide.adaptive.trend import forecast
from penstock.planner.decide.adaptive.work import RATE_TAU_S
from penstock.planner.decide.bounds import existing_gpus
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Memory, PlannerState, Proposal, RoleProposal, Step
from penstock.planner.decide.observation import Window, entry_role
from penstock.planner.decide.policy import PlannerPolicy
from penstock.planner.decide.sla import learning, memory
from penstock.planner.decide.sla.limits import limited
from penstock.planner.decide.sla.projection import Projection
from penstock.planner.decide.sla.workers import OBSERVED, ProfiledWorkers


def by_demand(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what demand at the frontend, supply over time and restraint ask for; one pull at least.

    What workers can do is read off ``config.performance``, corrected by what is observed, and held against the targets; without
    a profile it is learnt.
    """
    profile = config.performance
    if profile is None:
        observed = adaptive_memory.read(state.memory)
        for pull in window.pulls:
            observed = followed(observed, pull, config)
        return proposed(window, state, observed, OBSERVED, config)
    shared, learnt = adaptive_memory.read(state.memory), memory.read(state.memory)
    for pull in window.pulls:
        learnt = learning.followed(
            learnt, pull, profile, mean_rate=forecast(shared.work.rate, 0.0, RATE_TAU_S).now
        )
        shared = followed(shared, pull, config)
    workers = ProfiledWorkers(profile, learnt, config)
    made = proposed(window, state, shared, workers, config)
    projection = _projection(window, shared, workers)
    profiled = _profile_step(workers)
    return replace(
        made,
        proposals=[
            replace(each, steps=(profiled, *_needed(each, projection), *each.steps))
            for each in _limited(made.proposals, window, shared, projection)
        ],
        memory={**made.memory, **memory.write(learnt)},
    )


def by_targets(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what `by_demand` asks for by targets and profile.

    Raises:
        ConfigError: no profile is given.
    """
    if config.performance is None:
        raise ConfigError(
            "mode sla: it plans by a performance profile and none is given; run `penstock profile` and give --profile, or"
            " choose mode adaptive"
        )
    return by_demand(window, state, config)


def _projection(window: Window, shared: AdaptiveMemory, workers: ProfiledWorkers) -> Projection | None:
    """Return what the demand at the horizon needs; None while the demand is not known."""
    pull = window.pulls[-1]
    speed = workers.tokens_per_s(shared.work)
    service_s = learning.service_s(workers.learnt, workers.profile)
    if pull.demand is None or speed is None or service_s is None:
        return None
    case = case_of(entry_role(pull.pools), window, shared, workers, workers.config)
    if case.work is None:
        return None
    return Projection(workers, shared.kv, arriving_per_s(case.work), service_s, speed)


def _limited(
    proposals: Sequence[RoleProposal], window: Window, shared: AdaptiveMemory, projection: Projection | None
) -> Sequence[RoleProposal]:
    """Return the proposals within what budget and bounds allow, if the demand is known."""
    if projection is None:
        return proposals
    pools, config = window.pulls[-1].pools, projection.workers.config
    rested = {role for role in pools if supply.is_rested(shared, role, window.end_s)}
    return limited(proposals, projection, config, gpus=existing_gpus(pools, config), rested=rested)


def _needed(proposal: RoleProposal, projection: Projection | None) -> tuple[Step, ...]:
    """Return how many replicas the targets need by the profile; nothing where that cannot be looked up yet."""
    role = proposal.role
    if projection is None or (role is not Role.PREFILL and projection.workers.learnt.osl is None):
        return ()
    inputs = {
        "replicas": projection.needed(role),
        "replicas_now": proposal.pool.replicas,
        "tokens_per_s": projection.tokens_per_s,
        "worker_tokens_per_s": projection.speed,
    }
    return (Step("needed", inputs, None, "by profile and targets"),)


def _profile_step(workers: ProfiledWorkers) -> Step:
    """Return what the decision took from the profile, and where the load lies outside of it."""
    learnt, profile, config = workers.learnt, workers.profile, workers.config
    prompts, contexts = profile.prefill.prompt_tokens, profile.decode.contexts
    context, prompt_s = learning.context_of(learnt), learning.service_s(learnt, profile)
    inputs = {
        "isl": learnt.isl,
        "uncached_isl": learnt.uncached_isl,
        "profile_isl_least": prompts[0],
        "profile_isl_most": prompts[-1],
        "osl": learnt.osl,
        "context": context,
        "profile_context_least": contexts[0],
        "profile_context_most": contexts[-1],
        "prefill_factor": learning.factor(learnt.prefill),
        "ttft_factor": learning.factor(learnt.ttft),
        "itl_factor": learning.factor(learnt.itl),
        "variability": learnt.variability,
        "running": learnt.running,
        "prompt_s": prompt_s,
        "may_wait_s": None if prompt_s is None else workers.may_wait_s(prompt_s),
        "ttft_target_s": config.ttft_slo_s,
        "itl_target_s": config.itl_slo_s,
        "attainment": config.attainment,
        "predictor": config.predictor.value,
    }
    outside = [
        f"{name} {value:.0f} lies outside the profile's {points[0]:g} to {points[-1]:g}: its edge holds"
        for name, value, points in (
            ("uncached ISL", learnt.uncached_isl, prompts),
            ("context", context, contexts),
        )
        if value is not None and not points[0] <= value <= points[-1]
    ]
    return Step("profile", inputs, None, "; ".join(outside) or "within the profile")


ADAPTIVE = PlannerPolicy(by_demand, follows_demand=True)
SLA = PlannerPolicy(by_targets, follows_demand=True, needs_profile=True)

MEMORIES: Final = {"adaptive": adaptive_memory, "sla": memory}
"""What reads, writes and moves each of the keys of a state's memory."""


def carried(known: Memory) -> Memory:
    """Return what another graph's planner starts from; another autoscaler's memory is left out."""
    made: Memory = {}
    for key, mode in MEMORIES.items():
        if key in known:
            made = {**made, **mode.write(mode.carried(mode.read(known)))}
    return made


def resumed(state: PlannerState, by_s: float, now_s: float) -> PlannerState:
    """Return the state of a planner after a restart, its times moved to another clock.

    Args:
        state: As the ledger has it.
        by_s: How much more the clock shows than the ledger's; another autoscaler's memory, whose times are not known,
            is forgotten unless it is 0.
        now_s: No remembered time is after it.
    """
    moved: Memory = {} if by_s else state.memory
    for key, mode in MEMORIES.items():
        if key in state.memory:
            moved = {**moved, **mode.write(mode.resumed(mode.read(state.memory), by_s, now_s))}
    return replace(state, memory=moved)
