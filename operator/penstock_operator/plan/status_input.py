"""What a graph's status is computed from: its pods, and what one reconcile found. `status` writes it down. Pure."""

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
from penstock_operator.plan.budget import Waiting
from penstock_operator.plan.diagnose import Diagnosis, diagnose
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import ServiceState
from penstock_operator.resources.metadata import needed_kinds, selector
from penstock_operator.resources.pod import stated_gpu_ceiling

_SLOW_AFTER_STARTUP: float = 0.5
"""Part of a service's startup timeout after which its start is reported as slow. Chosen."""


class Failure(NamedTuple):
    """What of a graph cannot be done: one word such as ``MissingCRD``, and what to do about it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ServiceReplicas:
    """Replicas of one service.

    Attributes:
        existing: Replicas that neither terminate nor are finished, draining ones included.
        ready: Of those, replicas whose every pod is ready.
        serving: The ready ones that may get requests: workers by their serving label, routers always.
        draining: Replicas that are marked to leave or terminate already.
        gpus: GPUs of all pods that hold some: released and not finished, terminating ones included.
        unplaced: Of the existing, replicas of which a pod has no node or is yet to be made.
        gated: Of the existing, replicas with a pod that the budget's gate holds.
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
    """What the status says of one service.

    Attributes:
        desired: The workload's ``spec.replicas``; 0 while there is no workload.
        target: Replicas wanted, the desired number within its bounds.
        updated: Replicas of the newest revision.
        held: Why a step that is due waits, for example for another rollout; empty: none does. A desired number beyond
            its bounds is not such a step: it is settled, and its ScalingAdapter says so.
        refused: Why the API server refuses its pods; None: it refuses none.
        bounds: Fewest and most replicas that the graph allows.
    """

    role: Role
    replicas: ServiceReplicas
    desired: int
    target: int
    updated: int
    selector: str
    rolling: bool = False
    held: str = ""
    refused: Diagnosis | None = None
    bounds: tuple[int, int] = (0, 0)

    @property
    def missing(self) -> int:
        """Wanted replicas that do not serve."""
        return max(0, self.target - self.replicas.serving)


@dataclass(frozen=True, slots=True)
class StatusInput:
    """What the status says of a graph.

    Attributes:
        generation: ``metadata.generation`` that was acted on.
        budget: Most GPUs of workers; None: no ceiling.
        deleting: What a deletion waits for; empty unless the graph is being deleted.
        is_woken: Whether its routers hold requests until the planner has brought workers back from zero.
        paused: What keeps its children as they are; empty: nothing.
        url: Where clients reach it; empty: nowhere; None: unknown.
        served_model: Name that clients ask for; None: unknown.
        served: The edit that is carried out; None: none is.
        late: Services of which fewer replicas serve than wanted for longer than a start may take.
    """

    generation: int
    services: Mapping[str, ServiceStatusInput]
    budget: int | None = None
    waiting: Sequence[Waiting] = ()
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
    def short(self) -> frozenset[str]:
        """Services of which fewer replicas serve than wanted."""
        return frozenset(name for name, each in self.services.items() if each.missing)

    @property
    def gpus(self) -> int:
        """GPUs that workers hold."""
        return sum(each.replicas.gpus for each in self.services.values() if each.role.is_worker)


def missing_definition(spec: GraphSpec, served: Collection[Kind]) -> Failure | None:
    """Return the first needed kind that the cluster does not serve, and its source; None if it serves all."""
    missing = (message for kind, message in needed_kinds(spec).items() if kind not in served)
    return next((Failure("MissingCRD", message) for message in missing), None)


def worst_failure(found: Iterable[Failure | None]) -> Failure | None:
    """Return failures, gravest first, as one: its reason, and every message; None: there are none."""
    kept = [each for each in found if each is not None]
    return Failure(kept[0].reason, "; ".join(each.message for each in kept)) if kept else None


