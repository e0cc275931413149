"""Scale to zero: all roles go to zero replicas together after a time without requests, and return with the first request.

While no worker is ready, the routers queue the requests that arrive and report them in `Demand`. A pull without a
known demand ends the time without requests; at zero replicas it leaves the graph at zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step
from penstock_planner.decide.demand.observation import Pull, Window
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory


def quiet_since(before_s: float | None, pull: Pull) -> float | None:
    """Return the simulated time, in seconds, since which neither the frontend nor a worker has had a request.

    Returns None if there is a request now, or if a metric that would show it is unknown.

    Args:
        before_s: Result for the previous pull (metrics scrape); None if there was none.
        pull: The next pull (metrics scrape).
    """
    demand, inside = pull.demand, pull.worker_waiting
    if demand is None or demand.arrivals or demand.waiting or any(demand.in_flight.values()):
        return None
    if pull.kv.unknown or (inside is not None and (inside.unknown or inside.total)):
        return None
    return pull.at_s if before_s is None else before_s


def to_zero_or_back(
    proposals: Sequence[RoleProposal], window: Window, memory: AdaptiveMemory, config: DecideConfig
) -> list[RoleProposal]:
    """Return the proposals, changed so that all roles scale to zero replicas, or from zero to one replica, if it is time.

    After ``scale_to_zero_after_s`` simulated seconds without requests, the roles shrink by one replica per decision
    until all are at zero. After a request arrived, each role gets one replica.

    Args:
        proposals: One proposal per role.
        window: Pulls (metrics scrapes) of the interval, at least one.
        memory: Learned state that already includes all pulls of the interval.
        config: If its ``scale_to_zero_after_s`` is None, the proposals are returned unchanged.
    """
    if config.scale_to_zero_after_s is None:
        return list(proposals)
    if not any(each.pool.replicas for each in proposals):
        return _asleep(proposals, window)
    return _awake(proposals, window, memory, config.scale_to_zero_after_s)


def _asleep(proposals: Sequence[RoleProposal], window: Window) -> list[RoleProposal]:
    known = [pull.demand for pull in window.pulls if pull.demand is not None]
    arrived = sum(demand.arrivals for demand in known)
    waiting = known[-1].waiting if known else None
    inputs = {"arrivals": arrived, "waiting": waiting}
    action, reason, detail, outcome = Action.HOLD, Reason.IDLE, "no requests at the front end", "hold"
    if arrived or waiting:
        detail = f"{arrived:.0f} requests arrived and {waiting:.0f} are waiting, with no replica ready"
        action, reason, outcome = Action.UP, Reason.WAKE, "wake"
    elif window.pulls[-1].demand is None:
        reason, detail, outcome = Reason.METRIC_UNKNOWN, "demand unknown", "hold: no router reports demand"
    step = Step("zero", inputs, 0, outcome)
    return [each.changed(action, reason, detail, step) for each in proposals]


def _awake(
    proposals: Sequence[RoleProposal], window: Window, memory: AdaptiveMemory, after_s: float
) -> list[RoleProposal]:
    quiet_s = 0.0 if memory.quiet_since_s is None else window.end_s - memory.quiet_since_s
    held_s = max(0.0, *(memory.hold_down_s(each.role, window.end_s) for each in proposals))
    # If one role is at zero, the other one follows, because one role alone cannot serve requests.
    is_begun = any(not each.pool.replicas for each in proposals)
    is_due = memory.quiet_since_s is not None and quiet_s >= after_s and (is_begun or held_s <= 0)
    # A worker's throughput may never have been measured, and then no other rule proposes to remove a worker.
    above_one = [each for each in proposals if each.pool.replicas > 1]
    leaving = above_one or [each for each in proposals if each.pool.replicas]
    inputs = {"quiet_s": quiet_s, "hold_down_s": held_s}
    outcome = "stay" if not is_due else "shrink" if above_one else "go to zero"
    step = Step("zero", inputs, after_s, outcome)
    if not is_due:
        return [each.passed(step) for each in proposals]
    detail = f"no requests for {quiet_s:.0f} s"
    return [
        each.changed(Action.DOWN if each in leaving else Action.HOLD, Reason.IDLE, detail, step)
        for each in proposals
    ]
