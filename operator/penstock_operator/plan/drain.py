"""Decides how many of its desired replicas a service gets, and how it scales there without losing a request.

Pure and level-triggered: the complete state is on the pods (serving label, drain time, deletion cost) and in the
workload's ``spec.replicas``. A crash between any two writes costs only another reconcile.

**Up.** ``spec.replicas`` becomes the desired number at once; draining pods are put back into service.

**Down.** As many victims are marked as draining as there are surplus replicas. A marked pod leaves its Service, so
routers send it no new requests. Its deletion cost is set to the minimum when it is idle, when its grace period is
over, or if it never served. Only after the watch shows this cost on the pod is ``spec.replicas`` reduced, and only as
far as the ReplicaSet's own deletion order takes exactly such pods.

**Choice of victims.** The ReplicaSet controller deletes unassigned pods before assigned ones, Pending before Unknown
before Running, and not ready before ready; it compares deletion costs only among pods that are equal in these
(pkg/controller/controller_utils.go, ActivePodsWithRanks). Victims are chosen in the same order, then draining ones
first, then those on cordoned nodes, then by fewest requests, least KV cache usage, and youngest. So a pod that stops
being ready while another one drains replaces it as the victim, and the drained pod serves again: the ReplicaSet would
delete the broken pod whatever the costs are.

Replicas are not reduced while a rollout makes progress: a Deployment then owns two ReplicaSets and decides itself
which one to reduce. In a rollout that is stuck, the pods that never became ready are the first victims.

**LeaderWorkerSets** always delete the highest group index first, so that group is the victim. Only the leaders of
groups serve, so only leaders are marked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from penstock.api import ServiceSpec
from penstock.kube.objects.names import DRAINING
from penstock_operator.plan.pods import PodView

REMOVABLE_COST: Final = -(2**31)
"""Deletion cost (pod-deletion-cost, the lowest is deleted first) of a pod that can be deleted now; the lowest that Kubernetes accepts."""

DRAINING_COST: Final = REMOVABLE_COST + 1
"""Deletion cost of a pod that is still finishing requests: it is deleted before serving pods and after idle ones."""

SETTLE_S: Final = 3.0
"""Seconds for which routers that have not seen a pod's drain label yet can still send requests to it; wall-clock
time, chosen."""

IDLE_S: Final = 1.0
"""Minimum seconds between two load readings that both find a pod idle. Chosen: a worker's gauges lag by one engine
step."""

_PHASES: Final = {"Pending": 0, "Unknown": 1, "Running": 2}


@dataclass(frozen=True, slots=True)
class LimitedReplicas:
    """A desired number of replicas, limited to the service's minimum and maximum and to the GPU budget.

    Attributes:
        replicas: The number after limiting.
        reason: Condition reason if limiting changed the number; else empty.
        message: Sentence about the requested number and the limit, if limiting changed the number; else empty.
    """

    replicas: int
    reason: str = ""
    message: str = ""


def limited_replicas(
    desired: int | None, service: ServiceSpec, *, max_gpu_budget: int | None
) -> LimitedReplicas:
    """Return the desired number of replicas, limited to the service's minimum and maximum and to the GPU budget.

    Args:
        desired: The ScalingAdapter's ``spec.replicas``; None if there is no adapter (yet), in which case the service's
            initial number is limited.
        service: The service. If it has no ``scaling`` section, the result is its fixed number of replicas, and
            ``desired`` is refused if it differs.
        max_gpu_budget: Maximum number of GPUs of the graph, which also limits a single service; None means no limit.
    """
    if service.scaling is None:
        if desired is None or desired == service.first_replicas:
            return LimitedReplicas(service.first_replicas)
        why = f"the service has no scaling, so it keeps {service.first_replicas}"
        return LimitedReplicas(
            service.first_replicas, "NotScalable", f"{desired} replicas were requested; {why}"
        )
    requested = service.first_replicas if desired is None else desired
    low, high = service.replica_bounds
    text = f"{requested} replicas were requested"
    if requested < low:
        return LimitedReplicas(low, "TooFewReplicas", f"{text}; scaling.minReplicas is {low}")
    fitting = max_gpu_budget // service.gpus if max_gpu_budget is not None and service.gpus else high
    if requested > high and high <= fitting:
        return LimitedReplicas(high, "TooManyReplicas", f"{text}; scaling.maxReplicas is {high}")
    if requested > fitting:
        fits = max(low, fitting)
        gpus = f"{requested} replicas of {service.gpus} GPUs exceed the {max_gpu_budget} of planner.maxGpuBudget or its pool"
        return LimitedReplicas(fits, "OverBudget", f"{gpus}; the service gets {fits}")
    return LimitedReplicas(requested)


def replicas_while_paused(requested: LimitedReplicas, running: int | None) -> LimitedReplicas:
    """Return the number of replicas that a service has now, which it keeps because its graph is paused.

    The result has a message if this number differs from the desired one in ``requested``.

    Args:
        requested: Replicas that the service would have if the graph was not paused.
        running: Replicas of the service's workload; None if there is no workload, which counts as 0.
    """
    current = running or 0
    if requested.replicas == current:
        return requested
    message = f"{requested.replicas} replicas are desired; the graph is paused and keeps {current}"
    return LimitedReplicas(current, "Paused", message)


def with_one_more(requested: LimitedReplicas) -> LimitedReplicas:
    """Return ``requested``, the desired number of replicas, plus one.

    This is for a service whose serving replicas are all on cordoned nodes. The result may exceed the maximum of the
    service by one; the GPU budget is checked later.
    """
    return replace(requested, replicas=requested.replicas + 1)


@dataclass(frozen=True, slots=True)
class PodLoad:
    """Current load of a pod, from its own metrics.

    Attributes:
        running: Number of requests in progress.
        waiting: Number of requests queued in the worker.
        kv_usage_fraction: Fraction of the pod's KV blocks in use, 0 to 1; None if the pod does not report it, such as
            Dynamo's mocker for prefill.
        idle_s: Wall-clock seconds between the first and the newest of consecutive readings that all found the pod idle;
            0 after a single reading. At least 1 s (`IDLE_S`) is required before the pod counts as drained.
        keeps_leases: Whether KV blocks that are in use although there are no requests are kept for another worker that
            still has to read them (leased); False on a decode worker, where such blocks are a prefix cache for the next
            turn.
    """

    running: int
    waiting: int
    kv_usage_fraction: float | None
    idle_s: float = 0.0
    keeps_leases: bool = True

    @property
    def requests(self) -> int:
        """Number of requests in progress or queued at the pod, which have to finish before the pod can be deleted."""
        return self.running + self.waiting

    @property
    def is_idle(self) -> bool:
        """Whether the newest reading found no requests and no KV blocks that another worker still has to read."""
        return self.requests == 0 and not (self.kv_usage_fraction and self.keeps_leases)


def is_idle(load: PodLoad | None) -> bool:
    """Return whether two readings of a pod's metrics, at least 1 s apart (`IDLE_S`), found it idle; False if ``load`` is None (unknown)."""
    return load is not None and load.is_idle and load.idle_s >= IDLE_S


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The next step of one service towards its desired number of replicas; tuples of pod names are sorted.

    Attributes:
        spec_replicas: Value that the workload's ``spec.replicas`` should have now.
        start_drain: Pods that start to drain: their serving label and drain time are to be written.
        restore: Draining pods to put back into service: their serving label is to be set, drain time and deletion cost
            removed.
        deletion_costs: New deletion cost (by which Kubernetes chooses the pod to delete) by pod, for pods whose cost
            has to change; 0 for a pod in service.
        draining: Pods that are or will be marked as draining.
        removable: Draining pods that can be deleted now.
        hold_reason: Reason why the number of replicas is not changed although it differs from the desired one; else empty.
    """

    spec_replicas: int
    start_drain: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    deletion_costs: Mapping[str, int] = field(default_factory=dict)
    draining: tuple[str, ...] = ()
    removable: tuple[str, ...] = ()
    hold_reason: str = ""


@dataclass(frozen=True, slots=True)
class ServicePool:
    """State of one worker service, as input of its scaling plan.

    Attributes:
        pods: All pods of the service, including terminating and finished ones.
        desired: Desired replicas, already limited to the allowed range; at least 0.
        spec_replicas: The workload's current ``spec.replicas``; the desired number if there is no workload.
        grace_s: Seconds after the start of its drain at which a pod is deleted even if it is busy.
        rolling: Whether a rollout of the service makes progress; the rollout replaces pods in its own order, so nothing
            is scaled down.
        has_senders: Whether a router can still send requests to the service's pods, so that a pod is removed only when
            all routers have had time to see its drain label.
        known_replicas: The workload's ``status.replicas``. If it exceeds the replicas in ``pods``, the watch lags
            behind, and the unseen replicas count as in service.
    """

    pods: Sequence[PodView]
    desired: int
    spec_replicas: int
    grace_s: float
    rolling: bool = False
    has_senders: bool = True
    known_replicas: int = 0


def pods_to_query(pool: ServicePool) -> list[PodView]:
    """Return the pods whose load the caller has to read before `plan_scale`; none if the service has no surplus pods.

    These are the draining pods or, if more pods must be chosen for removal, all that can have requests.
    """
    surplus = sum(pod.alive for pod in pool.pods) - pool.desired
    if surplus <= 0 or (pool.rolling and pool.desired < pool.spec_replicas):
        return []
    able = [pod for pod in pool.pods if pod.alive and pod.may_hold_requests]
    marked = [pod for pod in able if pod.draining]
    return marked if len(marked) >= surplus else able


def plan_scale(pool: ServicePool, *, loads: Mapping[str, PodLoad | None], now_s: float) -> ScalePlan:
    """Return the next step towards a service's desired number of replicas: pods to drain, pods to delete, and ``spec.replicas``.

    Args:
        pool: The service and its pods.
        loads: Load by pod name; None or absent means unknown, which does not count as idle.
        now_s: Current Unix time in seconds.
    """
    leaders = (pod for pod in pool.pods if pod.alive and pod.worker_index == 0)
    alive = sorted(leaders, key=lambda pod: pod.name)
    desired = pool.desired
    if pool.rolling and desired < pool.spec_replicas:
        return ScalePlan(
            spec_replicas=pool.spec_replicas,
            draining=tuple(pod.name for pod in alive if pod.draining),
            hold_reason="a rollout is under way; replicas are reduced after it",
        )
    in_groups = any(pod.group_index is not None for pod in alive)
    if in_groups:
        victims = [pod for pod in alive if (pod.group_index or 0) >= desired]
    else:
        by_cost = sorted(alive, key=lambda pod: _victim_order(pod, loads.get(pod.name)))
        if pool.rolling:  # the rollout's extra pods are not surplus; pods that already drain stay marked
            by_cost = [pod for pod in by_cost if pod.draining]
        victims = by_cost[: max(0, len(alive) - desired)]
    marked = {pod.name for pod in victims}
    removable = {pod.name for pod in victims if _is_removable(pod, pool, loads.get(pod.name), now_s)}
    if in_groups:
        needed = _groups_needed(victims, removable, unseen=max(0, pool.known_replicas - len(alive)))
    else:
        needed = max(len(alive), pool.known_replicas) - _deleted_first(alive, removable)
    return ScalePlan(
        spec_replicas=max(desired, min(pool.spec_replicas, needed)),
        start_drain=tuple(pod.name for pod in alive if pod.name in marked and not pod.draining),
        restore=tuple(pod.name for pod in alive if pod.name not in marked and _is_marked(pod)),
        deletion_costs={} if in_groups else _costs(alive, marked, removable),
        draining=tuple(sorted(marked)),
        removable=tuple(sorted(removable)),
    )


def _is_removable(pod: PodView, pool: ServicePool, load: PodLoad | None, now_s: float) -> bool:
    """Return whether a draining pod can be deleted now."""
    if pod.serving != DRAINING or pod.drain_since_s is None:
        return False
    elapsed_s = now_s - pod.drain_since_s
    if not pod.may_hold_requests or elapsed_s >= pool.grace_s:
        return True
    return is_idle(load) and not (pool.has_senders and elapsed_s < SETTLE_S)


def _is_marked(pod: PodView) -> bool:
    """Return whether ``pod`` is not completely in service: it drains, or someone removed its label or part of its drain marks."""
    return pod.drain_since_s is not None or not pod.takes_requests


def _costs(alive: Sequence[PodView], marked: Collection[str], removable: Collection[str]) -> dict[str, int]:
    wanted = {pod.name: 0 for pod in alive if pod.deletion_cost in {REMOVABLE_COST, DRAINING_COST}}
    wanted |= {name: REMOVABLE_COST if name in removable else DRAINING_COST for name in marked}
    return {
        pod.name: wanted[pod.name]
        for pod in alive
        if pod.name in wanted and wanted[pod.name] != pod.deletion_cost
    }


def _groups_needed(victims: Sequence[PodView], removable: Collection[str], *, unseen: int) -> int:
    """Return the minimum number of replicas that keeps every group that must remain; a huge number if groups are unseen."""
    if unseen:
        return 2**31
    return max([(pod.group_index or 0) + 1 for pod in victims if pod.name not in removable], default=0)


def _replica_set_order(pod: PodView) -> tuple[bool, int, bool]:
    return (pod.bound, _PHASES.get(pod.phase, 1), pod.ready)


def _victim_order(pod: PodView, load: PodLoad | None) -> tuple[bool | float | str, ...]:
    if not pod.may_hold_requests:
        requests, kv = 0.0, 0.0
    elif load is None:
        requests, kv = math.inf, math.inf
    else:
        requests, kv = float(load.requests), load.kv_usage_fraction or 0.0
    preferred = (not pod.draining, not pod.gated, not pod.node_is_cordoned)
    return (*_replica_set_order(pod), *preferred, requests, kv, -pod.created_s, pod.name)


def _deleted_first(alive: Sequence[PodView], removable: Collection[str]) -> int:
    """Return the number of pods that the ReplicaSet would delete, one after another, before one that must remain.

    Deletion costs count as the watch shows them. Among pods that are equal in this order the ReplicaSet compares
    values that are unknown here, so such pods count only if all of them can be deleted.
    """

    def order(pod: PodView) -> tuple[bool, int, bool, int]:
        return (*_replica_set_order(pod), pod.deletion_cost)

    count = 0
    for _, equals in groupby(sorted(alive, key=order), key=order):
        run = list(equals)
        if not all(pod.name in removable and pod.deletion_cost == REMOVABLE_COST for pod in run):
            break
        count += len(run)
    return count
