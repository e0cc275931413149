"""Takes a graph, or a workload that it no longer wants, away in order: drained first, deleted afterwards.

The order is `penstock_operator.plan.deletion`'s, pure; this module carries out its steps.
"""

from __future__ import annotations

from penstock_graph.cluster_names import ROLE_LABEL, SERVICE_LABEL
from penstock_operator.apply import Applier
from penstock_operator.cluster import Sight
from penstock_operator.draining import Drains, Pool
from penstock_operator.plan.deletion import Child, DeletionStep, next_step
from penstock_operator.trim import Object
from penstock_operator.workloads import WORKLOADS, is_own, known_replicas, replicas_of


class Deletion:
    """Drains and deletes children; every step may be taken again."""

    def __init__(self, applier: Applier, drains: Drains) -> None:
        self._applier = applier
        self._drains = drains

    async def step(self, raw: Object, sight: Sight, *, now_s: float) -> DeletionStep:
        """Take the next step of a graph's deletion and return it; the finalizer is the caller's.

        Args:
            raw: The graph.
            sight: What is there of it.
            now_s: Seconds since the epoch.

        Raises:
            ClusterError: the API server does not answer or refused.
        """
        uid = raw["metadata"]["uid"]
        own = {key: each for key, each in sight.children.items() if is_own(each, uid)}
        step = next_step([_child(each) for each in own.values()], sight.views())
        for (kind, _), child in sorted(own.items()):
            if kind in WORKLOADS and _label(child, SERVICE_LABEL) in step.drain:
                await self._drain(child, sight, now_s)
        for gone in step.delete:
            await self._applier.delete(own[gone.kind, gone.name])
        return step

    async def retire(self, workload: Object, sight: Sight, *, now_s: float) -> None:
        """Take the next step of removing one workload: drain its pods, then delete it.

        Args:
            workload: A worker's or router's workload.
            sight: What is there of the graph.
            now_s: Seconds since the epoch.

        Raises:
            ClusterError: the API server does not answer or refused.
        """
        if workload["metadata"].get("deletionTimestamp"):
            return
        is_router = _label(workload, ROLE_LABEL) == "router"
        pods = _pods_of(workload, sight)
        if is_router or not any(each["view"].alive for each in pods):
            await self._applier.delete(workload)
        else:
            await self._drain(workload, sight, now_s)

    async def _drain(self, workload: Object, sight: Sight, now_s: float) -> None:
        pods = _pods_of(workload, sight)
        number = replicas_of(workload) or 0
        pool = Pool(
            service=_label(workload, SERVICE_LABEL),
            wish=0,
            spec_replicas=number,
            grace_s=max((each["view"].grace_s for each in pods), default=0.0),
            rolling=False,
            pods=pods,
            known_replicas=known_replicas(workload),
        )
        plan = await self._drains.step(pool, now_s=now_s)
        if plan.spec_replicas != number:
            await self._applier.patch(workload, {"spec": {"replicas": plan.spec_replicas}})


def _pods_of(workload: Object, sight: Sight) -> tuple[Object, ...]:
    """Return the pods of a workload; a Deployment and a set of the same service are told apart by groups."""
    service = _label(workload, SERVICE_LABEL)
    is_set = workload["kind"] == "LeaderWorkerSet"
    return tuple(
        each
        for each in sight.pods.values()
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
