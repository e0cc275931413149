"""The Kubernetes HorizontalPodAutoscaler, v2: ratio, tolerance, missing and unready pods, stabilisation, rates.

Source: the algorithm's description in the Kubernetes documentation ("Horizontal Pod Autoscaling") and
``pkg/controller/podautoscaler`` of Kubernetes 1.34: replica_calculator.go, horizontal.go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import PlannerState, Proposal, Step
from penstock_planner.decide.drafting import drafted, numbers, of_role, proposed, waiting_requests
from penstock_planner.decide.observation import Pull, Window, turned_away
from penstock_planner.decide.policy import PlannerPolicy

TOLERANCE = 0.1
"""``--horizontal-pod-autoscaler-tolerance``."""
KV_TARGET = 0.5
"""KV usage that it keeps; served more in time than 0.8 on the tuned cases, for 3-4% more GPU-hours."""

QUEUE_TARGET = 1.0
"""Waiting requests per replica that it keeps; served better there than 3 or 5."""

SYNC_S = 15.0
"""``--horizontal-pod-autoscaler-sync-period``."""
DOWN_WINDOW_S = 300.0
"""Default stabilisation on the way down; on the way up there is none."""
UP_PODS, UP_FACTOR = 4, 2
"""Default rate on the way up: 4 pods or 100% per 15 s, whichever is more; on the way down 100%."""


@dataclass(frozen=True, slots=True)
class PodMetric:
    """One metric that each pod reports: sum over the ready pods that reported, how many those are, and the average to keep, > 0."""

    total: float
    reported: int
    missing: int
    unready: int
    target: float


def pods_desired(metric: PodMetric, current: int) -> int | None:
    """Return the replicas that a metric of pods asks for; None when no pod reported.

    Missing pods count as exactly on target on the way down and as 0 on the way up, unready ones as 0 on the way
    up; if that turns the direction around, nothing changes.

    Example: 3 pods report 1.6 each against a target of 1 and 2 are not ready: ratio 1.6, counted again over 5
    pods 4.8 / 5 = 0.96: within the tolerance, no change.
    """
    if not metric.reported:
        return None
    ratio = metric.total / metric.reported / metric.target
    counts_unready = metric.unready > 0 and ratio > 1
    if not counts_unready and not metric.missing:
        return current if _is_within(ratio) else _ceil(ratio * metric.reported)
    total, pods = metric.total, metric.reported
    if metric.missing:
        total += metric.missing * metric.target if ratio < 1 else 0.0
        pods += metric.missing
    if counts_unready:
        pods += metric.unready
    again = total / pods / metric.target
    if _is_within(again) or (ratio < 1) != (again < 1):
        return current
    desired = _ceil(again * pods)
    is_turned = (again < 1 and desired > current) or (again > 1 and desired < current)
    return current if is_turned else desired


def external_desired(total: float, target: float, current: int) -> int:
    """Return the replicas that an external metric asks for, by its average over the current ones.

    Example: 12 waiting requests at a target of 3 each, 2 replicas: 4.
    """
    if current and _is_within(total / (target * current)):
        return current
    return _ceil(total / target)


def combined(desired: Sequence[int | None], current: int) -> int | None:
    """Return the largest of several metrics' numbers; with one unknown nothing shrinks, with all nothing changes."""
    known = [each for each in desired if each is not None]
    if not known or (len(known) < len(desired) and max(known) < current):
        return None
    return max(known)


def stabilised(desired: int, current: int, recent: Sequence[int]) -> int:
    """Return what stabilisation and rates leave of a number, by the numbers of the last 300 s without this one.

    After a start the current number replaces them.
    """
    held = max([desired, *recent]) if desired < current else desired
    held = min(held, current) if desired < current else held
    return min(held, max(current * UP_FACTOR, current + UP_PODS))


def recommend(
    desired: int, current: int, now_s: float, before: Sequence[float]
) -> tuple[int, tuple[float, ...]]:
    """Return the stabilised number and the recommendations to remember.

    ``before`` are those remembered, as time, number, time, number, ...; empty after a start, which the current
    number then stands for.
    """
    pairs = list(zip(before[::2], before[1::2], strict=True)) or [(now_s, float(current))]
    recent = [(at_s, number) for at_s, number in pairs if at_s > now_s - DOWN_WINDOW_S]
    chosen = stabilised(desired, current, [int(number) for _, number in recent])
    kept = [*recent, (now_s, float(desired))]
    return chosen, tuple(value for pair in kept for value in pair)


def hpa(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return what an HPA per role asks for: KV usage of decode, the queue of prefill, both of aggregated."""
    pull = window.pulls[-1]
    proposals, memory = [], {}
    for role, pool in pull.pools.items():
        metrics = _metrics(window.pulls, role)
        desired = combined([number for _, number in metrics], pool.replicas)
        before = numbers(of_role(state.memory, role).get("recommended"))
        kept: tuple[float, ...] = tuple(before)
        if desired is not None:
            desired, kept = recommend(desired, pool.replicas, pull.at_s, before)
        memory[role.value] = {"recommended": kept}
        inputs = dict(metrics)
        words = ", ".join(f"{name} asks for {number}" for name, number in metrics)
        step = Step("hpa", inputs, None, f"{words}; {desired} after stabilization")
        proposals.append(drafted(role, pull, desired, step, config))
    return proposed(proposals, state, memory)


def _metrics(pulls: Sequence[Pull], role: Role) -> list[tuple[str, int | None]]:
    pull = pulls[-1]
    pool = pull.pools[role]
    metrics: list[tuple[str, int | None]] = []
    if role is not Role.PREFILL:
        kv = PodMetric(pull.kv.total, pull.kv.fresh, pull.kv.unknown, pool.starting, KV_TARGET)
        metrics.append(("kv", pods_desired(kv, pool.replicas)))
    if role is not Role.DECODE:
        waiting = waiting_requests(pull, role)
        if waiting is not None:
            # As the routers' penstock_router_unserved_requests has it; a synchronisation sees those since the last.
            waiting += turned_away(pulls, role)
        queue = None if waiting is None else external_desired(waiting, QUEUE_TARGET, pool.replicas)
        metrics.append(("queue", queue))
    return metrics


def _is_within(ratio: float) -> bool:
    return 1 - TOLERANCE <= ratio <= 1 + TOLERANCE


def _ceil(value: float) -> int:
    # A quotient that is an integer except for rounding must not ask for one replica more.
    return math.ceil(value - 1e-9)


POLICY = PlannerPolicy(hpa, has_ledger=False, interval_s=SYNC_S, max_step=None)
