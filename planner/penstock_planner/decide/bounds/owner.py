"""Rule ``owner``: a role whose replicas another client sets is left to that client.

A role of ``scaling.managedBy: external`` never belongs to the planner. Any other role that another client writes
is left to the writer for one adjustment interval, and for twice as long after each further write: a writer that keeps
writing (an autoscaler) is overridden less and less often; after a single write (a person's) planning soon resumes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, RoleState, Step
from penstock_planner.decide.rule import Facts, Proposals


def leave_to_writers(proposals: Proposals, facts: Facts) -> Proposals:
    """Hold the roles that others scale; one of them alone keeps a graph from going to zero."""
    left = {each.role for each in proposals.roles if is_left(each.role, facts.roles[each.role], facts.config)}
    return proposals.of(
        _held(each, facts.roles[each.role], left)
        if each.role in left or (left and each.reason is Reason.IDLE)
        else each
        for each in proposals.roles
    )


def _held(proposal: RoleProposal, state: RoleState, left: Collection[Role]) -> RoleProposal:
    if proposal.action is Action.HOLD:
        return proposal
    detail = f"{' and '.join(sorted(left))} is scaled by {state.writer or 'others'}"
    inputs = {"foreign_writes": state.foreign_writes, "since_write": state.since_write}
    return proposal.held(Reason.SCALED_BY_OTHER, detail, Step("owner", inputs, None, "hold"))


UNHEARD_WRITES = 3
"""Chosen: from this write in a row on, one that comes while the role is left to its writer changes nothing, so that a
writer of every few seconds is fought again only after the whole time."""


def is_left(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether the planner leaves a role's replicas to another writer now."""
    return role in config.external or state.since_write < span(state, config) - 1


def owner(role: Role, state: RoleState, config: DecideConfig, writers: Mapping[Role, str]) -> str:
    """Return whom a role's replicas are left to, in words; empty: the planner sets them."""
    if role in config.external:
        return writers.get(role) or "others"
    return state.writer if state.since_write < span(state, config) else ""


def is_heard(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether one more write by another client changes what the planner does."""
    return state.foreign_writes < UNHEARD_WRITES or not is_left(role, state, config)


def written(state: RoleState, writer: str) -> RoleState:
    """Return the state after another writer has set the role's replicas: nothing is outstanding."""
    return replace(state, asked=None, writer=writer, foreign_writes=state.foreign_writes + 1, since_write=0)


def span(state: RoleState, config: DecideConfig) -> int:
    """Return the decisions for which a role is left to the client that wrote it last."""
    if not state.foreign_writes:
        return 0
    intervals: int = min(2 ** min(state.foreign_writes - 1, 8), MAX_BACKOFF_INTERVALS)
    return intervals * config.decisions_per_adjustment
