"""How many of the desired replicas a service gets, and how it reaches them without losing a request.

Pure and level-triggered: the complete state is on the pods (serving label, drain time, deletion cost) and in
the workload's ``spec.replicas``; a crash between any two writes costs a second look.

**Up.** ``spec.replicas`` becomes the desired number at once; pods marked to leave are put back into service.

**Down.** As many victims are marked as replicas are too many. A marked pod leaves its Service, so routers
send it nothing new. Once it is idle, or its grace is over, or if it never served, its deletion cost falls to
the lowest; only when that is *seen on the pod*, ``spec.replicas`` is lowered, and only as far as the
ReplicaSet's own order of deletion takes exactly such pods.

**Who.** The ReplicaSet controller deletes unassigned pods before assigned ones, Pending before Unknown
before Running, not ready before ready, and looks at the deletion cost only among equals
(pkg/controller/controller_utils.go, ActivePodsWithRanks). Victims are chosen in that order too, then marked
ones first, then fewest requests, least KV, youngest. So a pod that stops being ready while another one
drains takes its place as victim, and the drained one serves again: deleting the broken one is what the
ReplicaSet would do whatever the costs say.

While a rollout makes progress nothing is shrunk: a Deployment then owns two ReplicaSets and decides itself
which of them to take from. Of a rollout that is stuck, the pods that never became ready are the first victims.

**LeaderWorkerSets** have no choice: the highest group index goes first, so that is the victim. Their leaders
serve, so only those are marked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from penstock.api import ServiceSpec
from penstock.kube.objects.names import DRAINING
from penstock_operator.plan.pods import PodView

LEAVING_COST: Final = -(2**31)
"""Deletion cost of a pod that may go at once; the lowest that Kubernetes accepts."""

DRAINING_COST: Final = LEAVING_COST + 1
"""Deletion cost of a pod that still finishes its requests: it goes before others, after the idle ones."""

SETTLE_S: Final = 3.0
"""Routers that have not seen a pod's drain mark yet may still send it requests; real seconds, chosen."""

IDLE_S: Final = 1.0
"""Two looks at least this far apart must find a pod idle. Chosen: a worker's gauges lag one engine step."""

_PHASES: Final = {"Pending": 0, "Unknown": 1, "Running": 2}


@dataclass(frozen=True, slots=True)
class Bounded:
    """A desired number within its bounds; one word and what was asked for, where that changed it."""

    replicas: int
    reason: str = ""
    message: str = ""


def bounded(desired: int | None, service: ServiceSpec, *, max_gpu_budget: int | None) -> Bounded:
    """Return ``desired`` within the service's bounds.

    Args:
        desired: The ScalingAdapter's ``spec.replicas``; None if there is no adapter (yet).
        service: The service; without ``scaling`` its ``replicas`` are the number.
        max_gpu_budget: Most GPUs of the graph; a single service can never use more. None: no ceiling.
    """
    if service.scaling is None:
        if desired is None or desired == service.first_replicas:
            return Bounded(service.first_replicas)
        why = f"the service has no scaling, so it keeps {service.first_replicas}"
        return Bounded(service.first_replicas, "NotScalable", f"{desired} replicas were asked for; {why}")
    asked = service.first_replicas if desired is None else desired
    low, high = service.replica_bounds
    said = f"{asked} replicas were asked for"
    if asked < low:
        return Bounded(low, "TooFewReplicas", f"{said}; scaling.minReplicas is {low}")
    fitting = max_gpu_budget // service.gpus if max_gpu_budget is not None and service.gpus else high
    if asked > high and high <= fitting:
        return Bounded(high, "TooManyReplicas", f"{said}; scaling.maxReplicas is {high}")
    if asked > fitting:
        held = max(low, fitting)
        gpus = f"{asked} replicas of {service.gpus} GPUs exceed the {max_gpu_budget} of planner.maxGpuBudget or its pool"
        return Bounded(held, "OverBudget", f"{gpus}; {held} are kept")
    return Bounded(asked)


def held(asked: Bounded, running: int | None) -> Bounded:
    """Return the replicas that a service of a paused graph keeps; ``running`` is None without a workload."""
    kept = running or 0
    if asked.replicas == kept:
        return asked
    message = f"{asked.replicas} replicas are wanted; the graph is paused and keeps {kept}"
    return Bounded(kept, "Paused", message)


