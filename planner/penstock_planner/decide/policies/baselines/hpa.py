"""The Kubernetes HorizontalPodAutoscaler, v2: ratio, tolerance, missing and unready pods, stabilisation, and scaling rates.

Source: the algorithm's description in the Kubernetes documentation ("Horizontal Pod Autoscaling") and
``pkg/controller/podautoscaler`` of Kubernetes 1.34: replica_calculator.go, horizontal.go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Proposal, Step
from penstock_planner.decide.demand.observation import Pull, Window, unserved
from penstock_planner.decide.policies.drafting import drafted, proposed, waiting_requests
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, PolicyState

TOLERANCE = 0.1
"""Deviation of the ratio from 1 up to which nothing changes. Default of ``--horizontal-pod-autoscaler-tolerance``."""
KV_TARGET = 0.5
"""Target of the mean KV usage fraction: 0.5.

On the cases with which it was tuned, it served more requests on time than 0.8, for 3-4% more GPU-hours."""

QUEUE_TARGET = 1.0
"""Target of the waiting requests per replica: 1.

On the cases with which it was tuned, it served more requests on time than 3 or 5."""

SYNC_S = 15.0
"""Simulated seconds between two decisions: 15. Default of ``--horizontal-pod-autoscaler-sync-period``."""
DOWN_WINDOW_S = 300.0
"""Stabilisation window for scaling down: 300 simulated seconds, the default. There is none for scaling up."""
UP_PODS, UP_FACTOR = 4, 2
"""Scaling rate upwards: 4 pods or 100% per 15 s, whichever is more. Default; the rate downwards is 100%."""


@dataclass(frozen=True, slots=True)
class HpaParameters:
    """Targets of a Kubernetes HorizontalPodAutoscaler (HPA), each per replica.

    None means that the HPA does not scale on this metric.

    If all targets are None, the HPA never changes the replicas.

    Attributes:
        kv_usage: KV usage of decode and aggregated replicas, a fraction, > 0.
        waiting: Number of requests that wait for a prefill or aggregated replica, > 0.
        running: Number of requests that a prefill or aggregated replica computes or that wait for it, > 0.
    """

    kv_usage: float | None = KV_TARGET
    waiting: float | None = QUEUE_TARGET
    running: float | None = None


@dataclass(frozen=True, slots=True)
class HpaState(PolicyState):
    """Recent recommendations of each HPA.

    Attributes:
        recommended: By role, the recommendations of the last 300 simulated seconds, oldest first, in one flat tuple:
            time, replicas, time, replicas, ... A recommendation is the number of replicas that the HPA wanted at that
            time.
    """

    KEY: ClassVar[str] = "hpa"

    recommended: Mapping[Role, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PodMetric:
    """Values of one metric that each pod of a role reports, as a Kubernetes HorizontalPodAutoscaler sees them.

    Attributes:
        total: Sum over the ready pods that reported a value.
        reported: Number of ready pods that reported a value.
        missing: Number of ready pods that reported no value.
        unready: Number of pods that are not ready.
        target: Desired average of the value per pod, > 0.
    """

    total: float
    reported: int
    missing: int
    unready: int
    target: float


def pods_desired(metric: PodMetric, current: int) -> int | None:
    """Return the number of replicas that a HorizontalPodAutoscaler wants by a metric of pods; None if no pod reported a value.

    A ready pod without a value counts as exactly on target if the metric asks to scale down, and as 0 if it asks to
    scale up. An unready pod counts as 0 if the metric asks to scale up. If counting pods in this way reverses the
    direction, ``current`` is returned.

    Example: 3 pods report 1.6 each against a target of 1, and 2 pods are not ready. The ratio is 1.6; calculated again
    over 5 pods it is 4.8 / 5 = 0.96, which is within the tolerance of 10%: no change.

    Args:
        metric: Values of the pods.
        current: Present number of replicas.
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
    """Return the number of replicas that a HorizontalPodAutoscaler wants by an external metric, such as the length of a queue.

    Example: 12 waiting requests with a target of 3 and 2 replicas give 4.

    Args:
        total: Value of the metric.
        target: Desired value per replica, > 0.
        current: Present number of replicas.
    """
    if current and _is_within(total / (target * current)):
        return current
    return _ceil(total / target)


def combined(desired: Sequence[int | None], current: int) -> int | None:
    """Return the number of replicas that a HorizontalPodAutoscaler with several metrics wants, the largest; None for no change.

    Nothing changes if all metrics are unknown, or if one is unknown and the others ask to scale down.

    Args:
        desired: Desired replicas of each metric; None if a metric is unknown.
        current: Present number of replicas.
    """
    known = [each for each in desired if each is not None]
    if not known or (len(known) < len(desired) and max(known) < current):
        return None
    return max(known)


