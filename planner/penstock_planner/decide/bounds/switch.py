"""Rule ``switch``: a worker changes from one role to the other without a restart, if one role lacks what the other can spare.

Both changes are one decision and one request to the backend. The backend drains the worker, switches it, checks that
it switched, and counts it in its new role. The worker holds the same GPUs throughout, so the GPU budget does not
matter.
"""

from __future__ import annotations

from dataclasses import replace

from penstock_planner.decide.bounds.owner import is_ceded
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.rule import Facts, Proposals
from penstock_planner.decide.state import RoleState

_STAYS_DOWN = frozenset({Reason.ABOVE_BUDGET, Reason.ABOVE_SCHEDULE, Reason.IDLE})
"""Reasons for shrinking to fewer GPUs. Workers of such a role are stopped rather than switched."""


def switch(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals in which workers change role without a restart, in place of starts and stops, if that is possible.

    The receiving role must want to grow and have room below its maximum. The giving role must shrink, or have a worker
    more than it needs (then `RoleProposal.spare_reason` is not empty); the giving role keeps at least one ready worker
    and its minimum. Returns the proposals unchanged if switching is disabled, if the graph does not have two roles, or
    while the graph gives GPUs back to its GPU pool.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    config, roles = facts.config, proposals.roles
    is_giving_back = config.grant is not None and facts.gpus > config.grant
    if not config.switches_roles or len(roles) != 2 or is_giving_back:
        return proposals
    for taker, giver in (roles, reversed(roles)):
        count = min(_headroom(taker, config), _spare(giver, facts.roles[giver.role], config))
        if count > 0:
            moved = (_grown(taker, giver, count), _shrunk(giver, taker, count))
            return replace(proposals, roles=moved, switched=count)
    return proposals


def _headroom(taker: RoleProposal, config: DecideConfig) -> int:
    if taker.action is not Action.UP:
        return 0
    ceiling = config.max_replicas.get(taker.role)
    return taker.amount if ceiling is None else min(taker.amount, ceiling - taker.pool.replicas)


def _spare(giver: RoleProposal, state: RoleState, config: DecideConfig) -> int:
    if giver.action is Action.UP or is_ceded(giver.role, state, config) or giver.reason in _STAYS_DOWN:
        return 0
    wanted = giver.amount if giver.action is Action.DOWN else int(bool(giver.spare_reason))
    floor = config.floor(giver.role, giver.engine_gpus)
    return min(wanted, giver.pool.ready - 1, giver.pool.replicas - floor)


def _grown(taker: RoleProposal, giver: RoleProposal, count: int) -> RoleProposal:
    detail = f"{taker.detail}; {count} of {giver.role.value} {'switches' if count == 1 else 'switch'}"
    return replace(taker.passed(_step(giver, count)), detail=detail, amount=count)


def _shrunk(giver: RoleProposal, taker: RoleProposal, count: int) -> RoleProposal:
    why = giver.detail if giver.action is Action.DOWN else giver.spare_reason
    detail = f"{count} to {taker.role.value}, which lacks workers: {why}"
    return giver.changed(Action.DOWN, Reason.ROLE_SWITCH, detail, _step(giver, count), amount=count)


def _step(giver: RoleProposal, count: int) -> Step:
    inputs = {"workers": count, "from": giver.role.value, "ready": giver.pool.ready}
    return Step("switch", inputs, None, f"{count} from {giver.role.value}")
