"""Facts from which a graph's status is computed: its pods, and the results of one reconcile. `status` formats them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.api import GraphDeployment, GraphSpec, Role, ServiceSpec
from penstock.core.ports import WORKER_PORT
from penstock.kube.kinds import Kind
from penstock.kube.objects.names import DRAINING, GRAPH_LABEL, SERVICE_LABEL, child_name
from penstock.kube.objects.served import ServedSpec
from penstock_operator.plan.budget import WaitingPod
from penstock_operator.plan.diagnose import Diagnosis, diagnose
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import ServiceState
from penstock_operator.resources.metadata import needed_kinds, selector
from penstock_operator.resources.pod import stated_gpu_ceiling

_SLOW_AFTER_STARTUP: float = 0.5
"""Fraction of a service's startup timeout after which its start is reported as slow. Chosen."""


class Failure(NamedTuple):
    """Reason why a graph's specification, or a part of it, cannot be applied.

    Attributes:
        reason: Condition reason such as ``MissingCRD``.
        message: Description with the remedy.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ServiceReplicas:
    """Numbers of replicas of one service.

    Attributes:
        existing: Replicas that are neither terminating nor finished, including draining ones.
        ready: Existing replicas of which every pod is ready.
        serving: Ready replicas that can get requests: workers by their serving label, routers always.
        draining: Replicas that are marked as draining, or are terminating.
        gpus: GPUs of all pods that have no scheduling gate of the budget and are not finished, including terminating
            ones.
        unplaced: Existing replicas of which a pod has no node or does not exist yet.
        gated: Existing replicas with a pod that still has the budget's scheduling gate.
    """

    existing: int
    ready: int
    serving: int
    draining: int
    gpus: int
    unplaced: int = 0
    gated: int = 0


@dataclass(frozen=True, slots=True)
class ServiceStatusInput:
    """Facts about one service for the graph's status.

    Attributes:
        role: Role of the service.
        replicas: Numbers of its replicas.
        desired: The workload's ``spec.replicas``; 0 if there is no workload.
        target: Desired replicas, limited to the allowed range.
        updated: Number of replicas of the newest revision.
        selector: Label selector of its pods.
        rolling: Whether a rollout is in progress.
        hold_reason: Reason why a necessary step waits, for example for another rollout; empty if no step waits. A desired
            number outside the bounds is not such a step; the ScalingAdapter reports it.
        refused: Problem that says why the API server rejects its pods; None if it rejects none.
        bounds: Minimum and maximum replicas that the graph allows.
    """

    role: Role
    replicas: ServiceReplicas
    desired: int
    target: int
    updated: int
    selector: str
    rolling: bool = False
    hold_reason: str = ""
    refused: Diagnosis | None = None
    bounds: tuple[int, int] = (0, 0)

    @property
    def missing(self) -> int:
        """Number of serving replicas that the service lacks: the desired number minus those that serve, at least 0."""
        return max(0, self.target - self.replicas.serving)


@dataclass(frozen=True, slots=True)
class StatusInput:
    """Facts about a graph from which its status is computed.

    Attributes:
        generation: ``metadata.generation`` that was evaluated.
        services: Facts about each service, by its name.
        budget: Maximum number of GPUs of workers; None means no limit.
        waiting: Pods that wait for the GPU budget.
        diagnoses: Problems of pods and workloads.
        failure: Reason why the specification cannot be applied; None if there is none.
        deleting: Sentence about what a deletion waits for; empty unless the graph is being deleted.
        is_woken: Whether its routers queue requests until the planner has started workers that are scaled to zero.
        paused: Reason why the operator does not change the graph's children; empty if it changes them.
        url: URL for clients; empty if the graph has no router, None if unknown.
        served_model: Model name for clients; None if unknown.
        served: Specification that the operator applies; None if there is none.
        late: Services that have had too few serving replicas for longer than their startup timeout.
    """

    generation: int
    services: Mapping[str, ServiceStatusInput]
    budget: int | None = None
    waiting: Sequence[WaitingPod] = ()
    diagnoses: Sequence[Diagnosis] = ()
    failure: Failure | None = None
    deleting: str = ""
    is_woken: bool = False
    paused: str = ""
    url: str | None = None
    served_model: str | None = None
    served: ServedSpec | None = None
    late: Collection[str] = ()

    @property
    def lacking_replicas(self) -> frozenset[str]:
        """Names of the services that have fewer serving replicas than the number desired."""
        return frozenset(name for name, each in self.services.items() if each.missing)

    @property
    def gpus(self) -> int:
        """Number of GPUs that the graph's workers occupy, terminating ones included."""
        return sum(each.replicas.gpus for each in self.services.values() if each.role.is_worker)


