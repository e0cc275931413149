"""Rule ``backoff``: after a replica that never became ready a role is not scaled up for a while; and what a role's memory counts.

Grace, back-off and other writers' pauses are counted in adjustment intervals.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.bounds.owner import span
from penstock_planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, RoleState, Step, count_of
from penstock_planner.decide.observation import PoolCounts
from penstock_planner.decide.rule import Facts, Proposals


def hold_after_failure(proposals: Proposals, facts: Facts) -> Proposals:
    """Hold each scale-up of a role whose last one failed."""
    return proposals.of([back_off(each, facts.roles[each.role]) for each in proposals.roles])


def back_off(proposal: RoleProposal, state: RoleState) -> RoleProposal:
    """Return a scale-up held after a failed one, regardless of ready replicas: the next one would be refused too."""
    if not state.backoff or proposal.action is not Action.UP:
        return proposal
    inputs = {"intervals_left": state.backoff, "withdrawals": state.withdrawals}
    detail = f"{count_of(state.backoff, 'interval')} of backoff left after a replica that never became ready"
    return proposal.held(Reason.WITHDRAWAL_BACKOFF, detail, Step("backoff", inputs, 0, "hold"))


def remember(role: Role, pool: PoolCounts, before: RoleState, config: DecideConfig) -> RoleState:
    """Return the role's state as this interval sees it: grace opened, a settled scale-up forgotten.

    The grace period opens when more decode (or aggregated) workers are ready than at the last decision: a
    worker of ours, another writer's or one back from a crash, each with an empty KV cache; and at the first
    decision, for the workers that started with the graph.
    """
    is_kv = role is not Role.PREFILL
    is_new = is_kv and pool.ready > (before.seen or 0)
    is_kept = before.asked is not None and pool.ready >= before.asked
    is_gone = before.asked is not None and pool.replicas < before.asked
    if before.failed is not None and pool.ready >= before.failed:
        before = replace(before, withdrawals=0, failed=None, backoff=0)
    return replace(
        before,
        seen=pool.ready,
        grace=config.decode_grace_intervals if is_new else before.grace,
        asked=None if is_kept or is_gone else before.asked,
        withdrawals=0 if is_kept else before.withdrawals,
        failed=None if is_kept else before.failed,
    )


def aged(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the state after one more interval; a writer is forgotten once it has been silent for long enough."""
    state = replace(state, grace=max(0, state.grace - 1), backoff=max(0, state.backoff - 1))
    if not state.foreign_writes:
        return state
    since = state.since_write + 1
    if since >= span(state, config) + MAX_BACKOFF_INTERVALS * config.decisions_per_adjustment:
        return replace(state, writer="", foreign_writes=0, since_write=0)
    return replace(state, since_write=since)


def rolled_back(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the state after a scale-up that never became ready: 2, 4, 8, 16, 16... intervals of backoff.

    They are adjustment intervals; a mode that decides more often counts as many decisions more.
    """
    withdrawals = state.withdrawals + 1
    backoff = min(2 ** min(withdrawals, 8), MAX_BACKOFF_INTERVALS) * config.decisions_per_adjustment
    return replace(
        state, asked=None, withdrawals=withdrawals, failed=state.asked, backoff=backoff, owed=False
    )