def status_input(
    graph: GraphDeployment,
    generation: int,
    pods: Iterable[PodView],
    services: Mapping[str, ServiceState],
    *,
    budget: int | None,
    waiting: Sequence[Waiting] = (),
    now_s: float,
) -> StatusInput:
    """Return what the status of a valid graph says.

    Args:
        graph: The edit that is carried out.
        generation: ``metadata.generation`` of the newest edit.
        pods: All its pods.
        services: What each service is to have.
        budget: Most GPUs that its workers may want; None: no ceiling.
        waiting: Pods that the budget holds back.
        now_s: Seconds since the epoch.
    """
    by_service: dict[str, list[PodView]] = {name: [] for name in graph.spec.services}
    for pod in pods:
        by_service.setdefault(pod.service, []).append(pod)
    reasons = {each.uid: each.reason for each in waiting}
    states = sorted(services.items())
    found_services = {
        **_leaving_services(by_service, services),
        **{name: _service(graph, name, by_service[name], each) for name, each in services.items()},
    }
    diagnoses = [each.refused for _, each in states if each.refused is not None]
    for service, views in by_service.items():
        spec = graph.spec.services.get(service)
        slow_s = 300.0 if spec is None else max(30.0, spec.startup_timeout_seconds * _SLOW_AFTER_STARTUP)
        for view in views:
            if view.finished and not _is_missed(view, found_services.get(service), spec, now_s=now_s):
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


def _leaving_services(
    by_service: Mapping[str, Sequence[PodView]], wanted: Collection[str]
) -> dict[str, ServiceStatusInput]:
    """Return the services that are wanted no more and of which pods exist, by their pods."""
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


def _is_missed(
    pod: PodView, service: ServiceStatusInput | None, spec: ServiceSpec | None, *, now_s: float
) -> bool:
    """Return whether a finished pod may be why its service is short: its replacement would still start.

    Kubernetes keeps failed pods until there are thousands of them, so one that was evicted long ago says nothing.
    """
    if service is None or spec is None or not service.missing:
        return False
    return now_s - pod.ended_s < spec.startup_timeout_seconds


def late_services(graph: GraphDeployment, since: Mapping[str, float], *, now_s: float) -> frozenset[str]:
    """Return the services that have been short of replicas, ``since`` when by their names, for longer than a start takes."""
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
        held=state.held or (plan.held if plan is not None else ""),
        refused=state.refused,
        bounds=state.spec.replica_bounds,
    )


def observed_status_input(
    raw: Mapping[str, Any], pods: Iterable[PodView], *, failure: Failure | None = None, deleting: str = ""
) -> StatusInput:
    """Return what the status of an invalid or deleted graph says: its services are those of its pods, wanted as they are.

    Pods without a service's name or with an unknown role belong to none. How many replicas are of the newest
    revision is not known then; 0 is reported.
    """
    by_service: dict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        by_service[pod.service].append(pod)
    found = {
        name: replace(each, target=each.replicas.existing)
        for name, each in _leaving_services(by_service, ()).items()
    }
    return StatusInput(
        generation=raw["metadata"].get("generation", 0),
        services=found,
        budget=stated_gpu_ceiling(raw),
        failure=failure,
        deleting=deleting,
    )


def count_replicas(pods: Iterable[PodView]) -> ServiceReplicas:
    """Return the replicas that ``pods`` of one service make; a LeaderWorkerSet group is one."""
    present = [pod for pod in pods if not pod.finished]
    replicas: dict[str, list[PodView]] = defaultdict(list)
    for pod in present:
        if not pod.terminating:
            replicas[f"group {pod.group}" if pod.group else f"pod {pod.name}"].append(pod)
    leaving = [pod for pod in present if pod.terminating and pod.worker_index == 0]
    ready = [pods for pods in replicas.values() if _is_ready(pods)]
    return ServiceReplicas(
        existing=len(replicas),
        ready=len(ready),
        serving=sum(any(pod.takes_requests for pod in pods) for pods in ready),
        draining=len(leaving) + sum(_is_marked(pods) for pods in replicas.values()),
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
