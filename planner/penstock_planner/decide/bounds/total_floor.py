"""Rule ``total_floor``: all roles together keep a minimum number of GPUs.

The minimum (``min_total_gpus``) is compared with the GPUs of ready and starting replicas, without draining ones and
without those that one role gives up for another. If the minimum and the budget conflict, the budget wins.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.api import Role
from penstock_planner.decide.bounds.backoff import back_off
from penstock_planner.decide.bounds.gpu_budget import may_grow
from penstock_planner.decide.bounds.owner import is_ceded
from penstock_planner.decide.bounds.rebalance import freeable_gpus
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step, count_of
from penstock_planner.decide.rule import Facts, Proposals
from penstock_planner.decide.state import RoleState

TOTAL_FLOOR = "total_floor"
"""Name of the steps that these rules record."""


def raise_to_total_floor(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals, with one role growing by one replica if all roles together have fewer GPUs than the minimum.

    The growing role is the one with the fewest replicas that has room below its maximum and in the GPU budget, decode
    if both have equally many. GPUs of replicas that the proposals already add count towards the minimum. A role that
    must wait after a failed scale-up, or whose replicas another client sets, is not grown.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    config, gpus, seen = facts.config, facts.gpus, facts.roles
    staying = proposals.staying_gpus()
    added = sum(
        each.engine_gpus * each.amount
        for each in proposals.roles
        if each.action is Action.UP and may_grow(each, gpus, config)
    )
    if staying + added >= config.total_floor:
        return proposals
    grown = {each.role: _grown(each, staying, seen[each.role], config) for each in proposals.roles}
    able = [
        each
        for each in proposals.roles
        if each.action is not Action.UP
        and grown[each.role].action is Action.UP
        and may_grow(each, gpus + added, config)
        and not is_ceded(each.role, seen[each.role], config)
    ]
    chosen = min(able, key=lambda each: (each.pool.replicas, each.role is Role.PREFILL), default=None)
    step = Step(TOTAL_FLOOR, {"gpus_staying": staying}, config.total_floor, "no role has room to grow")
    if chosen is None:
        return proposals.with_roles(each.passed(step) for each in proposals.roles)
    return proposals.with_roles(grown[each.role] if each is chosen else each for each in proposals.roles)


def _grown(proposal: RoleProposal, staying: int, state: RoleState, config: DecideConfig) -> RoleProposal:
    floor = config.total_floor
    step = Step(TOTAL_FLOOR, {"gpus_staying": staying}, floor, Reason.BELOW_TOTAL_FLOOR.value)
    detail = f"{count_of(staying, 'GPU')} in all {'is' if staying == 1 else 'are'} below the total floor of {floor}"
    return back_off(proposal.changed(Action.UP, Reason.BELOW_TOTAL_FLOOR, detail, step), state)


def hold_above_total_floor(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals without scale-downs that would leave all roles together fewer GPUs than the minimum.

    Such scale-downs are held back or reduced. The minimum is ``min_total_gpus`` of the configuration.

    A scale-up that the budget holds back counts as if its GPUs existed, provided that enough GPUs can become free for
    it. So the minimum does not prevent the scale-down of one role that makes room for the other role.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    freeable = freeable_gpus(proposals, facts)
    held_back = (each for each in proposals.roles if each.reason is Reason.GPU_BUDGET)
    claimed = sum(each.engine_gpus for each in held_back if each.engine_gpus <= freeable)
    left = proposals.staying_gpus() + proposals.added_gpus() + claimed
    decided = []
    for proposal in proposals.roles:
        kept = _kept(proposal, left, facts.config) if proposal.action is Action.DOWN else proposal
        if kept.action is Action.DOWN:
            left -= kept.engine_gpus * kept.amount
        decided.append(kept)
    return proposals.with_roles(decided)


def _kept(proposal: RoleProposal, left: int, config: DecideConfig) -> RoleProposal:
    floor, size = config.total_floor, proposal.engine_gpus
    spare = (left - floor) // size if size else proposal.amount
    if spare >= proposal.amount:
        return proposal
    inputs = {"gpus_after": left - size * proposal.amount}
    if spare >= 1:
        return replace(proposal.passed(Step(TOTAL_FLOOR, inputs, floor, f"limited to {spare}")), amount=spare)
    detail = f"{left} - {size} GPUs in all are below the total floor of {floor}"
    return proposal.held(Reason.AT_TOTAL_FLOOR, detail, Step(TOTAL_FLOOR, inputs, floor, "hold"))
