"""Moves GPUs from an idle role to a pressed one when the budget is full: shrink, drain, then grow.

One decision shrinks the idle role and remembers that the pressed one is owed the GPUs; a later decision,
made once they are free, lets it grow before anybody else. Until then draining workers count against the
budget, so the sum never exceeds it. The memory is part of the state, and so survives a kill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock_graph.models import Role
from penstock_planner.decide.decision import Action, Reason, Step
from penstock_planner.decide.observation import PoolCounts
from penstock_planner.decide.propose import Draft

STEP = "rebalance"

_NOT_FREED = frozenset({Reason.GPU_BUDGET, Reason.GPU_BUDGET_YIELDED, Reason.AT_MAX_REPLICAS})


def abandon(drafts: Sequence[Draft], owed: frozenset[Role]) -> list[Draft]:
    """Return the drafts; one that is owed GPUs and asks for them no longer says that it gives up the claim."""
    return [
        _abandoned(draft, "it asks for no more")
        if draft.role in owed and draft.action is not Action.UP
        else draft
        for draft in drafts
    ]


def claim(
    drafts: Sequence[Draft], owed: frozenset[Role], pools: Mapping[Role, PoolCounts]
) -> tuple[list[Draft], frozenset[Role]]:
    """Return the bounded drafts with what becomes of every claim, and the roles that are owed GPUs now.

    A claim begins when the budget alone holds a role back and another one shrinks in the same decision. It
    is kept while a worker still drains or shrinks for it, ends when the role grows, and is given up when
    nothing that could free GPUs is under way.

    Args:
        drafts: After the bounds.
        owed: Roles with a claim from earlier decisions.
        pools: Counts at the interval's newest pull.
    """
    givers = [draft.role for draft in drafts if draft.action is Action.DOWN]
    is_draining = any(pool.draining for pool in pools.values())
    settled: list[Draft] = []
    claims: set[Role] = set()
    for draft in drafts:
        decided = draft
        if draft.reason is Reason.GPU_BUDGET and givers:
            decided = _waiting(draft, f"{givers[0].value} gives up one for it")
            claims.add(draft.role)
        elif draft.role in owed and draft.reason is Reason.GPU_BUDGET and is_draining:
            decided = _waiting(draft, "what was given up for it still drains")
            claims.add(draft.role)
        elif draft.role in owed and draft.action is Action.UP:
            decided = draft.passed(Step(STEP, {"gpus_needed": draft.engine_gpus}, None, "freed: it grows"))
        elif draft.role in owed and draft.reason in _NOT_FREED:
            decided = _abandoned(draft, "no GPUs came free for it")
        settled.append(decided)
    return settled, frozenset(claims)


def _waiting(draft: Draft, why: str) -> Draft:
    step = Step(STEP, {"gpus_needed": draft.engine_gpus}, None, f"waits: {why}")
    return replace(draft, detail=f"{draft.detail}; {why}", steps=(*draft.steps, step))


def _abandoned(draft: Draft, why: str) -> Draft:
    step = Step(STEP, {"gpus_needed": draft.engine_gpus}, None, f"abandoned: {why}")
    return replace(draft, detail=f"{draft.detail}; rebalance abandoned: {why}", steps=(*draft.steps, step))
