"""Helpers that several policies share: make a proposal from a desired replica count, and read their inputs from a pull."""

from __future__ import annotations

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Proposal, Reason, RoleProposal, Step
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.decide.state import PlannerState, PolicyState


def drafted(role: Role, pull: Pull, desired: int | None, step: Step, config: DecideConfig) -> RoleProposal:
    """Return the proposal that brings a role to ``desired`` replicas, but not below its minimum.

    Args:
        role: Role to scale.
        pull: Newest pull (metrics scrape); it has the replica counts.
        desired: Desired replicas. None if the policy has no answer: the role then keeps its replicas, or grows to its
            minimum.
        step: Record of the policy's rule with its numbers. Its outcome becomes the explanation of the proposal.
        config: Configuration with the bounds.
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


def proposed(proposals: list[RoleProposal], state: PlannerState, *learned: PolicyState) -> Proposal:
    """Return the result of a policy from its proposals and what it has learned; the states of the roles stay as they are.

    Args:
        proposals: One proposal per role.
        state: State left by the last decision.
        learned: Instances of the policy's state dataclasses after this interval, in any number; leave them out if the
            policy keeps nothing between decisions.
    """
    return Proposal(proposals, {proposal.role: state.of(proposal.role) for proposal in proposals}, learned)


def waiting_requests(pull: Pull, role: Role) -> float | None:
    """Return the number of requests that wait for a role, in the routers and in its workers. None if it is unknown.

    For prefill only the routers' queue counts; for decode only requests inside the workers; for aggregated both.

    Args:
        pull: Metrics scrape with the queue and the workers' values.
        role: Role for which the requests wait.
    """
    if role is Role.PREFILL:
        queue = pull.queue
        return queue.value if queue is not None and queue.is_known else None
    inside = pull.worker_waiting
    if inside is None or inside.unknown:
        return None
    at_frontend = pull.demand.waiting if role is Role.AGGREGATED and pull.demand is not None else 0.0
    return inside.total + at_frontend
