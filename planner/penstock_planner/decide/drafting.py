"""From a desired number of replicas to a proposal, and the readings that several autoscalers share."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import (
    Action,
    Memory,
    PlannerState,
    Proposal,
    Reason,
    RoleProposal,
    Step,
)
from penstock_planner.decide.observation import Pull


def drafted(role: Role, pull: Pull, desired: int | None, step: Step, config: DecideConfig) -> RoleProposal:
    """Return the proposal that brings a role to ``desired`` replicas, its floor at least.

    None: the autoscaler has no answer, nothing changes. ``step`` is its rule with the numbers; the outcome becomes
    the sentence.
    """
    pool = pull.pools[role]
    gpus = config.engine_gpus(role, pool.gpus)
    floor = config.floor(role, gpus)
    current = pool.replicas
    if desired is None:
        reason, action = Reason.METRIC_UNKNOWN, Action.HOLD
        if current < floor:
            reason, action, desired = Reason.BELOW_FLOOR, Action.UP, floor
    else:
        desired = max(desired, floor)
        action = Action.UP if desired > current else Action.DOWN if desired < current else Action.HOLD
        reason = _REASONS[action] if current >= floor else Reason.BELOW_FLOOR
    amount = max(1, abs((current if desired is None else desired) - current))
    return RoleProposal(role, pool, gpus, action, reason, step.outcome, (step,), amount, rule=step.name)


_REASONS = {
    Action.UP: Reason.ABOVE_THRESHOLD,
    Action.DOWN: Reason.BELOW_THRESHOLD,
    Action.HOLD: Reason.WITHIN_THRESHOLDS,
}


def proposed(proposals: list[RoleProposal], state: PlannerState, memory: Memory) -> Proposal:
    """Return the proposal of a policy that keeps nothing by role but what the rebalance needs."""
    return Proposal(proposals, {proposal.role: state.of(proposal.role) for proposal in proposals}, memory)


def of_role(memory: Memory, role: Role) -> Mapping[str, object]:
    """Return what a policy remembers of a role; empty at first and after a restart."""
    kept = memory.get(role.value)
    return kept if isinstance(kept, Mapping) else {}


def waiting_requests(pull: Pull, role: Role) -> float | None:
    """Return the requests that wait for a role, in routers and in its workers; None when unknown."""
    if role is Role.PREFILL:
        queue = pull.queue
        return queue.value if queue is not None and queue.is_known else None
    inside = pull.worker_waiting
    if inside is None or inside.unknown:
        return None
    at_frontend = pull.demand.waiting if role is Role.AGGREGATED and pull.demand is not None else 0.0
    return inside.total + at_frontend


def numbers(value: object) -> list[float]:
    """Return a memory's list of numbers; an absent one is empty."""
    return [float(each) for each in value] if isinstance(value, list | tuple) else []
