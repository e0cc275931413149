"""Moves GPUs from an idle role to a pressed one when the budget is full: shrink, drain, then grow.

One decision shrinks the idle role and remembers that the pressed one is owed the GPUs; a later decision,
made once they are free, lets it grow before anybody else. Until then draining workers count against the
budget, so the sum never exceeds it. The memory is part of the state, and so survives a kill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.observation import PoolCounts
from penstock.planner.decide.proposal import RoleProposal

STEP = "rebalance"

_NOT_FREED = frozenset({Reason.GPU_BUDGET, Reason.GPU_BUDGET_YIELDED, Reason.AT_MAX_REPLICAS})


def release(proposals: Sequence[RoleProposal], owed: frozenset[Role]) -> list[RoleProposal]:
    """Return the proposals; one that is owed GPUs and asks for them no longer says that it releases its reservation."""
    return [
        _released(proposal, "it asks for no more")
        if proposal.role in owed and proposal.action is not Action.UP
        else proposal
        for proposal in proposals
    ]


def reserve(
    proposals: Sequence[RoleProposal],
    owed: frozenset[Role],
    pools: Mapping[Role, PoolCounts],
    *,
    freeable: int,
) -> tuple[list[RoleProposal], frozenset[Role]]:
    """Return the bounded proposals with what becomes of every reservation, and the roles that are owed GPUs now.

    A reservation begins when the budget alone holds a role back and another one shrinks in the same decision, if
    enough for one engine can come free at all. It is kept while a worker still drains or shrinks for it, ends when the role grows, and is released when
    nothing that could free GPUs is under way.

    Args:
        proposals: After the bounds.
        owed: Roles with a reservation from earlier decisions.
        pools: Counts at the interval's newest pull.
        freeable: GPUs that are free, drain, or stand above the floors of roles that shrink.
    """
    givers = [proposal.role for proposal in proposals if proposal.action is Action.DOWN]
    is_draining = any(pool.draining for pool in pools.values())
    decisions: list[RoleProposal] = []
    reserved: set[Role] = set()
    for proposal in proposals:
        decided = proposal
        if proposal.reason is Reason.GPU_BUDGET and givers and freeable < proposal.engine_gpus:
            decided = _not_begun(proposal, freeable)
        elif proposal.reason is Reason.GPU_BUDGET and givers:
            decided = _waiting(proposal, f"{givers[0].value} gives up one for it")
            reserved.add(proposal.role)
        elif proposal.role in owed and proposal.reason is Reason.GPU_BUDGET and is_draining:
            decided = _waiting(proposal, "what was given up for it still drains")
            reserved.add(proposal.role)
        elif proposal.role in owed and proposal.action is Action.UP:
            decided = proposal.passed(
                Step(STEP, {"gpus_needed": proposal.engine_gpus}, None, "freed: it grows")
            )
        elif proposal.role in owed and proposal.reason in _NOT_FREED:
            decided = _released(proposal, "no GPUs came free for it")
        decisions.append(decided)
    return decisions, frozenset(reserved)


def _waiting(proposal: RoleProposal, why: str) -> RoleProposal:
    step = Step(STEP, {"gpus_needed": proposal.engine_gpus}, None, f"waits: {why}")
    return replace(proposal, detail=f"{proposal.detail}; {why}", steps=(*proposal.steps, step))


def _not_begun(proposal: RoleProposal, freeable: int) -> RoleProposal:
    why = f"no more than {freeable} of {proposal.engine_gpus} GPUs can come free for it"
    return proposal.passed(Step(STEP, {"gpus_needed": proposal.engine_gpus}, None, f"not begun: {why}"))


def _released(proposal: RoleProposal, why: str) -> RoleProposal:
    step = Step(STEP, {"gpus_needed": proposal.engine_gpus}, None, f"abandoned: {why}")
    return replace(
        proposal, detail=f"{proposal.detail}; rebalance abandoned: {why}", steps=(*proposal.steps, step)
    )