def missing_definition(spec: GraphSpec, served: Collection[Kind]) -> Failure | None:
    """Return a failure that names the first kind that the graph needs and the cluster does not serve, and where to get it; else None.

    Args:
        spec: Specification of the graph.
        served: Optional kinds that the cluster serves.
    """
    missing = (message for kind, message in needed_kinds(spec).items() if kind not in served)
    return next((Failure("MissingCRD", message) for message in missing), None)


def worst_failure(found: Iterable[Failure | None]) -> Failure | None:
    """Return several failures as one: the reason of the first, which must be the most serious, and all messages; None without failures."""
    present = [each for each in found if each is not None]
    return Failure(present[0].reason, "; ".join(each.message for each in present)) if present else None


def status_input(
    graph: GraphDeployment,
    generation: int,
    pods: Iterable[PodView],
    services: Mapping[str, ServiceState],
    *,
    budget: int | None,
    waiting: Sequence[WaitingPod] = (),
    now_s: float,
) -> StatusInput:
    """Return the facts from which the status of a valid graph is computed: replicas of each service, GPUs, and problems of pods.

    Args:
        graph: The specification that the operator applies.
        generation: ``metadata.generation`` of the newest specification.
        pods: All pods of the graph.
        services: Planned state of each service.
        budget: Maximum number of GPUs that its workers can have; None means no limit.
        waiting: Pods that wait for the GPU budget.
        now_s: Current Unix time in seconds.
    """
    by_service: dict[str, list[PodView]] = {name: [] for name in graph.spec.services}
    for pod in pods:
        by_service.setdefault(pod.service, []).append(pod)
    reasons = {each.uid: each.reason for each in waiting}
    states = sorted(services.items())
    found_services = {
        **_removed_services(by_service, services),
        **{name: _service(graph, name, by_service[name], each) for name, each in services.items()},
    }
    diagnoses = [each.refused for _, each in states if each.refused is not None]
    for service, views in by_service.items():
        spec = graph.spec.services.get(service)
        slow_s = 300.0 if spec is None else max(30.0, spec.startup_timeout_seconds * _SLOW_AFTER_STARTUP)
        for view in views:
            if view.finished and not _may_explain_shortage(
                view, found_services.get(service), spec, now_s=now_s
            ):
                continue
            reason = reasons.get(view.uid, "")
            found = diagnose(view, now_s=now_s, budget_reason=reason, slow_start_s=slow_s)
            if found is not None:
                diagnoses.append(found)
    router, namespace = graph.spec.service(Role.ROUTER), graph.metadata.namespace
    url = (
        "" if router is None else f"http://{child_name(graph.name, router[0])}.{namespace}.svc:{WORKER_PORT}"
    )
    return StatusInput(
        generation=generation,
        services=found_services,
        budget=budget,
        waiting=waiting,
        diagnoses=diagnoses,
        is_woken=graph.spec.planner.enabled and graph.spec.planner.scale_to_zero_after_seconds is not None,
        url=url,
        served_model=graph.spec.served_name,
    )


def _removed_services(
    by_service: Mapping[str, Sequence[PodView]], wanted: Collection[str]
) -> dict[str, ServiceStatusInput]:
    """Return facts about services that are no longer desired but still have pods."""
    found = {}
    for name, pods in sorted(by_service.items()):
        members = [each for each in pods if each.role in set(Role) and not each.finished]
        if not name or name in wanted or not members:
            continue
        replicas = count_replicas(members)
        found[name] = ServiceStatusInput(
            role=Role(members[0].role),
            replicas=replicas,
            desired=replicas.existing,
            target=0,
            updated=0,
            selector=f"{GRAPH_LABEL}={members[0].graph},{SERVICE_LABEL}={name}",
        )
    return found


