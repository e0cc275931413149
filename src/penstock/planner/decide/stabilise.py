"""What is remembered of a role from decision to decision: grace, back-off, and who sets its replicas.

A role of ``scaling.managedBy: external`` never belongs to the planner. Any other role that another client writes
is left to the writer for one adjustment interval, and for twice as long after each further write: a writer that keeps
writing (an autoscaler) is overridden less and less often; after a single write (a person's) planning soon resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import PoolCounts
from penstock.planner.decide.proposal import RoleProposal
from penstock.planner.decide.state import RoleState


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
    if since >= _span(state, config) + MAX_BACKOFF_INTERVALS * config.decisions_per_adjustment:
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


def back_off(proposal: RoleProposal, state: RoleState) -> RoleProposal:
    """Return a scale-up held after a failed one, regardless of ready replicas: the next one would be refused too."""
    if not state.backoff or proposal.action is not Action.UP:
        return proposal
    inputs = {"intervals_left": state.backoff, "withdrawals": state.withdrawals}
    detail = f"{in_intervals(state.backoff)} of backoff left after a replica that never became ready"
    return proposal.held(Reason.WITHDRAWAL_BACKOFF, detail, Step("backoff", inputs, 0, "hold"))


def in_intervals(count: int) -> str:
    """Return "1 interval" or "3 intervals"."""
    return f"{count} interval" if count == 1 else f"{count} intervals"


UNHEARD_WRITES = 3
"""Chosen: from this write in a row on, one that comes while the role is left to its writer changes nothing, so that a
writer of every few seconds is fought again only after the whole time."""


def is_left(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether the planner leaves a role's replicas to another writer now."""
    return role in config.external or state.since_write < _span(state, config) - 1


def owner(role: Role, state: RoleState, config: DecideConfig, writers: Mapping[Role, str]) -> str:
    """Return whom a role's replicas are left to, in words; empty: the planner sets them."""
    if role in config.external:
        return writers.get(role) or "others"
    return state.writer if state.since_write < _span(state, config) else ""


def is_heard(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether one more write by another client changes what the planner does."""
    return state.foreign_writes < UNHEARD_WRITES or not is_left(role, state, config)


def written(state: RoleState, writer: str) -> RoleState:
    """Return the state after another writer has set the role's replicas: nothing is outstanding."""
    return replace(state, asked=None, writer=writer, foreign_writes=state.foreign_writes + 1, since_write=0)


def left(
    proposals: Sequence[RoleProposal], seen: Mapping[Role, RoleState], config: DecideConfig
) -> list[RoleProposal]:
    """Return the proposals, held for the roles that others scale; one of them alone keeps a graph from zero."""
    owned = {each.role for each in proposals if is_left(each.role, seen[each.role], config)}
    return [
        _held(each, seen[each.role], owned)
        if each.role in owned or (owned and each.reason is Reason.IDLE)
        else each
        for each in proposals
    ]


def _held(proposal: RoleProposal, state: RoleState, owned: set[Role]) -> RoleProposal:
    if proposal.action is Action.HOLD:
        return proposal
    detail = f"{' and '.join(sorted(owned))} is scaled by {state.writer or 'others'}"
    inputs = {"foreign_writes": state.foreign_writes, "since_write": state.since_write}
    return proposal.held(Reason.SCALED_BY_OTHER, detail, Step("owner", inputs, None, "hold"))


def _span(state: RoleState, config: DecideConfig) -> int:
    if not state.foreign_writes:
        return 0
    intervals: int = min(2 ** min(state.foreign_writes - 1, 8), MAX_BACKOFF_INTERVALS)
    return intervals * config.decisions_per_adjustment