@dataclass(frozen=True, slots=True)
class PodLoad:
    """What a pod does now, by its own metrics.

    Attributes:
        running: Requests in progress.
        waiting: Requests queued in the worker.
        kv_usage_fraction: Share of its KV blocks in use, 0 to 1; None: it reports none, as Dynamo's mocker does for
            prefill.
        keeps_leases: Whether KV in use without requests is another worker's to read; on a decode worker it is a cache
            for the next turn.
        idle_s: Seconds between the first and the newest of consecutive looks that all found nothing
            running, nothing waiting and nothing kept for others; 0 after a single one.
    """

    running: int
    waiting: int
    kv_usage_fraction: float | None
    idle_s: float = 0.0
    keeps_leases: bool = True

    @property
    def requests(self) -> int:
        """Requests that would have to finish first."""
        return self.running + self.waiting

    @property
    def is_idle(self) -> bool:
        """Whether this look found nothing to do and nothing held for another worker to read."""
        return self.requests == 0 and not (self.kv_usage_fraction and self.keeps_leases)


def is_idle(load: PodLoad | None) -> bool:
    """Return whether two looks far enough apart found nothing to do; an unknown load is not idle."""
    return load is not None and load.is_idle and load.idle_s >= IDLE_S


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The next step of one service towards its desired number of replicas; pods are sorted.

    Attributes:
        spec_replicas: What the workload's ``spec.replicas`` should be now.
        begin: Pods to mark as draining (serving label, drain time).
        restore: Pods to put back into service (serving label, drain time and deletion cost removed).
        deletion_costs: Pods whose deletion cost differs from what it should be, and what it should be.
            0 for a pod in service.
        draining: Pods that are or will be marked.
        leaving: Marked pods that may go at once.
        held: Why nothing is done although it should; empty otherwise.
    """

    spec_replicas: int
    begin: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    deletion_costs: Mapping[str, int] = field(default_factory=dict)
    draining: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    held: str = ""


@dataclass(frozen=True, slots=True)
class ServicePool:
    """One worker service that is scaled.

    Attributes:
        pods: All its pods, terminating and finished ones included.
        desired: Replicas wanted, already within bounds, at least 0.
        spec_replicas: The workload's ``spec.replicas`` now; the desired number while there is no workload.
        grace_s: Seconds after which a draining pod leaves even if it is busy.
        rolling: Whether a rollout of the service makes progress; it replaces pods in an order of its own.
        has_senders: Whether a router may still send its pods requests, so that a marked one has to wait until all
            have seen it.
        known_replicas: The workload's ``status.replicas``: the ones that its controller knows. Where ``pods`` shows
            fewer, it is behind, and the unseen ones are in service.
    """

    pods: Sequence[PodView]
    desired: int
    spec_replicas: int
    grace_s: float
    rolling: bool = False
    has_senders: bool = True
    known_replicas: int = 0


def pods_to_ask(pool: ServicePool) -> list[PodView]:
    """Return the pods whose load the plan needs: none at rest; all while victims are to be chosen."""
    surplus = sum(pod.alive for pod in pool.pods) - pool.desired
    if surplus <= 0 or (pool.rolling and pool.desired < pool.spec_replicas):
        return []
    able = [pod for pod in pool.pods if pod.alive and pod.may_hold_requests]
    marked = [pod for pod in able if pod.draining]
    return marked if len(marked) >= surplus else able


def plan_scale(pool: ServicePool, *, loads: Mapping[str, PodLoad | None], now_s: float) -> ScalePlan:
    """Return the next step towards the desired number of replicas; ``now_s`` in seconds since the epoch.

    Loads are by pod name; None or absent: unknown, which is not idle.
    """
    leaders = (pod for pod in pool.pods if pod.alive and pod.worker_index == 0)
    alive = sorted(leaders, key=lambda pod: pod.name)
    desired = pool.desired
    if pool.rolling and desired < pool.spec_replicas:
        return ScalePlan(
            spec_replicas=pool.spec_replicas,
            draining=tuple(pod.name for pod in alive if pod.draining),
            held="a rollout is under way; replicas are reduced after it",
        )
    in_groups = any(pod.group_index is not None for pod in alive)
    if in_groups:
        victims = [pod for pod in alive if (pod.group_index or 0) >= desired]
    else:
        by_cost = sorted(alive, key=lambda pod: _victim_order(pod, loads.get(pod.name)))
        if (
            pool.rolling
        ):  # its own extra pods are not surplus; those whose deletion is ordered already stay marked
            by_cost = [pod for pod in by_cost if pod.draining]
        victims = by_cost[: max(0, len(alive) - desired)]
    marked = {pod.name for pod in victims}
    leaving = {pod.name for pod in victims if _may_go(pod, pool, loads.get(pod.name), now_s)}
    if in_groups:
        needed = _groups_needed(victims, leaving, unseen=max(0, pool.known_replicas - len(alive)))
    else:
        needed = max(len(alive), pool.known_replicas) - _deleted_first(alive, leaving)
    return ScalePlan(
        spec_replicas=max(desired, min(pool.spec_replicas, needed)),
        begin=tuple(pod.name for pod in alive if pod.name in marked and not pod.draining),
        restore=tuple(pod.name for pod in alive if pod.name not in marked and _is_marked(pod)),
        deletion_costs={} if in_groups else _costs(alive, marked, leaving),
        draining=tuple(sorted(marked)),
        leaving=tuple(sorted(leaving)),
    )


def _may_go(pod: PodView, pool: ServicePool, load: PodLoad | None, now_s: float) -> bool:
    """Return whether a victim may go at once."""
    if pod.serving != DRAINING or pod.drain_since_s is None:
        return False
    elapsed_s = now_s - pod.drain_since_s
    if not pod.may_hold_requests or elapsed_s >= pool.grace_s:
        return True
    return is_idle(load) and not (pool.has_senders and elapsed_s < SETTLE_S)


def _is_marked(pod: PodView) -> bool:
    """Whether ``pod`` is not wholly in service: it drains, or a person took its label or half of its marks."""
    return pod.drain_since_s is not None or not pod.takes_requests


def _costs(alive: Sequence[PodView], marked: Collection[str], leaving: Collection[str]) -> dict[str, int]:
    wanted = {pod.name: 0 for pod in alive if pod.deletion_cost in {LEAVING_COST, DRAINING_COST}}
    wanted |= {name: LEAVING_COST if name in leaving else DRAINING_COST for name in marked}
    return {
        pod.name: wanted[pod.name]
        for pod in alive
        if pod.name in wanted and wanted[pod.name] != pod.deletion_cost
    }


def _groups_needed(victims: Sequence[PodView], leaving: Collection[str], *, unseen: int) -> int:
    """Return the fewest replicas that keep every group which must stay; with unseen groups, no reduction."""
    if unseen:
        return 2**31
    return max([(pod.group_index or 0) + 1 for pod in victims if pod.name not in leaving], default=0)


def _replica_set_order(pod: PodView) -> tuple[bool, int, bool]:
    return (pod.bound, _PHASES.get(pod.phase, 1), pod.ready)


def _victim_order(pod: PodView, load: PodLoad | None) -> tuple[bool | float | str, ...]:
    if not pod.may_hold_requests:
        requests, kv = 0.0, 0.0
    elif load is None:
        requests, kv = math.inf, math.inf
    else:
        requests, kv = float(load.requests), load.kv_usage_fraction or 0.0
    eager = (not pod.draining, not pod.gated)
    return (*_replica_set_order(pod), *eager, requests, kv, -pod.created_s, pod.name)


def _deleted_first(alive: Sequence[PodView], leaving: Collection[str]) -> int:
    """Return how many pods the ReplicaSet would delete, one after the other, before one that must stay.

    Deletion costs count as seen on the pods. Among equals the ReplicaSet looks at what is not known here, so
    a run of equals counts only if all of it may go.
    """

    def order(pod: PodView) -> tuple[bool, int, bool, int]:
        return (*_replica_set_order(pod), pod.deletion_cost)

    count = 0
    for _, equals in groupby(sorted(alive, key=order), key=order):
        run = list(equals)
        if not all(pod.name in leaving and pod.deletion_cost == LEAVING_COST for pod in run):
            break
        count += len(run)
    return count
