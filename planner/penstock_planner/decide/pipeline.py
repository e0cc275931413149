"""The function that makes a decision, and the function that rolls back a scale-up that failed.

The same input always gives the same output, bit for bit, because replay depends on it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.api import Role
from penstock_planner.decide.bounds import (
    backoff,
    gpu_budget,
    owner,
    pace,
    pool,
    rebalance,
    replicas,
    schedule,
    switch,
    total_floor,
    trial_yield,
)
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import (
    Action,
    Decision,
    Proposal,
    Reason,
    RoleDecision,
    RoleProposal,
    Step,
)
from penstock_planner.decide.demand.observation import Pull, Window
from penstock_planner.decide.rule import Facts, Proposals, Rule, each_role
from penstock_planner.decide.schedule import Schedule, in_force
from penstock_planner.decide.state import PlannerState, learned_by

RULES: Final[tuple[Rule, ...]] = (
    Rule("scheduled_most", (Reason.ABOVE_SCHEDULE,), each_role(schedule.keep_ceiling)),
    Rule("pool", (), pool.bid),
    Rule("backoff", (Reason.WITHDRAWAL_BACKOFF,), each_role(backoff.hold_after_failure)),
    Rule("owner", (Reason.SCALED_BY_OTHER,), owner.leave_to_writers),
    Rule("max_step", (), each_role(pace.limit_step)),
    Rule("switch", (Reason.ROLE_SWITCH,), switch.switch),
    Rule("total_floor", (Reason.BELOW_TOTAL_FLOOR,), total_floor.raise_to_total_floor, binds_switch=False),
    Rule("rebalance", (), rebalance.end_rebalance, binds_switch=False),
    Rule("pool", (Reason.ABOVE_BUDGET, Reason.GPU_BUDGET), pool.keep_grant, binds_switch=False),
    Rule("yield", (Reason.SPARE_CAPACITY,), trial_yield.reclaim_trial_replica, binds_switch=False),
    Rule("floor", (Reason.AT_FLOOR,), each_role(replicas.keep_floor), binds_switch=False),
    Rule("max_replicas", (Reason.AT_MAX_REPLICAS,), each_role(replicas.keep_ceiling), binds_switch=False),
    Rule(
        "gpu_budget",
        (Reason.GPU_BUDGET, Reason.GPU_BUDGET_YIELDED),
        gpu_budget.keep_budget,
        binds_switch=False,
    ),
    Rule("total_floor", (Reason.AT_TOTAL_FLOOR,), total_floor.hold_above_total_floor, binds_switch=False),
    Rule("rebalance", (), rebalance.update_reservations, binds_switch=False),
    Rule("again", (), pace.decide_soon),
    Rule("schedule", (), each_role(schedule.note)),
)
"""Rules that are applied to every policy's proposal, in order. docs/planner.md has the same table."""


def decide(window: Window, state: PlannerState, config: DecideConfig) -> tuple[Decision, PlannerState]:
    """Return the decision after one adjustment interval, and the state for the next one.

    The policy of ``config.mode`` proposes a number of replicas for each role. The rules in `RULES` (bounds, GPU budget
    and so on) then limit or replace the proposals. The bounds of active schedule entries replace the configured ones.
    Replica counts are those of the newest pull.

    Args:
        window: Pulls (metrics scrapes) of the interval.
        state: State left by the last decision.
        config: Mode, bounds and budget.

    Returns:
        The decision and the next state. The decision has no roles if the window has no pulls.

    Raises:
        ConfigError: No policy of this mode is installed, or the policy needs more than this configuration has.
    """
    if not window.pulls:
        return _nothing_seen(window, state, config)
    held = in_force(config.schedule, window.pulls[-1].wall_s)
    config = config.scheduled(held)
    proposed = config.policy.propose(window, state, config.unbounded)
    facts = _facts(window, proposed, config.within_pool, held)
    proposals = Proposals(tuple(proposed.proposals))
    for rule in RULES:
        if rule.binds_switch or not proposals.switched:
            proposals = rule.apply(proposals, facts)
    return _decision(proposals, facts, state), _next_state(proposals, proposed, facts, state)


def _facts(window: Window, proposed: Proposal, config: DecideConfig, held: Schedule) -> Facts:
    pools = window.pulls[-1].pools
    return Facts(window, pools, gpu_budget.existing_gpus(pools, config), proposed.roles, config, held)