def stabilised(desired: int, current: int, recent: Sequence[int]) -> int:
    """Return the number of replicas to which a HorizontalPodAutoscaler scales: the desired one after stabilisation and rate limits.

    Stabilisation means scaling down only to the largest desired number of recent decisions. The rate limits are the
    defaults of Kubernetes.

    Args:
        desired: Desired replicas of this decision.
        current: Present number of replicas.
        recent: Desired replicas of the earlier decisions of the last 300 s. After a start, when there are none, pass
            the present number.
    """
    held = max([desired, *recent]) if desired < current else desired
    held = min(held, current) if desired < current else held
    return min(held, max(current * UP_FACTOR, current + UP_PODS))


def recommend(
    desired: int, current: int, now_s: float, before: Sequence[float]
) -> tuple[int, tuple[float, ...]]:
    """Return the number of replicas to which a HorizontalPodAutoscaler scales, and the recent recommendations for its next decision.

    A recommendation is the desired number of replicas of one decision before stabilisation (scaling down only to the
    largest of recent ones). Those of the last 300 simulated seconds are kept.

    Args:
        desired: Desired replicas of this decision.
        current: Present number of replicas.
        now_s: Present time, in simulated seconds.
        before: Recommendations as returned by the previous call: time, replicas, time, replicas, ... Empty after a
            start; then the present number is used.
    """
    pairs = list(zip(before[::2], before[1::2], strict=True)) or [(now_s, float(current))]
    recent = [(at_s, number) for at_s, number in pairs if at_s > now_s - DOWN_WINDOW_S]
    chosen = stabilised(desired, current, [int(number) for _, number in recent])
    kept = [*recent, (now_s, float(desired))]
    return chosen, tuple(value for pair in kept for value in pair)


def hpa(window: Window, state: PlannerState, config: DecideConfig) -> Proposal:
    """Return the number of replicas of each role that a Kubernetes HorizontalPodAutoscaler (HPA) would want.

    Each role has its own HPA: for decode on KV usage, for prefill on the queue, and for aggregated on both.

    Each HPA scales down only to the largest number of replicas that it wanted in the last 300 simulated seconds.

    Args:
        window: Pulls (metrics scrapes) of the interval; only the newest is used, except for rejected requests.
        state: State left by the last decision.
        config: Configuration with the targets in `HpaParameters`.
    """
    pull = window.pulls[-1]
    proposals = []
    recommended = dict(HpaState.read(state.learned).recommended)
    for role, pool in pull.pools.items():
        metrics = _metrics(window.pulls, role, config.parameters_as(HpaParameters))
        desired = combined([number for _, number in metrics], pool.replicas)
        if desired is not None:
            desired, recommended[role] = recommend(
                desired, pool.replicas, pull.at_s, recommended.get(role, ())
            )
        inputs = dict(metrics)
        words = ", ".join(f"{name} asks for {number}" for name, number in metrics)
        step = Step("hpa", inputs, None, f"{words}; {desired} after stabilization")
        proposals.append(drafted(role, pull, desired, step, config))
    return proposed(proposals, state, HpaState(recommended))


def _metrics(pulls: Sequence[Pull], role: Role, targets: HpaParameters) -> list[tuple[str, int | None]]:
    pull = pulls[-1]
    pool = pull.pools[role]
    metrics: list[tuple[str, int | None]] = []
    if role is not Role.PREFILL and targets.kv_usage is not None:
        kv = PodMetric(pull.kv.total, pull.kv.fresh, pull.kv.unknown, pool.starting, targets.kv_usage)
        metrics.append(("kv", pods_desired(kv, pool.replicas)))
    if role is Role.DECODE:
        return metrics
    waiting = waiting_requests(pull, role)
    if waiting is not None:
        # Like the routers' metric penstock_router_unserved_requests; an HPA sees those since its last decision.
        waiting += unserved(pulls, role)
    if targets.waiting is not None:
        queue = None if waiting is None else external_desired(waiting, targets.waiting, pool.replicas)
        metrics.append(("queue", queue))
    if targets.running is not None:
        running = None if pull.demand is None else pull.demand.in_flight.get(role, 0.0)
        total = None if waiting is None or running is None else running + waiting
        asked = None if total is None else external_desired(total, targets.running, pool.replicas)
        metrics.append(("running", asked))
    return metrics


def _is_within(ratio: float) -> bool:
    return 1 - TOLERANCE <= ratio <= 1 + TOLERANCE


def _ceil(value: float) -> int:
    # A quotient that exceeds an integer only by a rounding error must not request one more replica.
    return math.ceil(value - 1e-9)


POLICY = PlannerPolicy(hpa, has_ledger=False, interval_s=SYNC_S, max_step=None, parameters=HpaParameters)
"""The HPA as a policy, registered under the name "hpa"."""
