"""The one function that decides, and the one that takes a failed scale-up back.

Same input, same output, bit for bit: replay depends on it.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_graph.models import Role
from penstock_planner.decide.budget import existing_gpus, within_bounds
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Decision, Reason, RoleDecision, Step
from penstock_planner.decide.observation import Pull, Window
from penstock_planner.decide.propose import Draft, propose
from penstock_planner.decide.rebalance import abandon, claim
from penstock_planner.decide.stabilise import age, remember, stabilise, withdrawn
from penstock_planner.decide.state import PlannerState
from penstock_planner.decide.window import kv_signal, queue_signal

_CHANGE = {Action.UP: 1, Action.HOLD: 0, Action.DOWN: -1}


def decide(window: Window, state: PlannerState, config: DecideConfig) -> tuple[Decision, PlannerState]:
    """Return what to change after one adjustment interval, and the state for the next.

    Each role changes by at most one replica. Steps: signal, floor and thresholds (`propose`), grace, backoff
    and trend (`stabilise`), floors and ceilings over all roles (`within_bounds`), GPUs that move from one role
    to the other (`rebalance`).

    Args:
        window: The interval's pulls; replica counts are taken from the newest.
        state: What the last decision left.
        config: Thresholds, budgets, intervals.

    Returns:
        The decision (without roles if the window is empty) and the next state.
    """
    sequence = state.sequence + 1
    name = f"d{sequence:06d}"
    if not window.pulls:
        empty = Decision(name, window.end_s, config.no_operation, (), 0, 0, config.max_gpu_budget)
        return empty, replace(state, sequence=sequence)
    pools = window.pulls[-1].pools
    seen = {role: remember(role, pool, state.of(role), config) for role, pool in pools.items()}
    drafts = []
    for role, pool in pools.items():
        signal = queue_signal(window.pulls) if role is Role.PREFILL else kv_signal(window.pulls)
        drafts.append(stabilise(propose(role, pool, signal, config), seen[role], window, config))
    gpus = existing_gpus(pools, config)
    owed = frozenset(role for role in pools if seen[role].owed)
    bounded = within_bounds(abandon(drafts, owed), gpus, config, owed=owed)
    bounded, claims = claim(bounded, owed, pools)
    roles = tuple(_finish(draft) for draft in bounded)
    added = sum(draft.engine_gpus for draft in bounded if draft.action is Action.UP)
    decision = Decision(
        name, window.end_s, config.no_operation, roles, gpus, gpus + added, config.max_gpu_budget
    )
    memory = dict(state.roles)
    for each in roles:
        memory[each.role] = replace(age(seen[each.role]), owed=each.role in claims)
        if each.action is not Action.HOLD and not config.no_operation:
            asked = each.desired if each.action is Action.UP else None
            memory[each.role] = replace(memory[each.role], asked=asked)
    return decision, PlannerState(sequence, memory)


def withdraw(
    role: Role, why: str, *, pull: Pull, state: PlannerState, config: DecideConfig
) -> tuple[Decision, PlannerState]:
    """Return the decision that takes a scale-up back whose replica never became ready, and the next state.

    Args:
        role: The role that was scaled up; its state has ``asked``.
        why: What the backend said, or how long was waited.
        pull: Time and pools now; its metrics are not looked at.
        state: What the last decision left.
        config: For the record of the budget.

    Returns:
        A decision for one replica fewer than was asked for, and a state that holds further scale-ups of the
        role back for a doubling number of intervals.

    Raises:
        ValueError: no scale-up of the role is outstanding.
    """
    asked = state.of(role).asked
    if asked is None:
        raise ValueError(f"no scale-up of {role.value} is outstanding")
    sequence = state.sequence + 1
    after = withdrawn(state.of(role))
    pool = pull.pools[role]
    inputs = {"asked": asked, "ready": pool.ready, "starting": pool.starting, "failures": after.withdrawals}
    step = Step("withdraw", inputs, None, f"no scale-up for {after.backoff} intervals")
    sentence = f"{role.value} {asked} -> {asked - 1}: withdrawn, never became ready: {why}"
    taken = RoleDecision(role, asked, asked - 1, Action.DOWN, Reason.NEVER_READY, sentence, (step,))
    gpus = existing_gpus(pull.pools, config)
    decision = Decision(
        f"d{sequence:06d}", pull.at_s, config.no_operation, (taken,), gpus, gpus, config.max_gpu_budget
    )
    return decision, PlannerState(sequence, {**state.roles, role: after})


def _finish(draft: Draft) -> RoleDecision:
    current = draft.pool.replicas
    desired = current + _CHANGE[draft.action]
    change = f"{current} -> {desired}" if desired != current else f"{current}"
    return RoleDecision(
        role=draft.role,
        current=current,
        desired=desired,
        action=draft.action,
        reason=draft.reason,
        sentence=f"{draft.role.value} {change}: {draft.detail}",
        steps=draft.steps,
    )
