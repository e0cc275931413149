"""Rules ``floor`` and ``max_replicas``: the minimum and the maximum number of replicas of a role."""

from __future__ import annotations

from dataclasses import replace

from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.rule import Facts


def keep_floor(proposal: RoleProposal, facts: Facts) -> RoleProposal:
    """Return the proposal, held back or reduced if it is a scale-down below the role's minimum number of replicas.

    A proposal to scale all roles to zero for lack of requests is not changed.

    Args:
        proposal: Proposed change of one role.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    if proposal.action is not Action.DOWN:
        return proposal
    floor = 0 if proposal.reason is Reason.IDLE else facts.config.floor(proposal.role, proposal.engine_gpus)
    spare = proposal.pool.replicas - floor
    inputs = {
        "replicas_after": proposal.pool.replicas - proposal.amount,
        "gpus_per_engine": proposal.engine_gpus,
    }
    if spare < 1:
        detail = f"{floor} {'is' if floor == proposal.pool.replicas else 'would be'} the floor"
        return proposal.held(Reason.AT_FLOOR, detail, Step("floor", inputs, floor, "hold"))
    return at_most(proposal, spare, Step("floor", inputs, floor, "pass"))


def keep_ceiling(proposal: RoleProposal, facts: Facts) -> RoleProposal:
    """Return the proposal, held back or reduced if it is a scale-up above the role's maximum (``maxReplicas`` of its service).

    Args:
        proposal: Proposed change of one role.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    if proposal.action is not Action.UP:
        return proposal
    ceiling, after = facts.config.max_replicas.get(proposal.role), proposal.pool.replicas + proposal.amount
    if ceiling is None or after <= ceiling:
        return proposal
    headroom = ceiling - proposal.pool.replicas
    step = Step("max_replicas", {"replicas_after": after}, ceiling, "hold" if headroom < 1 else "pass")
    if headroom < 1:
        return proposal.held(Reason.AT_MAX_REPLICAS, f"{ceiling} is the maximum number of replicas", step)
    return at_most(proposal, headroom, step)


def at_most(proposal: RoleProposal, most: int, step: Step) -> RoleProposal:
    """Return the proposal with the number of replicas that it adds or removes reduced to ``most``, and with ``step`` appended.

    Args:
        proposal: Proposal of one role.
        most: Maximum number of replicas to add or remove, >= 1.
        step: Record of the rule that reduces the number.
    """
    if proposal.amount <= most:
        return proposal.passed(step)
    return replace(proposal.passed(replace(step, outcome=f"limited to {most}")), amount=most)


def below_floor(blank: RoleProposal, floor: int, amount: int = 1) -> RoleProposal:
    """Return a proposal to grow a role that has fewer replicas than its minimum.

    Args:
        blank: Proposal of no change, with the role and its replica counts.
        floor: Minimum number of replicas.
        amount: Number of replicas to add, >= 1.
    """
    replicas = blank.pool.replicas
    step = Step("floor", {"replicas": replicas, "floor": floor}, floor, Reason.BELOW_FLOOR.value)
    detail = f"{replicas} below the floor of {floor}"
    return blank.changed(Action.UP, Reason.BELOW_FLOOR, detail, step, amount=amount)
