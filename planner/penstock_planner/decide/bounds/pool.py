"""Rule ``pool``: a graph in a GPU pool requests ("bids for") the replicas that it wants, and uses only the GPUs it is granted.

The bid contains the replicas that the planner would have without the grant, in order of need: prefill and decode
alternate in the ratio in which the planner wants them. The grant covers the first replicas of this order, so that a
graph with too few GPUs keeps the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from penstock.api import Role
from penstock.gpu_pool.bid import RoleBid, by_need, replicas_within
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Decision, Reason, RoleProposal, Step, count_of
from penstock_planner.decide.rule import Facts, Proposals

POOL: Final = "pool"
"""Name of the step that records a role's bid, the replicas that it requests from the GPU pool."""


def bid(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals with the bid of each role added: the number of replicas that the role requests from the GPU pool.

    Returns the proposals unchanged if the graph is in no GPU pool. This rule is applied before the rules that reduce
    the proposals, so that the request does not depend on the available GPUs.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    if facts.config.grant is None:
        return proposals
    return replace(proposals, bids=bids_of(proposals.roles, facts.config))


def bids_of(proposals: Sequence[RoleProposal], config: DecideConfig) -> dict[Role, RoleBid]:
    """Return the bid of each role for GPUs of the GPU pool, by role: the number of replicas that the role requests.

    The number does not depend on whether GPUs are available.

    A bid also contains the role's minimum and the GPUs of one replica. The number of replicas is within the role's
    minimum and maximum. If the pool grants the graph fewer GPUs than it requested, a role requests replicas only for
    its arriving requests and not for its queue. A queue grows as long as any role lacks workers, and most of its
    requests are late already. A bid that grew with the queue would take GPUs from the graph's other role and from other
    graphs.

    Args:
        proposals: Proposed changes of all roles, before rules about the available GPUs reduce them.
        config: Configuration with the bounds of the replicas and the GPUs that the pool grants.
    """
    found = {}
    for each in proposals:
        floor = 0 if each.reason is Reason.IDLE else config.floor(each.role, each.engine_gpus)
        replicas = max(floor, each.pool.replicas + each.change)
        if config.grant_note and each.workers_for_arrivals is not None:
            replicas = min(replicas, max(floor, each.pool.replicas, math.ceil(each.workers_for_arrivals)))
        most = config.max_replicas.get(each.role)
        replicas = replicas if most is None else min(replicas, most)
        found[each.role] = RoleBid(replicas, floor, each.engine_gpus, is_prefill=each.role is Role.PREFILL)
    return found


def keep_grant(proposals: Proposals, facts: Facts) -> Proposals:
    """Return the proposals limited to the GPUs that the graph's GPU pool lets it hold now (the pool's grant).

    Scale-ups beyond the grant are held or reduced. Replicas beyond the grant are removed. Returns the proposals
    unchanged if the graph is in no GPU pool.

    Args:
        proposals: Proposed changes of all roles.
        facts: Input of all rules: replica counts, the state of each role and the configuration.
    """
    config, bids = facts.config, proposals.bids
    if config.grant is None:
        return proposals
    fits = replicas_within(bids, config.grant)
    # Without a note the pool has not refused the bid; the grant has probably just not arrived yet.
    stay = _staying(proposals.roles, bids, fits, config.grant, is_short=bool(config.grant_note))
    return proposals.with_roles(
        _fitted(each, bids[each.role], fits[each.role], stay[each.role], config) for each in proposals.roles
    )


def _staying(
    proposals: Sequence[RoleProposal],
    bids: Mapping[Role, RoleBid],
    fits: Mapping[Role, int],
    grant: int,
    *,
    is_short: bool,
) -> dict[Role, int]:
    """Return the number of replicas of each role that may stay.

    Replicas that are still starting go first, then replicas of the role that exceeds its part of the grant most. A
    role above its part keeps the excess while all replicas fit the grant, because the desired replicas change from
    second to second. If another role lacks a replica for which the grant has no room, one replica goes, provided that
    afterwards the giving role still has no smaller fraction of its bid than the receiving role. If the graph is short
    of GPUs, prefill also gives to decode if that raises the smaller of both fractions: a full decode pool destroys
    work, while the bid of prefill includes a queue that grows with any bottleneck.
    """
    stay = {each.role: each.pool.replicas - _given(each, bids[each.role].floor) for each in proposals}
    above = sum(bids[role].gpus * replicas for role, replicas in stay.items()) - grant
    starting = {each.role: each.pool.starting for each in proposals}
    while above > 0:
        held = [role for role in stay if bids[role].gpus]
        unready = [role for role in held if starting[role] > 0 and stay[role] > bids[role].floor]
        role = max(unready or held, key=lambda role: stay[role] - fits[role])
        stay[role] -= 1
        starting[role] -= 1
        above -= bids[role].gpus
    giver = _giver(stay, bids, fits, -above, is_short=is_short)
    if giver is not None:
        stay[giver] -= 1
    return stay


def _given(proposal: RoleProposal, floor: int) -> int:
    """Return the number of replicas that a role gives up by itself. Its minimum is excluded, because a later rule keeps that."""
    return max(0, min(-proposal.change, proposal.pool.replicas - floor))


def _giver(
    stay: Mapping[Role, int],
    bids: Mapping[Role, RoleBid],
    fits: Mapping[Role, int],
    free: int,
    *,
    is_short: bool,
) -> Role | None:
    """Return the role that gives a replica to another role for which ``free`` GPUs are too few, or None if no role does."""
    over = [role for role, bid in bids.items() if stay[role] > max(fits[role], bid.floor) and bid.gpus]
    for taker, bid in bids.items():
        if stay[taker] >= fits[taker] or bid.gpus <= free:
            continue
        before, after = stay[taker] / bid.replicas, (stay[taker] + 1) / bid.replicas
        for giver in over:
            left = (stay[giver] - 1) / bids[giver].replicas
            if left >= after or (is_short and bids[giver].is_prefill and min(after, left) > before):
                return giver
    return None


def bids_in(decision: Decision) -> dict[Role, RoleBid]:
    """Return the replicas that a decision requests from the GPU pool (its bids), by role.

    Empty if the decision records no bids; then the bids of the previous decision remain valid.
    """
    return {
        role.role: _bid(role.role, step)
        for role in decision.roles
        for step in role.steps
        if step.name == POOL
    }


def bid_sizes(decision: Decision) -> tuple[int, ...] | None:
    """Return the GPUs of each replica that a decision requests from the GPU pool; None if the decision records no request.

    The replicas that are needed most come first.
    """
    bids = bids_in(decision)
    return tuple(bids[role].gpus for role in by_need(bids)) if bids else None


def _bid(role: Role, step: Step) -> RoleBid:
    replicas, floor, gpus = (int(step.inputs[key] or 0) for key in _KEYS)
    return RoleBid(replicas, floor, gpus, is_prefill=role is Role.PREFILL)


_KEYS: Final = ("replicas_wanted", "floor", "gpus_per_engine")


def _fitted(proposal: RoleProposal, bid: RoleBid, fit: int, stay: int, config: DecideConfig) -> RoleProposal:
    grant = config.grant or 0
    note = f" ({config.grant_note})" if config.grant_note else ""
    inputs = dict(zip(_KEYS, (bid.replicas, bid.floor, bid.gpus), strict=True))
    replicas = proposal.pool.replicas
    desired = replicas + proposal.change
    detail = (
        f"wants {count_of(bid.replicas, 'replica')}; the pool grants {count_of(grant, 'GPU')}, enough for "
        f"{fit}{note}"
    )
    if stay < min(replicas, desired):
        step = Step(POOL, inputs, grant, "give back")
        return proposal.changed(Action.DOWN, Reason.ABOVE_BUDGET, detail, step, amount=replicas - stay)
    if proposal.action is not Action.UP or desired <= fit:
        return proposal.passed(Step(POOL, inputs, grant, "pass"))
    if replicas < fit:
        step = Step(POOL, inputs, grant, f"limited to {fit - replicas}")
        return replace(proposal.passed(step), amount=fit - replicas)
    return proposal.held(Reason.GPU_BUDGET, detail, Step(POOL, inputs, grant, "hold"))
