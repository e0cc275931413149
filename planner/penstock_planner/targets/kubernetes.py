"""The planner's backend on Kubernetes. It reads pods and the GPU pool's grant from watches, and writes ScalingAdapters' /scale.

It creates and deletes nothing. The operator creates and drains pods to match the desired numbers, within the GPU budget. Reads use the
informers' copies; only changes are calls of the API server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.api import GraphDeployment, Role
from penstock.core.errors import ClusterError, ConflictError, NotFoundError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage
from penstock.kube.kinds import SCALING_ADAPTER
from penstock.kube.objects.names import DECISION_ANNOTATION, OPERATOR, PLANNER, child_name
from penstock_planner.targets.base import TargetState
from penstock_planner.targets.pods import PodFacts, count, with_switching

if TYPE_CHECKING:
    from penstock_planner.cluster.watch import GraphWatch

UNSCHEDULABLE_S: Final = 15.0
"""Default real seconds (15) after which an unschedulable pod counts as failed.

A cluster that adds nodes on demand needs more, by an option."""

STUCK_S: Final = 60.0
"""Real seconds (60) after which a pod whose containers cannot start counts as failed.

Chosen: longer than a registry's hiccup or two crashes."""

GATED_S: Final = 60.0
"""Real seconds (60) after which a pod that waits for the GPU budget counts as failed, if no other pod is terminating or draining.

Chosen: the operator acts within seconds.
"""

ATTEMPTS: Final = 4
"""Maximum number of tries of one write (4) while other clients change other fields of the ScalingAdapter.

Chosen: few clients write the adapter's status."""

OWN_MANAGERS: Final = frozenset({PLANNER, OPERATOR, f"{OPERATOR}-init", ""})
"""Field managers (writers named in managedFields) whose writes of the number of replicas are not edits by another
client."""

Object = Mapping[str, Any]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScaledService:
    """Scaling settings of one worker service of a graph.

    Attributes:
        name: Name of the service.
        gpus: GPUs per replica.
        replicas: Initial number of replicas; for a service without a ScalingAdapter, the permanent one.
        bounds: Minimum and maximum number of replicas.
        is_scalable: Whether the service has a ``scaling`` section, and so a ScalingAdapter.
        is_external: Whether a client other than the planner sets its number of replicas.
    """

    name: str
    gpus: int
    replicas: int
    bounds: tuple[int, int]
    is_scalable: bool
    is_external: bool

    def clamp(self, replicas: int) -> int:
        """Return the number of replicas limited to the service's minimum and maximum, as the operator does."""
        low, high = self.bounds
        return max(low, min(high, replicas))


def services_of(graph: GraphDeployment) -> dict[Role, ScaledService]:
    """Return the scaling settings of a graph's worker services, by role."""
    return {
        spec.role: ScaledService(
            name,
            spec.gpus,
            spec.first_replicas,
            spec.replica_bounds,
            spec.scaling is not None,
            spec.is_external,
        )
        for name, spec in graph.spec.workers.items()
    }


