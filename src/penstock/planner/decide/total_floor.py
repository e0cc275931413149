"""The floor of GPUs over all roles: nothing shrinks below it, and below it a role grows.

It counts what stays: ready and starting replicas, without draining ones, and GPUs that one role gives up for another,
which come back as soon as they are free. Where floor and budget cannot both be kept, the budget is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.api import Role
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.decision import Action, Reason, Step
from penstock.planner.decide.ownership import is_left
from penstock.planner.decide.proposal import RoleProposal
from penstock.planner.decide.stabilise import back_off
from penstock.planner.decide.state import RoleState

STEP = "total_floor"


def staying_gpus(proposals: Sequence[RoleProposal]) -> int:
    """Return the GPUs of ready and starting replicas."""
    return sum(each.pool.replicas * each.engine_gpus for each in proposals)


def raised(
    proposals: Sequence[RoleProposal], gpus: int, config: DecideConfig, *, seen: Mapping[Role, RoleState]
) -> list[RoleProposal]:
    """Return the proposals; below the floor the role with fewest replicas that has room grows by one, decode on equal terms.

    What the proposals add counts first, and a role that something was just taken back from is left in peace.

    Args:
        proposals: One per role, before bounds and budget.
        gpus: GPUs that existing workers hold, draining ones included.
        config: Floors, ceilings and budget.
        seen: Each role's memory, for its back-off.
    """
    staying = staying_gpus(proposals)
    added = sum(
        each.engine_gpus * each.amount
        for each in proposals
        if each.action is Action.UP and _has_room(each, gpus, config)
    )
    if staying + added >= config.total_floor:
        return list(proposals)
    grown = {each.role: _grown(each, staying, seen[each.role], config) for each in proposals}
    able = [
        each
        for each in proposals
        if each.action is not Action.UP
        and grown[each.role].action is Action.UP
        and _has_room(each, gpus + added, config)
    ]
    able = [each for each in able if not is_left(each.role, seen[each.role], config)]
    chosen = min(able, key=lambda each: (each.pool.replicas, each.role is Role.PREFILL), default=None)
    step = Step(STEP, {"gpus_staying": staying}, config.total_floor, "no role has room to grow")
    if chosen is None:
        return [each.passed(step) for each in proposals]
    return [grown[each.role] if each is chosen else each for each in proposals]


def kept(proposals: Sequence[RoleProposal], config: DecideConfig) -> list[RoleProposal]:
    """Return the bounded proposals, scale-downs held or lessened where fewer GPUs than the floor would stay."""
    added = sum(each.engine_gpus * each.amount for each in proposals if each.action is Action.UP)
    claimed = sum(each.engine_gpus for each in proposals if each.reason is Reason.GPU_BUDGET)
    left = staying_gpus(proposals) + added + claimed
    decided = []
    for proposal in proposals:
        kept_one = _kept(proposal, left, config) if proposal.action is Action.DOWN else proposal
        if kept_one.action is Action.DOWN:
            left -= kept_one.engine_gpus * kept_one.amount
        decided.append(kept_one)
    return decided


def _grown(proposal: RoleProposal, staying: int, state: RoleState, config: DecideConfig) -> RoleProposal:
    floor = config.total_floor
    step = Step(STEP, {"gpus_staying": staying}, floor, Reason.BELOW_TOTAL_FLOOR.value)
    raised_one = replace(
        proposal.passed(step),
        action=Action.UP,
        reason=Reason.BELOW_TOTAL_FLOOR,
        detail=f"{staying} GPUs in all are below the total floor of {floor}",
        amount=1,
    )
    return back_off(raised_one, state)


def _has_room(proposal: RoleProposal, gpus: int, config: DecideConfig) -> bool:
    ceiling = config.max_replicas.get(proposal.role)
    if proposal.engine_gpus < 1 or (ceiling is not None and proposal.pool.replicas >= ceiling):
        return False
    return config.max_gpu_budget is None or gpus + proposal.engine_gpus <= config.max_gpu_budget


def _kept(proposal: RoleProposal, left: int, config: DecideConfig) -> RoleProposal:
    floor, size = config.total_floor, proposal.engine_gpus
    spare = (left - floor) // size if size else proposal.amount
    if spare >= proposal.amount:
        return proposal
    inputs = {"gpus_after": left - size * proposal.amount}
    if spare >= 1:
        return replace(proposal.passed(Step(STEP, inputs, floor, f"limited to {spare}")), amount=spare)
    detail = f"{left} - {size} GPUs in all are below the total floor of {floor}"
    return proposal.held(Reason.AT_TOTAL_FLOOR, detail, Step(STEP, inputs, floor, "hold"))
