"""Rules ``scheduled_most`` and ``schedule``: shrink a role above its scheduled maximum, and record the active schedule entries."""

from __future__ import annotations

from dataclasses import replace

from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.rule import Facts
from penstock_planner.decide.schedule import lowered_ceilings, raised_floors


def keep_ceiling(proposal: RoleProposal, facts: Facts) -> RoleProposal:
    """Return the proposal, or a scale-down to the scheduled maximum if the role exceeds it, regardless of its load.

    The graph's schedule sets minimum and maximum replicas for times of the week; entries are active at their times.

    Args:
        proposal: Proposed change of one role.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    most = lowered_ceilings({}, facts.schedule).get(proposal.role)
    above = 0 if most is None else proposal.pool.replicas - most
    if above < 1:
        return proposal
    step = Step("scheduled_most", {"replicas": proposal.pool.replicas}, most, Reason.ABOVE_SCHEDULE.value)
    detail = f"{proposal.pool.replicas} exceeds the scheduled maximum of {most}"
    return proposal.changed(Action.DOWN, Reason.ABOVE_SCHEDULE, detail, step, amount=above)


_BY_SCHEDULE = frozenset({Reason.BELOW_FLOOR, Reason.AT_FLOOR, Reason.AT_MAX_REPLICAS, Reason.ABOVE_SCHEDULE})


def note(proposal: RoleProposal, facts: Facts) -> RoleProposal:
    """Return the proposal with the active schedule entries recorded, if one sets a minimum or maximum of the role.

    The record becomes the first of the role's steps. If such a bound decided, the explanation names the entries.

    Args:
        proposal: Proposed change of one role.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    bounds = [each for each in facts.schedule if proposal.role in {*each.floors, *each.ceilings}]
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
