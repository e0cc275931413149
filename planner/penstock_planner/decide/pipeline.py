"""The one function that decides, and the one that takes a failed scale-up back.

Same input, same output, bit for bit: replay depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.bounds import (
    aged,
    back_off,
    existing_gpus,
    kept,
    left,
    raised,
    release,
    reserve,
    rolled_back,
    within_bounds,
    yielded,
)
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import (
    Action,
    Decision,
    PlannerState,
    Proposal,
    Reason,
    RoleDecision,
    RoleProposal,
    Step,
)
from penstock_planner.decide.grant import bids_of, within_grant
from penstock_planner.decide.observation import PoolCounts, Pull, Window
from penstock_planner.decide.schedule import in_force, noted, within_schedule
from penstock_planner.decide.switching import switched


def decide(window: Window, state: PlannerState, config: DecideConfig) -> tuple[Decision, PlannerState]:
    """Return what to change after one adjustment interval, and the state for the next.

    The policy of ``config.mode`` proposes a change per role. What follows is the same for every policy: no role
    changes by more than ``config.max_step`` replicas, floors and ceilings over all roles (`within_bounds`),
    GPUs that move from one role to the other (`reserve`), or workers (`switched`); while an entry of the schedule holds, those are its bounds. Replica counts are taken from the newest pull.

    Returns:
        The decision (without roles if the window is empty) and the next state.

    Raises:
        ConfigError: no policy of this mode is installed, or the policy needs more than this configuration has.
    """
    sequence = state.sequence + 1
    name = f"d{sequence:06d}"
    if not window.pulls:
        budget = config.within_pool.max_gpu_budget
        empty = Decision(name, window.end_s, config.no_operation, (), 0, 0, budget)
        return empty, replace(state, sequence=sequence)
    held = in_force(config.schedule, window.pulls[-1].wall_s)
    config = config.scheduled(held)
    proposed = config.policy.propose(window, state, config.unbounded)
    proposed = replace(proposed, proposals=[within_schedule(each, held) for each in proposed.proposals])
    config = config.within_pool
    pools, seen = window.pulls[-1].pools, proposed.roles
    gpus = existing_gpus(pools, config)
    bounded, reserved, moved = _bounded(proposed, pools, gpus, config)
    again_s = _again_s(bounded, config)
    if again_s is not None:
        bounded = [_once_more(proposal, again_s) for proposal in bounded]
    roles = tuple(_finish(noted(proposal, held)) for proposal in bounded)
    added = sum(each.engine_gpus * each.amount for each in bounded if each.action is Action.UP and not moved)
    decision = Decision(
        name, window.end_s, config.no_operation, roles, gpus, gpus + added, config.max_gpu_budget, moved
    )
    memory = dict(state.roles)
    for each in roles:
        # Back-off and grace count full intervals.
        older = aged(seen[each.role], config) if state.interval_s is None else seen[each.role]
        memory[each.role] = replace(older, owed=each.role in reserved)
        if each.action is not Action.HOLD and not config.no_operation:
            # Starts that stay are still to become ready.
            is_awaited = each.action is Action.UP or each.desired > pools[each.role].ready
            memory[each.role] = replace(memory[each.role], asked=each.desired if is_awaited else None)
    return decision, PlannerState(sequence, memory, proposed.memory, again_s)


def _bounded(
    proposed: Proposal, pools: Mapping[Role, PoolCounts], gpus: int, config: DecideConfig
) -> tuple[list[RoleProposal], frozenset[Role], int]:
    """Return the proposals after steps, bounds, budget and rebalancing, the roles with a reservation, and how many switch."""
    seen = proposed.roles
    owed = frozenset(role for role in pools if seen[role].owed)
    backed_off = [back_off(each, seen[each.role]) for each in proposed.proposals]
    stepped = [_limit(each, config) for each in left(backed_off, seen, config)]
    is_giving_back = config.grant is not None and gpus > config.grant
    if not is_giving_back and (moved := switched(stepped, seen, config)):
        return moved, frozenset(), moved[0].amount
    raised_all = release(raised(stepped, gpus, config, seen=seen), owed)
    if config.grant is not None:
        raised_all = within_grant(raised_all, bids_of(proposed.proposals, config), config)
    raised_all = yielded(raised_all, gpus, config, seen=seen)
    bounded = within_bounds(raised_all, gpus, config, owed=owed)
    kept_all = kept(bounded, config, freeable=_freeable(bounded, gpus, config))
    return *reserve(kept_all, owed, pools, freeable=_freeable(kept_all, gpus, config)), 0


def roll_back(
    role: Role, why: str, *, pull: Pull, state: PlannerState, config: DecideConfig
) -> tuple[Decision, PlannerState]:
    """Return the decision that takes a scale-up back whose replica never became ready, and the next state.

    Raises:
        ValueError: no scale-up of the role is outstanding.
    """
    asked = state.of(role).asked
    if asked is None:
        raise ValueError(f"no scale-up of {role.value} is outstanding")
    sequence = state.sequence + 1
    pool = pull.pools[role]
    after = rolled_back(state.of(role), config)
    config = config.scheduled(in_force(config.schedule, pull.wall_s))
    floor = config.floor(role, config.engine_gpus(role, pool.gpus))
    is_at_floor = asked <= floor
    if not (is_at_floor or config.policy.waits_for_adjustments) and asked - 1 > pool.ready:
        # Others requested since are still starting; each can be rolled back as well.
        after = replace(after, asked=asked - 1)
    inputs = {"asked": asked, "ready": pool.ready, "starting": pool.starting, "failures": after.withdrawals}
    step = Step("withdraw", inputs, floor, f"no scale-up for {after.backoff} intervals")
    desired, action, words = asked - 1, Action.DOWN, f"{asked} -> {asked - 1}: withdrawn"
    if is_at_floor:
        desired, action, words = asked, Action.HOLD, f"{asked}: at its floor"
    sentence = f"{role.value} {words}, never became ready: {why}"
    taken = RoleDecision(role, asked, desired, action, Reason.NEVER_READY, sentence, (step,))
    gpus = existing_gpus(pull.pools, config)
    budget = config.within_pool.max_gpu_budget
    decision = Decision(f"d{sequence:06d}", pull.at_s, config.no_operation, (taken,), gpus, gpus, budget)
    roles = {**state.roles, role: after}
    return decision, replace(state, sequence=sequence, roles=roles, interval_s=None)


def _freeable(proposals: Sequence[RoleProposal], gpus: int, config: DecideConfig) -> int:
    """Return the GPUs that are free, drain, or stand above the floors of roles that shrink."""
    free = max(0, (config.max_gpu_budget or 0) - gpus)
    draining = sum(each.pool.draining * each.engine_gpus for each in proposals)
    given = sum(
        (each.pool.replicas - config.floor(each.role, each.engine_gpus)) * each.engine_gpus
        for each in proposals
        if each.action is Action.DOWN
    )
    return free + draining + given


def _limit(proposal: RoleProposal, config: DecideConfig) -> RoleProposal:
    if config.max_step is None or proposal.action is Action.HOLD or proposal.amount <= config.max_step:
        return proposal
    step = Step(
        "max_step", {"replicas_wanted": proposal.amount}, config.max_step, f"limited to {config.max_step}"
    )
    return replace(proposal.passed(step), amount=config.max_step)


def _again_s(proposals: Sequence[RoleProposal], config: DecideConfig) -> float | None:
    """Return after how long to decide again because a role grows; None: after the mode's interval.

    One step a decision bounds a mistake, not the speed: what starts counts as supply, so the next decision asks for
    more only if that is not enough.
    """
    is_growing = any(proposal.action is Action.UP for proposal in proposals)
    if config.no_operation or not is_growing or config.again_s >= config.interval_s:
        return None
    return config.again_s


def _once_more(proposal: RoleProposal, again_s: float) -> RoleProposal:
    if proposal.action is not Action.UP:
        return proposal
    return proposal.passed(Step("again", {"in_s": again_s}, None, "decides again: more may be needed"))


def _finish(proposal: RoleProposal) -> RoleDecision:
    current = proposal.pool.replicas
    desired = current + proposal.change
    change = f"{current} -> {desired}" if desired != current else f"{current}"
    sentence = f"{proposal.role.value} {change}: {proposal.detail}"
    return RoleDecision(
        proposal.role, current, desired, proposal.action, proposal.reason, sentence, proposal.steps
    )
