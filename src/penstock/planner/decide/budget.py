"""Floors and ceilings: the GPU budget over all roles, and the bounds of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import PoolCounts
from penstock.planner.decide.proposal import RoleProposal


def existing_gpus(pools: Mapping[Role, PoolCounts], config: DecideConfig) -> int:
    """Return the GPUs that workers hold now: ready, starting and draining ones."""
    return sum(pool.existing * config.engine_gpus(role, pool.gpus) for role, pool in pools.items())


def within_bounds(
    proposals: Sequence[RoleProposal], gpus: int, config: DecideConfig, *, owed: Collection[Role] = ()
) -> list[RoleProposal]:
    """Return the proposals, in order of precedence, held where a floor or a ceiling forbids them.

    Precedence when the budget allows fewer scale-ups than are asked for: a role below its floor, then one
    that another gave up GPUs for, then decode (or aggregated), then prefill. Decode goes first because a full decode pool destroys work, while a
    prefill queue only delays it: decode preempts running streams and recomputes them, and finished prefills
    pin their KV on the prefill workers until a decode worker has room, so a new prefill worker would feed a
    pool that cannot take it. A role that does not fit leaves what is free to the next one.

    GPUs of a replica scaled down by the same decision are not free yet: it drains first.

    Args:
        proposals: One per role, stabilised.
        gpus: GPUs that existing workers hold.
        config: Bounds.
        owed: Roles that GPUs were given up for.
    """
    ordered = sorted(
        proposals,
        key=lambda d: (d.reason is not Reason.BELOW_FLOOR, d.role not in owed, d.role is Role.PREFILL),
    )
    free = None if config.max_gpu_budget is None else config.max_gpu_budget - gpus
    granted = 0
    bounded = []
    for proposal in ordered:
        decided = proposal
        if proposal.action is Action.DOWN:
            decided = _keep_floor(proposal, config)
        elif proposal.action is Action.UP:
            decided = _keep_ceiling(proposal, free, granted, config)
            if decided.action is Action.UP:
                granted += proposal.engine_gpus * decided.amount
        bounded.append(decided)
    return bounded


def _keep_floor(proposal: RoleProposal, config: DecideConfig) -> RoleProposal:
    floor = 0 if proposal.reason is Reason.IDLE else config.floor(proposal.role, proposal.engine_gpus)
    spare = proposal.pool.replicas - floor
    inputs = {
        "replicas_after": proposal.pool.replicas - proposal.amount,
        "gpus_per_engine": proposal.engine_gpus,
    }
    if spare < 1:
        detail = f"{floor} {'is' if floor == proposal.pool.replicas else 'would be'} the floor"
        return proposal.held(Reason.AT_FLOOR, detail, Step("floor", inputs, floor, "hold"))
    return _at_most(proposal, spare, Step("floor", inputs, floor, "pass"))


def _keep_ceiling(
    proposal: RoleProposal, free: int | None, granted: int, config: DecideConfig
) -> RoleProposal:
    ceiling = config.max_replicas.get(proposal.role)
    if ceiling is not None and proposal.pool.replicas + proposal.amount > ceiling:
        room = ceiling - proposal.pool.replicas
        step = Step(
            "max_replicas",
            {"replicas_after": proposal.pool.replicas + proposal.amount},
            ceiling,
            "hold" if room < 1 else "pass",
        )
        if room < 1:
            return proposal.held(Reason.AT_MAX_REPLICAS, f"{ceiling} is the most replicas allowed", step)
        proposal = _at_most(proposal, room, step)
    needed = proposal.engine_gpus * proposal.amount
    if free is None:
        return proposal.passed(Step("gpu_budget", {"gpus_needed": needed}, None, "pass: no ceiling"))
    used = (config.max_gpu_budget or 0) - free
    inputs = {"gpus_existing": used, "gpus_granted": granted, "gpus_needed": needed}
    if proposal.engine_gpus <= free - granted:
        fitting = (free - granted) // proposal.engine_gpus if proposal.engine_gpus else proposal.amount
        return _at_most(proposal, fitting, Step("gpu_budget", inputs, config.max_gpu_budget, "pass"))
    step = Step("gpu_budget", inputs, config.max_gpu_budget, "hold")
    if proposal.engine_gpus <= free:
        other = Role.DECODE if proposal.role is Role.PREFILL else Role.PREFILL
        detail = f"the last free GPUs of {config.max_gpu_budget} go to {other.value} first"
        return proposal.held(Reason.GPU_BUDGET_YIELDED, detail, step)
    detail = f"{used + granted} + {proposal.engine_gpus} GPUs exceed the budget of {config.max_gpu_budget}"
    return proposal.held(Reason.GPU_BUDGET, detail, step)


def _at_most(proposal: RoleProposal, most: int, step: Step) -> RoleProposal:
    if proposal.amount <= most:
        return proposal.passed(step)
    return replace(proposal.passed(replace(step, outcome=f"limited to {most}")), amount=most)