class KubernetesTarget:
    """Backend on Kubernetes for one GraphDeployment.

    It counts the watched pods of the graph, and scales by writing the /scale subresource of ScalingAdapters.
    """

    def __init__(
        self,
        client: KubeClient,
        graph: GraphDeployment,
        view: GraphWatch,
        *,
        emit: Callable[[EventMessage], None] = lambda _message: None,
        unschedulable_s: float = UNSCHEDULABLE_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a target.

        Args:
            client: Kubernetes client.
            graph: The graph.
            view: Watched objects of the graph.
            emit: Function that queues an Event about the graph.
            unschedulable_s: Real seconds after which an unschedulable pod counts as failed.
            now_s: Monotonic clock, real seconds.
        """
        self._client = client
        self._graph = graph.name
        self._namespace = graph.metadata.namespace
        self._services = services_of(graph)
        self._switches_roles = graph.spec.engine.switchable
        self._view = view
        self._emit = emit
        self._patience_s = {"unschedulable": unschedulable_s, "stuck": STUCK_S, "gated": GATED_S}
        self._now_s = now_s
        self._written: dict[str, Object] = {}
        self._desired_by_role: dict[Role, int] = {}
        self._served: set[str] = set()
        self._trouble: dict[str, tuple[str, float]] = {}
        self._refused_since_s: dict[Role, float] = {}

    async def observe(self) -> TargetState:
        """Return the state of the graph's workers from the watched copies of cluster objects.

        Raises:
            ClusterError: these copies may be outdated, because a watch does not work.
        """
        if (problem := self._view.problem()) is not None:
            raise ClusterError(f"the cluster cannot be watched: {problem}")
        pods = list(self._view.pods().values())
        self._served = {pod.uid for pod in pods if pod.ready or pod.uid in self._served}
        failing, refused = self._failing(pods), self._refused()
        edited, pools = set(), {}
        for role, service in self._services.items():
            desired, is_edited = self._desired(role, service)
            if is_edited:
                edited.add(role)
            pools[role] = count(
                role,
                [pod for pod in pods if pod.role is role],
                desired=desired,
                gpus=service.gpus,
                served=self._served,
                failing=failing,
                refused=refused.get(role, ""),
            )
        counts = {role: pool.counts for role, pool in pools.items()}
        return TargetState(
            pools=with_switching(counts, pods) if self._switches_roles else counts,
            # Changes by another autoscaler do not delay decisions about the other roles.
            is_adjusting=any(
                pool.is_adjusting for role, pool in pools.items() if not self._services[role].is_external
            ),
            endpoints=tuple(each for pool in pools.values() for each in pool.endpoints),
            edited=frozenset(edited),
            writers={
                role: adapter["owner"]
                for role, service in self._services.items()
                if (adapter := self._adapter(service)) and adapter.get("owner")
            },
            failures={role: pool.failed[-1] for role, pool in pools.items() if pool.failed},
            grant=self._view.grant(),
            grant_note=self._view.grant_note(),
            guaranteed=self._view.guaranteed(),
        )

    async def scale(self, role: Role, replicas: int, *, decision_id: str) -> None:
        """Write the number of replicas, limited to the service's bounds, to the ScalingAdapter of the role's service.

        Returns when it is written, before replicas start or stop.

        Args:
            role: Role to scale.
            replicas: Desired number of replicas.
            decision_id: Id of the planner's decision, for logs and events.

        Raises:
            ConflictError: the number in the adapter differs from the last one that was observed. A change of another
                field is not a conflict.
            ClusterError: the API server refused the write, failed or did not answer.
        """
        service = self._services.get(role)
        if service is None:
            raise ClusterError(f"{self._graph}: has no {role} service to scale")
        try:
            await self._scale(role, service, service.clamp(replicas), decision_id)
        except ClusterError as exc:
            self._emit(
                EventMessage(
                    "ScalingFailed",
                    f"{role.value} to {replicas}: {exc}",
                    is_warning=True,
                    detail=decision_id,
                )
            )
            raise

    async def switch(
        self, giver: Role, taker: Role, *, replicas: Mapping[Role, int], decision_id: str
    ) -> None:
        """Have workers of the role ``giver`` become workers of the role ``taker``.

        This method writes the numbers of replicas of both roles to their ScalingAdapters. The operator then lets
        draining workers replace the pods that wait for GPUs. The number of ``taker`` is written first, so that a new
        pod of ``taker`` already waits for GPUs when a worker of ``giver`` becomes idle. If the second write fails, that
        pod continues to wait, because it exceeds the GPU budget, and the planner decides again.

        Args:
            giver: Role that loses workers.
            taker: Role that gains the workers.
            replicas: Desired number of replicas of both roles, by role.
            decision_id: Id of the planner's decision, for logs and events.
        """
        await self.scale(taker, replicas[taker], decision_id=decision_id)
        await self.scale(giver, replicas[giver], decision_id=decision_id)

    async def _scale(self, role: Role, service: ScaledService, wanted: int, decision_id: str) -> None:
        adapter = self._adapter(service)
        if adapter is None:
            if wanted == service.replicas and not service.is_scalable:
                return
            raise NotFoundError(
                f"{child_name(self._graph, service.name)}: no such ScalingAdapter; it comes with "
                f"spec.services.{service.name}.scaling and a running operator"
            )
        if adapter["spec"]["replicas"] != wanted:
            adapter = await self._set(service, adapter, wanted)
            log.info("pool scaled", role=role.value, replicas=wanted, decision_id=decision_id)
        self._desired_by_role[role] = wanted
        await self._annotate(service, adapter, decision_id)

    async def _set(self, service: ScaledService, adapter: Object, wanted: int) -> Object:
        """Write the number of replicas, unless another client has changed it."""
        known = adapter["spec"]["replicas"]
        name = adapter["metadata"]["name"]
        for attempt in range(1, ATTEMPTS + 1):
            version = adapter["metadata"]["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": wanted}}
            try:
                scale = await self._client.patch(
                    SCALING_ADAPTER,
                    name,
                    patch,
                    namespace=self._namespace,
                    subresource="scale",
                    field_manager=PLANNER,
                )
            except ConflictError:
                adapter = await self._client.get(SCALING_ADAPTER, name, namespace=self._namespace)
                now = adapter["spec"]["replicas"]
                if now == wanted:
                    return self._remember(service, adapter)
                if now != known or attempt == ATTEMPTS:
                    raise ConflictError(
                        f"{name}: replicas are {now}, not {known} as expected; observing and deciding again"
                    ) from None
                continue
            metadata = {
                **adapter["metadata"],
                "resourceVersion": scale["metadata"]["resourceVersion"],
                "generation": adapter["metadata"].get("generation", 0) + 1,
            }
            spec = {**adapter["spec"], "replicas": wanted}
            written = {**adapter, "metadata": metadata, "spec": spec, "owner": PLANNER}
            return self._remember(service, written)
        raise AssertionError("the loop returns or raises")

    async def _annotate(self, service: ScaledService, adapter: Object, decision_id: str) -> None:
        """Write the decision's id to an annotation of the adapter. An error is logged and does not undo the scaling."""
        metadata = adapter["metadata"]
        if (metadata.get("annotations") or {}).get(DECISION_ANNOTATION) == decision_id:
            return
        patch = {"metadata": {"annotations": {DECISION_ANNOTATION: decision_id}}}
        try:
            answer = await self._client.patch(
                SCALING_ADAPTER, metadata["name"], patch, namespace=self._namespace, field_manager=PLANNER
            )
        except ClusterError as exc:
            log.warning("decision not noted on its adapter", decision_id=decision_id, error=str(exc))
            return
        self._remember(service, answer)

    def _remember(self, service: ScaledService, adapter: Object) -> Object:
        self._written[service.name] = adapter
        return adapter

    def _adapter(self, service: ScaledService) -> Object | None:
        """Return the adapter from the informer or, while the informer is behind, the one that this target wrote last."""
        seen, written = self._view.adapter(service.name), self._written.get(service.name)
        if seen is None:
            self._written.pop(service.name, None)
            return None
        if written is None or seen["metadata"].get("uid") != written["metadata"].get("uid"):
            return seen
        if seen["metadata"].get("generation", 0) >= written["metadata"].get("generation", 0):
            del self._written[service.name]
            return seen
        return written

    def _desired(self, role: Role, service: ScaledService) -> tuple[int, bool]:
        """Return the desired replicas, and whether another client has set them since the last read."""
        adapter = self._adapter(service)
        if adapter is None:
            self._desired_by_role.pop(role, None)
            return service.clamp(service.replicas), False
        desired = adapter["spec"]["replicas"]
        before, self._desired_by_role[role] = self._desired_by_role.get(role), desired
        if service.is_external or before == desired:
            return service.clamp(desired), False
        if before is None:
            return service.clamp(desired), adapter.get("owner", "") not in OWN_MANAGERS
        by = adapter.get("owner") or "an unknown writer"
        log.info("replicas set by another writer", role=role.value, before=before, after=desired, by=by)
        self._emit(_edited(role, by, f"{before} -> {desired}"))
        return service.clamp(desired), True

    def _refused(self) -> dict[Role, str]:
        """Return the reason for each role whose missing pods the API server has refused for longer than the timeout."""
        now_s = self._now_s()
        found = {}
        for role, service in self._services.items():
            adapter = self._view.adapter(service.name)
            if adapter is not None and (why := adapter.get("refused")):
                found[role] = str(why)
        self._refused_since_s = {role: self._refused_since_s.get(role, now_s) for role in found}
        patience_s = self._patience_s["unschedulable"]
        return {role: why for role, why in found.items() if now_s - self._refused_since_s[role] > patience_s}

    def _failing(self, pods: list[PodFacts]) -> dict[str, str]:
        """Return the reason for each pod (by uid) that has had its problem for longer than the timeout.

        Times are measured by this process's clock from when it first saw the problem, so no clocks of two hosts are compared.
        """
        now_s = self._now_s()
        is_leaving = any(pod.leaving and not pod.finished for pod in pods)
        trouble: dict[str, tuple[str, float]] = {}
        failing = {}
        for pod in pods:
            if not pod.trouble or pod.ready or pod.leaving or pod.finished:
                continue
            if pod.was_ready or pod.uid in self._served:
                continue
            kind, since_s = self._trouble.get(pod.uid, ("", now_s))
            if kind != pod.trouble or (kind == "gated" and is_leaving):
                since_s = now_s
            trouble[pod.uid] = (pod.trouble, since_s)
            if now_s - since_s > self._patience_s[pod.trouble]:
                failing[pod.uid] = f"pod {pod.name}: {pod.message}"
        self._trouble = trouble
        return failing


def _edited(role: Role, by: str, change: str) -> EventMessage:
    """Return the Event about a number of replicas set by another client; its text is the same for all edits by that client."""
    if by == PLANNER:
        text = (
            f"another planner scales {role.value}: two installations with the same operatorClass "
            "watch this namespace; give one another class or namespace, see penstock doctor"
        )
        return EventMessage("SecondPlanner", text, is_warning=True, detail=change)
    text = (
        f"{role.value} was set by {by}: the planner keeps this value for one adjustment interval "
        "(longer if it is written again) and then plans from it; set scaling.managedBy: external to "
        "leave the role to that writer"
    )
    return EventMessage("ReplicasEdited", text, detail=change)
