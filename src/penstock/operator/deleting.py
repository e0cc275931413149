"""Takes a graph, or a workload that it no longer wants, away in order: drained first, deleted afterwards.

The order is `penstock.operator.plan.deletion`'s, pure; this module carries out its steps.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

from penstock.api import Role
from penstock.core.errors import ForbiddenError
from penstock.kube.kinds import POD
from penstock.kube.objects.names import ROLE_LABEL, SERVICE_LABEL
from penstock.operator.apply import Applier
from penstock.operator.cluster import GraphSnapshot
from penstock.operator.draining import DrainingPool, Drains
from penstock.operator.plan.deletion import Child, DeletionStep, next_step
from penstock.operator.plan.drain import is_idle
from penstock.operator.plan.pods import PodView
from penstock.operator.trim import Object
from penstock.operator.workloads import WORKLOADS, is_own, known_replicas, replicas_of

IDLE_END_S: Final = 1
"""Grace of an idle router of a graph that goes, and of an idle worker behind it; real seconds, the shortest that still
sends SIGTERM."""


class Deletion:
    """Drains and deletes children; every step may be taken again."""

    def __init__(self, applier: Applier, drains: Drains) -> None:
        self._applier = applier
        self._drains = drains

    async def step(self, raw: Object, snapshot: GraphSnapshot, *, now_s: float) -> DeletionStep:
        """Take the next step of a graph's deletion and return it; the finalizer is the caller's.

        Args:
            raw: The graph.
            snapshot: What is there of it.
            now_s: Seconds since the epoch.

        Raises:
            ClusterError: the API server does not answer or refused.
        """
        uid = raw["metadata"]["uid"]
        own = {key: each for key, each in snapshot.children.items() if is_own(each, uid)}
        ended = await self._end_idle_routers(snapshot, now_s)
        step = next_step([_child(each) for each in own.values()], snapshot.views(), ended=ended)
        for (kind, _), child in sorted(own.items()):
            if kind in WORKLOADS and _label(child, SERVICE_LABEL) in step.drain:
                await self._drain(child, snapshot, now_s, has_senders=False)
        for gone in step.delete:
            await self._applier.delete(own[gone.kind, gone.name])
        return step

    async def retire(self, workload: Object, snapshot: GraphSnapshot, *, now_s: float) -> None:
        """Take the next step of removing one workload: drain its pods, then delete it.

        Args:
            workload: A worker's or router's workload.
            snapshot: What is there of the graph.
            now_s: Seconds since the epoch.

        Raises:
            ClusterError: the API server does not answer or refused.
        """
        if workload["metadata"].get("deletionTimestamp"):
            return
        is_router = _label(workload, ROLE_LABEL) == Role.ROUTER
        pods = _pods_of(workload, snapshot)
        if is_router or not any(each["view"].alive for each in pods):
            await self._applier.delete(workload)
        else:
            await self._drain(workload, snapshot, now_s, has_senders=True)

    async def _drain(
        self, workload: Object, snapshot: GraphSnapshot, now_s: float, *, has_senders: bool
    ) -> None:
        pods = _pods_of(workload, snapshot)
        number = replicas_of(workload) or 0
        pool = DrainingPool(
            service=_label(workload, SERVICE_LABEL),
            desired=0,
            spec_replicas=number,
            grace_s=max((each["view"].grace_s for each in pods), default=0.0),
            rolling=False,
            pods=pods,
            has_senders=has_senders,
            known_replicas=known_replicas(workload),
        )
        plan = await self._drains.step(pool, now_s=now_s)
        if plan.spec_replicas != number:
            await self._applier.patch(workload, {"spec": {"replicas": plan.spec_replicas}})
        if not has_senders and not plan.spec_replicas:
            await self._end_idle(pods, plan.leaving, now_s)

    async def _end_idle_routers(self, snapshot: GraphSnapshot, now_s: float) -> frozenset[str]:
        """End the routers once all leave and all are idle, without their hooks' pause; return those that end.

        One that is idle may pass requests on for another, so a busy one keeps all. Workers are asked as well, because
        their idleness counts from the first look.
        """
        pods = [each for each in snapshot.pods.values() if not each["view"].finished]
        routers = [each for each in pods if each["view"].role == Role.ROUTER]
        leaving = [each for each in routers if each["view"].deleted_s is not None]
        ended = {each["view"].name for each in leaving if each["view"].deleted_s <= now_s + IDLE_END_S}
        rest = [each for each in leaving if each["view"].name not in ended]
        if rest and len(leaving) == len(routers):
            loads = await self._drains.loads(pods)
            if all(is_idle(loads[each["view"].name]) for each in rest):
                ended |= {each["view"].name for each in rest if await self._end(each)}
        return frozenset(ended)

    async def _end(self, pod: Object) -> bool:
        """Delete a pod with the shortest grace; return False where that right is missing."""
        metadata = {**pod["metadata"], "uid": pod["view"].uid}
        with suppress(ForbiddenError):  # rights of an older chart: the pod ends a little later by itself
            await self._applier.delete(
                {"apiVersion": POD.api_version, "kind": POD.kind, "metadata": metadata}, grace_s=IDLE_END_S
            )
            return True
        return False

    async def _end_idle(self, pods: tuple[Object, ...], leaving: Collection[str], now_s: float) -> None:
        """End the pods that leave because they are idle, without the pause that their hooks make for routers.

        Those that leave because their grace is over may still stream: they keep their own end.
        """
        for each in pods:
            view: PodView = each["view"]
            since_s = now_s if view.drain_since_s is None else view.drain_since_s
            if view.name not in leaving or now_s - since_s >= view.grace_s:
                continue
            await self._end(each)


def _pods_of(workload: Object, snapshot: GraphSnapshot) -> tuple[Object, ...]:
    """Return the pods of a workload; a Deployment and a set of the same service are told apart by groups."""
    service = _label(workload, SERVICE_LABEL)
    is_set = workload["kind"] == "LeaderWorkerSet"
    return tuple(
        each
        for each in snapshot.pods.values()
        if each["view"].service == service and bool(each["view"].group) == is_set
    )


def _child(obj: Object) -> Child:
    return Child(
        kind=obj["kind"],
        name=obj["metadata"]["name"],
        service=_label(obj, SERVICE_LABEL),
        role=_label(obj, ROLE_LABEL),
        terminating=bool(obj["metadata"].get("deletionTimestamp")),
    )


def _label(obj: Object, name: str) -> str:
    return str(obj["metadata"].get("labels", {}).get(name, ""))
