"""Rules ``max_step`` and ``again``: how many replicas one decision may change, and how soon the next decision follows.

A step per decision limits the damage of a wrong decision, not the speed of scaling: starting replicas count as
supply, so the next decision requests more only if they are not enough.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_planner.decide.decision import Action, RoleProposal, Step
from penstock_planner.decide.rule import Facts, Proposals


def limit_step(proposal: RoleProposal, facts: Facts) -> RoleProposal:
    """Return the proposal with its change reduced to ``maxStep`` replicas, the configured maximum per decision.

    Returns the proposal unchanged if there is no maximum.

    Args:
        proposal: Proposed change of one role.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    config = facts.config
    if config.max_step is None or proposal.action is Action.HOLD or proposal.amount <= config.max_step:
        return proposal
    outcome = f"limited to {config.max_step}"
    step = Step("max_step", {"replicas_wanted": proposal.amount}, config.max_step, outcome)
    return replace(proposal.passed(step), amount=config.max_step)


def decide_soon(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals with a shorter time until the next decision if a role grows.

    In a mode that counts starting replicas as supply, the time is 1 simulated second, or the time between two metrics
    scrapes if that is longer. In other modes it is not shortened. Does nothing in no-operation mode.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    config = facts.config
    is_growing = any(each.action is Action.UP for each in proposals.roles)
    if config.no_operation or not is_growing or config.after_growth_s >= config.interval_s:
        return proposals
    step = Step("again", {"in_s": config.after_growth_s}, None, "decides again: more may be needed")
    roles = (each.passed(step) if each.action is Action.UP else each for each in proposals.roles)
    return replace(proposals, roles=tuple(roles), next_decision_s=config.after_growth_s)
