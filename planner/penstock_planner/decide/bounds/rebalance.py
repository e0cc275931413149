"""Rule ``rebalance``: GPUs that one role gives up are reserved for the role under load.

One decision shrinks the idle role and records in the state that its GPUs are reserved. A later decision, made after
the drain, lets the loaded role grow before any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.rule import Facts, Proposals

_NOT_FREED = frozenset({Reason.GPU_BUDGET, Reason.GPU_BUDGET_YIELDED, Reason.AT_MAX_REPLICAS})


def end_rebalance(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals, with a sentence added to each role that has GPUs reserved and does not want to grow any more.

    GPUs that another role gives up are reserved for a role that lacks GPUs. The sentence says that the reservation is
    abandoned; `update_reservations` drops the reservation itself.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    reserved_before = facts.reserved_roles
    return proposals.with_roles(
        _released(each, "it no longer asks for more")
        if each.role in reserved_before and each.action is not Action.UP
        else each
        for each in proposals.roles
    )


def update_reservations(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals with the set of roles for which GPUs are reserved from this decision on.

    The explanation of each role whose reservation starts, continues or ends, or cannot start, says so.

    A reservation keeps GPUs that another role gives up for a role that lacks GPUs. It starts if only the budget holds a
    role back, another role shrinks in the same decision, and enough GPUs for one replica can become free at all. It
    continues while a worker drains or a role shrinks, so that GPUs become free. It ends when the role grows, and also
    when nothing that could free GPUs is in progress.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    givers = [each.role for each in proposals.roles if each.action is Action.DOWN]
    freeable, reserved_before = freeable_gpus(proposals, facts), facts.reserved_roles
    is_draining = any(pool.draining for pool in facts.pools.values())
    decisions: list[RoleProposal] = []
    reserved: set[Role] = set()
    for proposal in proposals.roles:
        role, decided = proposal.role, proposal
        if proposal.reason is Reason.GPU_BUDGET and givers and freeable < proposal.engine_gpus:
            why = f"only {freeable} of the {proposal.engine_gpus} GPUs that it needs can be freed"
            decided = _rebalanced(proposal, f"not begun: {why}")
        elif proposal.reason is Reason.GPU_BUDGET and (givers or (role in reserved_before and is_draining)):
            why = _waits(givers)
            decided = _rebalanced(proposal, f"waits: {why}", why)
            reserved.add(role)
        elif role in reserved_before and proposal.action is Action.UP:
            decided = _rebalanced(proposal, "freed: it grows")
        elif role in reserved_before and proposal.reason in _NOT_FREED:
            decided = _released(proposal, "no GPUs were freed for it")
        decisions.append(decided)
    return replace(proposals, roles=tuple(decisions), reserved=frozenset(reserved))


def freeable_gpus(proposals: Proposals, facts: Facts) -> int:
    """Return the number of GPUs that are free, that draining replicas hold, or that shrinking roles hold above their minimum.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    free = max(0, (facts.config.max_gpu_budget or 0) - facts.gpus)
    draining = sum(each.pool.draining * each.engine_gpus for each in proposals.roles)
    given = sum(
        (each.pool.replicas - facts.config.floor(each.role, each.engine_gpus)) * each.engine_gpus
        for each in proposals.roles
        if each.action is Action.DOWN
    )
    return free + draining + given


def _waits(givers: Sequence[Role]) -> str:
    if givers:
        return f"{givers[0].value} releases one replica for it"
    return "the replica released for it is still draining"


def _released(proposal: RoleProposal, why: str) -> RoleProposal:
    return _rebalanced(proposal, f"abandoned: {why}", f"rebalance abandoned: {why}")


def _rebalanced(proposal: RoleProposal, outcome: str, words: str = "") -> RoleProposal:
    detail = f"{proposal.detail}; {words}" if words else proposal.detail
    step = Step("rebalance", {"gpus_needed": proposal.engine_gpus}, None, outcome)
    return replace(proposal.passed(step), detail=detail)