def _nothing_seen(window: Window, state: PlannerState, config: DecideConfig) -> tuple[Decision, PlannerState]:
    sequence, budget = state.sequence + 1, config.within_pool.max_gpu_budget
    empty = Decision(_name(sequence), window.end_s, config.no_operation, (), 0, 0, budget)
    return empty, replace(state, sequence=sequence)


def _name(sequence: int) -> str:
    return f"d{sequence:06d}"


def _decision(proposals: Proposals, facts: Facts, state: PlannerState) -> Decision:
    config, gpus = facts.config, facts.gpus
    added = 0 if proposals.switched else proposals.added_gpus()
    return Decision(
        _name(state.sequence + 1),
        facts.window.end_s,
        config.no_operation,
        tuple(map(_finish, proposals.roles)),
        gpus,
        gpus + added,
        config.max_gpu_budget,
        proposals.switched,
    )


def _next_state(proposals: Proposals, proposed: Proposal, facts: Facts, state: PlannerState) -> PlannerState:
    config = facts.config
    roles = dict(state.roles)
    for each in proposals.roles:
        seen, role = facts.roles[each.role], each.role
        # Back-off and grace are counted in full intervals, so an early decision does not count.
        older = backoff.after_decision(seen, config) if state.interval_s is None else seen
        roles[role] = replace(older, reserved=role in proposals.reserved)
        if each.action is not Action.HOLD and not config.no_operation:
            # After a scale-down, replicas that are still starting and remain are awaited too.
            desired = each.pool.replicas + each.change
            is_awaited = each.action is Action.UP or desired > facts.pools[role].ready
            roles[role] = replace(roles[role], pending_replicas=desired if is_awaited else None)
    learned = learned_by(*proposed.learned)
    return PlannerState(state.sequence + 1, roles, learned, proposals.next_decision_s)


def roll_back(
    role: Role, why: str, *, pull: Pull, state: PlannerState, config: DecideConfig
) -> tuple[Decision, PlannerState]:
    """Return the decision that rolls back a scale-up whose replica never became ready, and the next state.

    The role goes to one replica fewer than the scale-up requested, but not below its minimum, and does not scale up
    again until a back-off (a number of decisions) is over.

    Args:
        role: Role whose scale-up failed.
        why: Reason in words, for the decision's sentence.
        pull: Replica counts now; its metrics are not used.
        state: State left by the last decision.
        config: Bounds and budget.

    Raises:
        ValueError: The role has no pending scale-up.
    """
    asked = state.of(role).pending_replicas
    if asked is None:
        raise ValueError(f"no scale-up of {role.value} is outstanding")
    sequence = state.sequence + 1
    pool = pull.pools[role]
    after = backoff.rolled_back(state.of(role), config)
    config = config.scheduled(in_force(config.schedule, pull.wall_s))
    floor = config.floor(role, config.engine_gpus(role, pool.gpus))
    is_at_floor = asked <= floor
    if not (is_at_floor or config.policy.waits_for_adjustments) and asked - 1 > pool.ready:
        # Replicas that were requested later are still starting; each of them can be rolled back as well.
        after = replace(after, pending_replicas=asked - 1)
    inputs = {
        "asked": asked,
        "ready": pool.ready,
        "starting": pool.starting,
        "failures": after.failed_scale_ups,
    }
    step = Step("withdraw", inputs, floor, f"no scale-up for {after.backoff} intervals")
    desired, action, words = asked - 1, Action.DOWN, f"{asked} -> {asked - 1}: withdrawn"
    if is_at_floor:
        desired, action, words = asked, Action.HOLD, f"{asked}: at its floor"
    sentence = f"{role.value} {words}, never became ready: {why}"
    taken = RoleDecision(role, asked, desired, action, Reason.NEVER_READY, sentence, (step,), step.name)
    gpus = gpu_budget.existing_gpus(pull.pools, config)
    budget = config.within_pool.max_gpu_budget
    decision = Decision(_name(sequence), pull.at_s, config.no_operation, (taken,), gpus, gpus, budget)
    roles = {**state.roles, role: after}
    return decision, replace(state, sequence=sequence, roles=roles, interval_s=None)


def _finish(proposal: RoleProposal) -> RoleDecision:
    current = proposal.pool.replicas
    desired = current + proposal.change
    stays = f"stays at {current}" if proposal.retained_because is not None else f"{current}"
    change = f"{current} -> {desired}" if desired != current else stays
    sentence = f"{proposal.role.value} {change}: {proposal.detail}"
    return RoleDecision(
        proposal.role,
        current,
        desired,
        proposal.action,
        proposal.reason,
        sentence,
        proposal.steps,
        proposal.rule,
        proposal.retained_because,
    )
