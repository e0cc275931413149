"""Rule ``owner``: the planner does not change a role whose replicas another client sets.

A role with ``scaling.managedBy: external`` never belongs to the planner. If another client writes the replica count
of any other role, the planner leaves the role alone for one adjustment interval, and twice as long after each further
write. So the planner overrides a client that keeps writing (an autoscaler) less and less often, and resumes soon
after a single write (by a person).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.rule import Facts, Proposals
from penstock_planner.decide.state import RoleState


def leave_to_writers(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals without changes of roles whose replicas another client sets.

    If there is such a role, the other roles do not go to zero either.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    left = {
        each.role for each in proposals.roles if is_ceded(each.role, facts.roles[each.role], facts.config)
    }
    return proposals.with_roles(
        [
            _held(each, facts.roles[each.role], left)
            if each.role in left or (left and each.reason is Reason.IDLE)
            else each
            for each in proposals.roles
        ]
    )


def _held(proposal: RoleProposal, state: RoleState, left: Collection[Role]) -> RoleProposal:
    if proposal.action is Action.HOLD:
        return proposal
    detail = f"{' and '.join(sorted(left))} is scaled by {state.writer or 'others'}"
    inputs = {"foreign_writes": state.foreign_writes, "since_write": state.since_write}
    return proposal.held(Reason.SCALED_BY_OTHER, detail, Step("owner", inputs, None, "hold"))


IGNORED_AFTER_WRITES = 3
"""Number of consecutive foreign writes from which on a further write, while the role is left to its writer, changes
nothing.

Chosen: otherwise a client that writes every few seconds would restart the pause with each write, and the planner
would never scale the role again."""


def is_ceded(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether the planner does not scale the role at this decision, because another client does.

    The planner never scales a role that is managed externally (``scaling.managedBy: external``), and does not scale any
    other role for some decisions after another client has written that role's replica count.

    Args:
        role: Role to look up.
        state: State of the role, with the writes of other clients.
        config: Configuration with the externally managed roles and the length of the intervals.
    """
    return role in config.external or state.since_write < cede_decisions(state, config) - 1


def owner(role: Role, state: RoleState, config: DecideConfig, writers: Mapping[Role, str]) -> str:
    """Return the name of the client that sets a role's replicas in place of the planner; empty if the planner sets them.

    Args:
        role: Role to look up.
        state: State of the role.
        config: Configuration with the externally managed roles.
        writers: Name of the client that wrote the replica count last, by role. For an externally managed role without
            an entry, "others" is returned.
    """
    if role in config.external:
        return writers.get(role) or "others"
    return state.writer if state.since_write < cede_decisions(state, config) else ""


def write_has_effect(role: Role, state: RoleState, config: DecideConfig) -> bool:
    """Return whether one more write of the replica count by another client would change what the planner does.

    After a write, the planner stops scaling the role for some time, which is longer the more writes there were. After
    three consecutive writes (`IGNORED_AFTER_WRITES`), a further write within that time would change nothing.

    Args:
        role: Role whose replica count is written.
        state: State of the role.
        config: Configuration with the externally managed roles.
    """
    return state.foreign_writes < IGNORED_AFTER_WRITES or not is_ceded(role, state, config)


def after_foreign_write(state: RoleState, writer: str) -> RoleState:
    """Return the role's state after another client has set its replica count.

    A scale-up of the planner whose replicas are not all ready is not waited for any more. The time for which the
    planner does not scale the role starts again.

    Args:
        state: State of the role before.
        writer: Name of the client that wrote.
    """
    return replace(
        state, pending_replicas=None, writer=writer, foreign_writes=state.foreign_writes + 1, since_write=0
    )


def cede_decisions(state: RoleState, config: DecideConfig) -> int:
    """Return for how many decisions the planner does not scale a role after another client last set the role's replicas.

    The number is that of one adjustment interval, doubled with each consecutive write of another client, at most that
    of 16 intervals. It is 0 if no other client has written.

    Args:
        state: State of the role, with the number of consecutive writes.
        config: Configuration with the number of decisions per adjustment interval.
    """
    if not state.foreign_writes:
        return 0
    intervals: int = min(2 ** min(state.foreign_writes - 1, 8), MAX_BACKOFF_INTERVALS)
    return intervals * config.decisions_per_adjustment
