"""Scales worker services down, and takes graphs away, in order: drained first, deleted afterwards.

The plans are pure (`plan.drain`, `plan.deletion`); replicas are written with the workload, after this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import Role
from penstock.core.errors import ForbiddenError, NotFoundError
from penstock.core.stamps import stamp
from penstock.kube.kinds import POD
from penstock.kube.objects.names import (
    DELETION_COST_ANNOTATION,
    DRAIN_ANNOTATION,
    DRAINING,
    ROLE_LABEL,
    SERVICE_LABEL,
    SERVING,
    SERVING_LABEL,
)
from penstock.operator.apply import Applier
from penstock.operator.cluster import GraphSnapshot
from penstock.operator.loads import LoadReader
from penstock.operator.plan.deletion import Child, DeletionStep, next_step
from penstock.operator.plan.drain import Load, ScalePlan, is_idle, plan_scale
from penstock.operator.plan.pods import PodView
from penstock.operator.trim import Object
from penstock.operator.workloads import WORKLOADS, is_own, known_replicas, replicas_of

SETTLE_S: Final = 3.0
"""After its marking a pod may still get requests from routers that have not heard; real seconds, chosen."""


@dataclass(frozen=True, slots=True)
class DrainingPool:
    """One worker service as the drains see it.

    Attributes:
        service: Its name.
        desired: Replicas wanted, within bounds.
        spec_replicas: The workload's number now; the desired number while there is no workload.
        grace_s: Longest drain, seconds.
        rolling: Whether a rollout makes progress.
        pods: Its pods, as `trim_pod` leaves them.
        has_senders: Whether a router may still send its pods requests, so that a marked one has to wait until
            all have heard of it.
        known_replicas: Replicas that the workload's controller counts; more than ``pods`` shows while the
            view of pods is behind.
    """

    service: str
    desired: int
    spec_replicas: int
    grace_s: float
    rolling: bool
    pods: tuple[Object, ...]
    has_senders: bool = True
    known_replicas: int = 0

    @property
    def views(self) -> list[PodView]:
        """Return its pods as the plans read them."""
        return [each["view"] for each in self.pods]


class Drains:
    """Takes the next step of every service's scaling."""

    def __init__(self, applier: Applier, loads: LoadReader) -> None:
        self._applier = applier
        self._loads = loads

    async def loads(self, pods: Sequence[Object]) -> dict[str, Load | None]:
        """Return what each pod does, by name; None where it is unknown."""
        return await self._loads.read([(each["view"], each["ip"]) for each in pods])

    async def step(self, pool: DrainingPool, *, now_s: float) -> ScalePlan:
        """Mark and unmark pods as the plan says; return the plan, whose ``spec_replicas`` is yet to be written.

        Args:
            pool: The service.
            now_s: Seconds since the epoch.

        Raises:
            ClusterError: the API server does not answer or refused.
        """
        loads = await self._loads.read(_to_ask(pool))
        plan = _plan(pool, loads, now_s)
        patches = pod_patches(plan, now_s=now_s)
        by_name = {each["metadata"]["name"]: each for each in pool.pods}
        for name, patch in patches.items():
            view: PodView = by_name[name]["view"]
            patch["metadata"]["uid"] = view.uid
            try:
                await self._applier.patch(POD.of(by_name[name]["metadata"]), patch)
            except NotFoundError:
                continue  # it is gone already; the watch will say so
        return plan


def pod_patches(plan: ScalePlan, *, now_s: float) -> dict[str, dict[str, Any]]:
    """Return one merge patch per pod that the plan changes, victims first.

    Args:
        plan: Of one service.
        now_s: Beginning of the drains that start now, seconds since the epoch.
    """
    patches: dict[str, dict[str, Any]] = {}

    def metadata(name: str) -> dict[str, Any]:
        found: dict[str, Any] = patches.setdefault(name, {"metadata": {}})["metadata"]
        return found

    for name in plan.begin:
        metadata(name)["labels"] = {SERVING_LABEL: DRAINING}
        metadata(name)["annotations"] = {DRAIN_ANNOTATION: stamp(now_s)}
    for name in plan.restore:
        metadata(name)["labels"] = {SERVING_LABEL: SERVING}
        metadata(name)["annotations"] = {DRAIN_ANNOTATION: None}
    for name, cost in plan.deletion_costs.items():
        value = None if cost == 0 else str(cost)
        metadata(name).setdefault("annotations", {})[DELETION_COST_ANNOTATION] = value
    return patches


def _to_ask(pool: DrainingPool) -> list[tuple[PodView, str]]:
    """Return the pods whose load the plan needs: none at rest; all while victims are to be chosen."""
    able = [each for each in pool.pods if each["view"].alive and each["view"].may_hold_requests]
    alive = sum(view.alive for view in pool.views)
    if alive <= pool.desired or (pool.rolling and pool.desired < pool.spec_replicas):
        return []
    marked = [each for each in able if each["view"].draining]
    asked = marked if len(marked) >= alive - pool.desired else able
    return [(each["view"], each["ip"]) for each in asked]


def _plan(pool: DrainingPool, loads: Mapping[str, Load | None], now_s: float) -> ScalePlan:
    return plan_scale(
        pool.views,
        desired=pool.desired,
        current_spec_replicas=pool.spec_replicas,
        loads=loads,
        now_s=now_s,
        grace_s=pool.grace_s,
        settle_s=SETTLE_S if pool.has_senders else 0.0,
        status_replicas=pool.known_replicas,
        rolling=pool.rolling,
    )


def scale_message(service: str, plan: ScalePlan, desired: int) -> str | None:
    """Return what begins now, for an Event; None if nothing does."""
    if plan.begin:
        return f"{service}: {_names(plan.begin)} finish their requests before {service} shrinks to {desired}"
    if plan.restore:
        return f"{service}: {_names(plan.restore)} serve again; {desired} replicas are wanted"
    return None


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


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
            await self._applier.delete(POD.of(metadata), grace_s=IDLE_END_S)
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
