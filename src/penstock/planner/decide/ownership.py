"""Who sets a role's replicas: the planner, or another writer that it leaves the role to.

A role of ``scaling.managedBy: external`` never belongs to the planner. Any other role that somebody else writes
is left to the writer for one adjustment interval, and for twice as long after each further write: a writer that keeps
writing (an autoscaler) is overridden less and less often; after a single write (a person's) planning soon resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.proposal import RoleProposal
from penstock.planner.decide.state import RoleState

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
    """Return whether one more write by somebody else changes what the planner does."""
    return state.foreign_writes < UNHEARD_WRITES or not is_left(role, state, config)


def written(state: RoleState, writer: str) -> RoleState:
    """Return the state after another writer has set the role's replicas: nothing is outstanding."""
    return replace(state, asked=None, writer=writer, foreign_writes=state.foreign_writes + 1, since_write=0)


def aged(state: RoleState, config: DecideConfig) -> RoleState:
    """Return the state after one more interval; the writer is forgotten once it has been silent for long enough."""
    if not state.foreign_writes:
        return state
    since = state.since_write + 1
    if since >= _span(state, config) + MAX_BACKOFF_INTERVALS * config.decisions_per_adjustment:
        return replace(state, writer="", foreign_writes=0, since_write=0)
    return replace(state, since_write=since)


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