def _may_explain_shortage(
    pod: PodView, service: ServiceStatusInput | None, spec: ServiceSpec | None, *, now_s: float
) -> bool:
    """Return whether a finished pod may be the reason why its service has too few replicas: its replacement could still be starting.

    Kubernetes keeps thousands of failed pods, so a pod that was evicted long ago must not be reported.
    """
    if service is None or spec is None or not service.missing:
        return False
    return now_s - pod.ended_s < spec.startup_timeout_seconds


def late_services(graph: GraphDeployment, since: Mapping[str, float], *, now_s: float) -> frozenset[str]:
    """Return the services that have had too few serving replicas for longer than their startup timeout.

    Args:
        graph: The graph, for the startup timeout of each service.
        since: Unix time in seconds since when a service has had too few serving replicas, by its name; other services
            are absent.
        now_s: Current Unix time in seconds.
    """
    services = graph.spec.services
    return frozenset(
        name for name, at_s in since.items() if now_s - at_s > services[name].startup_timeout_seconds
    )


def _service(
    graph: GraphDeployment, name: str, pods: Sequence[PodView], state: ServiceState
) -> ServiceStatusInput:
    rollout, plan = state.rollout, state.plan
    return ServiceStatusInput(
        role=state.spec.role,
        replicas=count_replicas(pods),
        desired=state.running,
        target=state.bounds.replicas,
        updated=0 if rollout is None else rollout.updated,
        selector=",".join(f"{key}={value}" for key, value in sorted(selector(graph, name).items())),
        rolling=rollout is not None and rollout.rolling,
        hold_reason=state.hold_reason or (plan.hold_reason if plan is not None else ""),
        refused=state.refused,
        bounds=state.spec.replica_bounds,
    )


def observed_status_input(
    raw: Mapping[str, Any], pods: Iterable[PodView], *, failure: Failure | None = None, deleting: str = ""
) -> StatusInput:
    """Return the facts from which the status of an invalid or deleted graph is computed, derived from its pods alone.

    The services are those named in the labels of the graph's pods, and the target of each service is the number of its
    existing replicas. Pods without a service name or with an unknown role are ignored. The number of updated replicas
    is unknown and reported as 0.

    Args:
        raw: The GraphDeployment as the API server returned it.
        pods: All pods of the graph.
        failure: Reason why its specification cannot be applied; None if there is none.
        deleting: Sentence about what its deletion waits for; empty if it is not being deleted.
    """
    by_service: dict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        by_service[pod.service].append(pod)
    found = {
        name: replace(each, target=each.replicas.existing)
        for name, each in _removed_services(by_service, ()).items()
    }
    return StatusInput(
        generation=raw["metadata"].get("generation", 0),
        services=found,
        budget=stated_gpu_ceiling(raw),
        failure=failure,
        deleting=deleting,
    )


def count_replicas(pods: Iterable[PodView]) -> ServiceReplicas:
    """Return the numbers of replicas that the pods of one service form; a LeaderWorkerSet group is one replica."""
    present = [pod for pod in pods if not pod.finished]
    replicas: dict[str, list[PodView]] = defaultdict(list)
    for pod in present:
        if not pod.terminating:
            replicas[f"group {pod.group}" if pod.group else f"pod {pod.name}"].append(pod)
    terminating = [pod for pod in present if pod.terminating and pod.worker_index == 0]
    ready = [pods for pods in replicas.values() if _is_ready(pods)]
    return ServiceReplicas(
        existing=len(replicas),
        ready=len(ready),
        serving=sum(any(pod.takes_requests for pod in pods) for pods in ready),
        draining=len(terminating) + sum(_is_marked(pods) for pods in replicas.values()),
        gpus=sum(pod.gpus for pod in present if not pod.gated),
        unplaced=sum(not _is_placed(pods) for pods in replicas.values()),
        gated=sum(any(pod.gated for pod in pods) for pods in replicas.values()),
    )


def _is_ready(pods: Sequence[PodView]) -> bool:
    return all(pod.ready for pod in pods) and _is_complete(pods)


def _is_placed(pods: Sequence[PodView]) -> bool:
    return all(pod.bound or pod.ready for pod in pods) and _is_complete(pods)


def _is_complete(pods: Sequence[PodView]) -> bool:
    return len(pods) >= max(pod.group_size for pod in pods)


def _is_marked(pods: Sequence[PodView]) -> bool:
    return any(pod.serving == DRAINING for pod in pods)
