"""Rule ``backoff``: after one of a role's replicas never became ready, the role does not scale up for some adjustment intervals.

This module also updates the counters in `RoleState`: grace period, back-off, failed scale-ups and the time since
another client's write. Times are counted in decisions.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.bounds.owner import cede_decisions
from penstock_planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step, count_of
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.rule import Facts
from penstock_planner.decide.state import RoleState


def hold_after_failure(proposal: RoleProposal, facts: Facts) -> RoleProposal:
    """Return the proposal, with a scale-up replaced by no change while the back-off of the role lasts.

    The back-off is a number of decisions in which a role must not grow after a scale-up of it was rolled back. Other
    proposals are returned unchanged.

    Args:
        proposal: Proposed change of one role.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    return back_off(proposal, facts.roles[proposal.role])


def back_off(proposal: RoleProposal, state: RoleState) -> RoleProposal:
    """Return the proposal, with a scale-up replaced by no change while the back-off of the role lasts.

    The back-off is a number of decisions in which a role must not grow after a scale-up of it was rolled back, because
    the next scale-up would probably fail in the same way. Other proposals are returned unchanged.

    Args:
        proposal: Proposal of the role.
        state: State of the role with the number of decisions that it still has to wait.
    """
    if not state.backoff or proposal.action is not Action.UP:
        return proposal
    inputs = {"intervals_left": state.backoff, "withdrawals": state.failed_scale_ups}
    detail = f"{count_of(state.backoff, 'interval')} of backoff left after a replica that never became ready"
    return proposal.held(Reason.WITHDRAWAL_BACKOFF, detail, Step("backoff", inputs, 0, "hold"))


def with_observed_counts(role: Role, pool: PoolCounts, before: RoleState, config: DecideConfig) -> RoleState:
    """Return the role's state updated with the replica counts of this decision interval.

    A grace period, in which the role must not shrink, starts if more decode (or aggregated) workers are ready than at
    the last decision, because each new worker has an empty KV cache. It does not matter whether the planner or another
    client started the workers, or whether they return from a crash. The first decision also starts a grace period, for
    the workers that started with the graph.

    A pending scale-up is cleared if all its replicas are ready, or if fewer replicas exist than it requested. The
    failure count is cleared if as many replicas are ready as a failed scale-up requested.

    Args:
        role: Role of the state.
        pool: Replica counts at the newest pull (metrics scrape).
        before: State left by the last decision.
        config: Configuration with the length of the grace period.
    """
    is_kv = role is not Role.PREFILL
    is_new = is_kv and pool.ready > (before.last_ready or 0)
    is_kept = before.pending_replicas is not None and pool.ready >= before.pending_replicas
    is_gone = before.pending_replicas is not None and pool.replicas < before.pending_replicas
    if before.failed_replicas is not None and pool.ready >= before.failed_replicas:
        before = replace(before, failed_scale_ups=0, failed_replicas=None, backoff=0)
    return replace(
        before,
        last_ready=pool.ready,
        grace=config.decode_grace_intervals if is_new else before.grace,
        pending_replicas=None if is_kept or is_gone else before.pending_replicas,
        failed_scale_ups=0 if is_kept else before.failed_scale_ups,
        failed_replicas=None if is_kept else before.failed_replicas,
    )


def after_decision(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the role's state after one more decision, with its counts of decisions updated.

    The remaining decisions in which it must not shrink (``grace``) or grow (``backoff``) are one fewer, and the
    decisions since another client set its replicas (``since_write``) are one more. The writes of other clients are
    forgotten 16 adjustment intervals (`MAX_BACKOFF_INTERVALS`) after the planner has resumed scaling the role, if there
    was no further write.

    Args:
        state: State of the role before the decision.
        config: Configuration with the length of the intervals.
    """
    state = replace(state, grace=max(0, state.grace - 1), backoff=max(0, state.backoff - 1))
    if not state.foreign_writes:
        return state
    since = state.since_write + 1
    if since >= cede_decisions(state, config) + MAX_BACKOFF_INTERVALS * config.decisions_per_adjustment:
        return replace(state, writer="", foreign_writes=0, since_write=0)
    return replace(state, since_write=since)


def rolled_back(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the role's state after a scale-up was rolled back: nothing is pending, and the role must not grow for some time.

    This time, the back-off, is 2, 4, 8, 16, 16... adjustment intervals, depending on the number of consecutive
    failures. A mode that decides several times per adjustment interval needs correspondingly more decisions for the
    same time.

    Args:
        state: State of the role, in which the scale-up is pending.
        config: Configuration with the number of decisions per adjustment interval.
    """
    failed_scale_ups = state.failed_scale_ups + 1
    backoff = min(2 ** min(failed_scale_ups, 8), MAX_BACKOFF_INTERVALS) * config.decisions_per_adjustment
    return replace(
        state,
        pending_replicas=None,
        failed_scale_ups=failed_scale_ups,
        failed_replicas=state.pending_replicas,
        backoff=backoff,
        reserved=False,
    )
