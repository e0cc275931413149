"""Scales worker services down and deletes graphs in order: pods are drained first and deleted afterwards.

The decisions are pure functions in `plan.drain` and `plan.deletion`. The replicas of a workload are written later,
together with the workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.api import Role
from penstock.core.stamps import stamp
from penstock.kube.kinds import LEADER_WORKER_SET, POD
from penstock.kube.objects.names import (
    DELETION_COST_ANNOTATION,
    DRAIN_ANNOTATION,
    DRAINING,
    ROLE_LABEL,
    SERVICE_LABEL,
    SERVING,
    SERVING_LABEL,
)
from penstock.kube.objects.refusals import Refusals
from penstock_operator.apply import Applier, name_of
from penstock_operator.cluster import GraphSnapshot
from penstock_operator.loads import MetricsReader
from penstock_operator.plan.deletion import DeletionStep, next_step
from penstock_operator.plan.drain import ScalePlan, ServicePool, is_idle, plan_scale, pods_to_query
from penstock_operator.plan.pods import PodView
from penstock_operator.trim import Object
from penstock_operator.workloads import WORKLOADS, is_own, known_replicas, label_of, replicas_of

IDLE_END_S: Final = 1
"""Termination grace period, in wall-clock seconds, of an idle worker of a graph that is being deleted: the shortest
that still sends SIGTERM."""


class Drains:
    """Executes the next step of each service's scale-down and of each graph's deletion; every step can be repeated.

    A pod that drains finishes its requests and gets no new ones. The methods of this class raise ClusterError if the
    API server does not answer. Writes that the API server rejects are skipped and added to ``refusals``.
    """

    def __init__(self, applier: Applier, loads: MetricsReader) -> None:
        self._applier = applier
        self._loads = loads

    async def plan(self, pool: ServicePool, *, now_s: float) -> ScalePlan:
        """Return the next scaling step of a service: pods that start to drain, pods to delete, and the number of replicas.

        This method only reads, namely the load of pods that may be removed. `mark` writes the changes to pods, and the
        caller writes the plan's ``spec_replicas`` to the workload.

        Args:
            pool: The service and its pods.
            now_s: Current Unix time in seconds.
        """
        loads = await self._loads.read(pods_to_query(pool))
        return plan_scale(pool, loads=loads, now_s=now_s)

    async def mark(
        self, plan: ScalePlan, pods: Sequence[PodView], *, now_s: float, refusals: Refusals
    ) -> None:
        """Write the changes to pods that a scaling step needs: marks as draining or serving, and the deletion cost.

        The marks are labels and annotations. By the deletion cost, Kubernetes chooses the pod to delete when a
        Deployment shrinks.

        Args:
            plan: Next scaling step of one service.
            pods: At least the pods that ``plan`` names.
            now_s: Current Unix time in seconds, as the drain's start.
            refusals: Collects the writes that the API server rejects.
        """
        by_name = {each.name: each for each in pods}
        for name, change in _changes(plan, now_s).items():
            pod = by_name[name]
            head = {"name": name, "namespace": pod.namespace}
            with refusals.of(f"Pod {name}: its drain mark", "Drain"):
                await self._applier.patch(POD.of(head), {"metadata": {**change, "uid": pod.uid}})

    async def delete_graph(
        self, raw: Object, snapshot: GraphSnapshot, *, now_s: float, refusals: Refusals
    ) -> DeletionStep:
        """Execute the next step of a graph's deletion (drain workers, then delete objects) and return it; the caller removes the finalizer.

        Args:
            raw: The GraphDeployment as the API server returned it.
            snapshot: The graph's children and pods.
            now_s: Current Unix time in seconds.
            refusals: Collects the writes that the API server rejects.
        """
        uid = raw["metadata"]["uid"]
        own = {key: each for key, each in snapshot.children.items() if is_own(each, uid)}
        idle = await self._idle_routers(snapshot.views())
        step = next_step(own.values(), snapshot.views(), idle=idle)
        for (kind, _), child in sorted(own.items()):
            if kind in WORKLOADS and label_of(child, SERVICE_LABEL) in step.drain:
                plan = await self._drain(child, snapshot, now_s, has_senders=bool(idle), refusals=refusals)
                if not plan.spec_replicas:
                    await self._end(pods_of(child, snapshot), plan, now_s)
        for obsolete in step.delete:
            with refusals.of(name_of(obsolete), "Delete"):
                await self._applier.delete(obsolete)
        return step

    async def retire(
        self, workload: Object, snapshot: GraphSnapshot, *, keep: int, now_s: float, refusals: Refusals
    ) -> bool:
        """Execute the next step of removing a workload (Deployment or LeaderWorkerSet) that its graph no longer has: drain, then delete it.

        Args:
            workload: The workload.
            snapshot: The graph's children and pods.
            keep: Number of replicas of the workload that must remain for now.
            now_s: Current Unix time in seconds.
            refusals: Collects the writes that the API server rejects.

        Returns:
            Whether any pods of the workload are draining; False also if the workload is being deleted.
        """
        if workload["metadata"].get("deletionTimestamp"):
            return False
        is_router = label_of(workload, ROLE_LABEL) == Role.ROUTER
        if is_router and keep:
            return False
        if is_router or not any(each.alive for each in pods_of(workload, snapshot)):
            with refusals.of(name_of(workload), "Delete"):
                await self._applier.delete(workload)
            return False
        plan = await self._drain(workload, snapshot, now_s, keep=keep, has_senders=True, refusals=refusals)
        return bool(plan.draining)

    async def _drain(
        self,
        workload: Object,
        snapshot: GraphSnapshot,
        now_s: float,
        *,
        has_senders: bool,
        refusals: Refusals,
        keep: int = 0,
    ) -> ScalePlan:
        pods, number = pods_of(workload, snapshot), replicas_of(workload) or 0
        pool = ServicePool(
            pods=pods,
            desired=min(keep, number),
            spec_replicas=number,
            grace_s=max((each.grace_s for each in pods), default=0.0),
            has_senders=has_senders,
            known_replicas=known_replicas(workload),
        )
        plan = await self.plan(pool, now_s=now_s)
        await self.mark(plan, pods, now_s=now_s, refusals=refusals)
        if plan.spec_replicas != number:
            with refusals.of(f"{name_of(workload)}: its replicas", "Drain"):
                await self._applier.patch(workload, {"spec": {"replicas": plan.spec_replicas}})
        return plan

    async def _idle_routers(self, views: Sequence[PodView]) -> frozenset[str]:
        """Return the names of the routers if all of them are terminating and neither routers nor workers have requests; else an empty set.

        Both are queried, because a router can forward requests for another.
        """
        pods = [each for each in views if not each.finished]
        routers = [each for each in pods if each.role == Role.ROUTER]
        if not routers or not all(each.terminating for each in routers):
            return frozenset()
        loads = await self._loads.read(pods)
        is_under_way = not all(is_idle(loads[each.name]) for each in routers)
        return frozenset() if is_under_way else frozenset(each.name for each in routers)

    async def _end(self, pods: Sequence[PodView], plan: ScalePlan, now_s: float) -> None:
        """Delete the idle ones among the pods that leave, with the shortest grace period."""
        for each in pods:
            # A pod that leaves because its drain timed out may still stream; its own grace period ends it.
            since_s = now_s if each.drain_since_s is None else each.drain_since_s
            if each.name in plan.removable and now_s - since_s < each.grace_s:
                head = {"name": each.name, "namespace": each.namespace, "uid": each.uid}
                # An older chart's rights or a policy may forbid this; the pod then ends a little later by itself.
                with Refusals().of(f"Pod {each.name}", "Delete"):
                    await self._applier.delete(POD.of(head), grace_s=IDLE_END_S)


def scale_message(service: str, plan: ScalePlan, desired: int) -> str | None:
    """Return the text of an Event about the pods that begin or cease to drain in a service's scaling step; None if there are none.

    Args:
        service: Name of the service.
        plan: Scaling step of the service.
        desired: Desired replicas of the service.
    """
    if plan.start_drain:
        finish = "finishes its" if len(plan.start_drain) == 1 else "finish their"
        return (
            f"{service}: {_names(plan.start_drain)} {finish} requests before {service} shrinks to {desired}"
        )
    if plan.restore:
        serve = "serves" if len(plan.restore) == 1 else "serve"
        return f"{service}: {_names(plan.restore)} {serve} again; desired replicas: {desired}"
    return None


def _changes(plan: ScalePlan, now_s: float) -> dict[str, dict[str, Any]]:
    """Return the metadata patch of each pod that the plan changes, by pod name; pods that begin to drain come first."""
    serving: dict[str, tuple[str, str | None]] = dict.fromkeys(plan.start_drain, (DRAINING, stamp(now_s)))
    serving |= dict.fromkeys(plan.restore, (SERVING, None))
    found: dict[str, dict[str, Any]] = {
        name: {"labels": {SERVING_LABEL: label}, "annotations": {DRAIN_ANNOTATION: since}}
        for name, (label, since) in serving.items()
    }
    for name, cost in plan.deletion_costs.items():
        annotations = found.setdefault(name, {}).setdefault("annotations", {})
        annotations[DELETION_COST_ANNOTATION] = None if cost == 0 else str(cost)
    return found


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def pods_of(workload: Object, snapshot: GraphSnapshot) -> list[PodView]:
    """Return the facts about each pod of a Deployment or LeaderWorkerSet.

    While a service changes from one kind to the other, both exist: its pods that are in a LeaderWorkerSet group belong
    to the LeaderWorkerSet, all others to the Deployment.

    Args:
        workload: The Deployment or LeaderWorkerSet.
        snapshot: The objects of its graph.
    """
    service, is_set = label_of(workload, SERVICE_LABEL), workload["kind"] == LEADER_WORKER_SET.kind
    return [each for each in snapshot.views() if each.service == service and bool(each.group) == is_set]
