"""Rules ``scheduled_most`` and ``schedule``: shrink a role above its scheduled maximum, and record the active schedule entries."""

from __future__ import annotations

from dataclasses import replace

from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.rule import Facts, Proposals
from penstock_planner.decide.schedule import Schedule, lowered_ceilings, raised_floors


def keep_ceilings(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals, changed to shrink each role that exceeds its scheduled maximum, regardless of its load.

    The graph's schedule sets minimum and maximum replicas for times of the week; entries are active at their times.

    Args:
        proposals: Proposed changes of all roles.
        facts: What the rules read: replica counts, the state of each role and the configuration.
    """
    return proposals.with_roles(_within(each, facts.schedule) for each in proposals.roles)


def note(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals with the active schedule entries recorded on each role for which an entry sets a minimum or maximum.

    The record becomes the first of the role's steps.

    Args:
        proposals: Proposed changes of all roles.
        facts: What the rules read: replica counts, the state of each role and the configuration.
    """
    return proposals.with_roles(_noted(each, facts.schedule) for each in proposals.roles)


def _within(proposal: RoleProposal, held: Schedule) -> RoleProposal:
    """Return the proposal, or a scale-down to the scheduled maximum if the role exceeds it, regardless of its load."""
    most = lowered_ceilings({}, held).get(proposal.role)
    above = 0 if most is None else proposal.pool.replicas - most
    if above < 1:
        return proposal
    step = Step("scheduled_most", {"replicas": proposal.pool.replicas}, most, Reason.ABOVE_SCHEDULE.value)
    detail = f"{proposal.pool.replicas} exceeds the scheduled maximum of {most}"
    return proposal.changed(Action.DOWN, Reason.ABOVE_SCHEDULE, detail, step, amount=above)


_BY_SCHEDULE = frozenset({Reason.BELOW_FLOOR, Reason.AT_FLOOR, Reason.AT_MAX_REPLICAS, Reason.ABOVE_SCHEDULE})


def _noted(proposal: RoleProposal, held: Schedule) -> RoleProposal:
    """Return the proposal with the scheduled bounds as its first step. The detail names the entries if a bound decided."""
    bounds = [each for each in held if proposal.role in {*each.floors, *each.ceilings}]
    if not bounds:
        return proposal
    names = ", ".join(each.name for each in bounds)
    inputs = {
        "entries": names,
        "floor": raised_floors({}, bounds).get(proposal.role),
        "ceiling": lowered_ceilings({}, bounds).get(proposal.role),
    }
    detail = proposal.detail
    if proposal.reason in _BY_SCHEDULE:
        detail = f"{detail} (schedule: {names})"
    return replace(proposal, detail=detail, steps=(Step("schedule", inputs, None, "holds"), *proposal.steps))
