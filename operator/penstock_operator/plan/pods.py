"""View of a pod, parsed once from the API object, with everything from which the functions in `plan` decide.

Pure. It tolerates missing fields, because a pod may be seen immediately after its creation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.api import Role
from penstock.core.stamps import seconds
from penstock.core.worker_metrics import METRICS_PATH
from penstock.kube.objects.names import (
    BUDGET_GATE,
    DELETION_COST_ANNOTATION,
    DRAIN_ANNOTATION,
    DRAINING,
    FINISHED_PHASES,
    GPUS_ANNOTATION,
    GRAPH_LABEL,
    GROUP_KEY_LABEL,
    METRICS_PATH_ANNOTATION,
    ROLE_LABEL,
    SERVICE_LABEL,
    SERVING,
    SERVING_LABEL,
    WORKER_INDEX_LABEL,
    scheme_of,
)
from penstock_operator.resources.accelerators import is_accelerator

GROUP_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-index"
GROUP_SIZE_ANNOTATION: Final = "leaderworkerset.sigs.k8s.io/size"
"""LeaderWorkerSet's own annotation with the number of pods in a group. ``GROUP_INDEX_LABEL`` has the ordinal of the
group in its set."""


@dataclass(frozen=True, slots=True)
class Exit:
    """Result of a container's process that has ended.

    Attributes:
        code: Exit code.
        reason: The kubelet's reason, such as ``OOMKilled``.
        message: Termination message, the container's last output.
        at_s: Unix time in seconds at which it ended; None if unknown.
    """

    code: int
    reason: str = ""
    message: str = ""
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container of a pod as the kubelet reports it.

    Attributes:
        name: Name of the container.
        image: Image of the container.
        init: Whether it is an init container.
        ready: Whether the kubelet reports it as ready.
        started: Whether its process runs and has passed its startup probe (or has none).
        running_since_s: Unix time in seconds at which its process started; None if it does not run.
        waiting_reason: Reason why it does not run, for example ``ImagePullBackOff``; else empty.
        waiting_message: The kubelet's message for that reason; else empty.
        last_exit: Result of its process that ended last; None if none has ended.
    """

    name: str
    image: str = ""
    init: bool = False
    ready: bool = False
    started: bool = False
    running_since_s: float | None = None
    waiting_reason: str = ""
    waiting_message: str = ""
    last_exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class PodCondition:
    """A condition of a pod, with the fields of the Kubernetes API.

    Attributes:
        type: Type, such as ``Ready``.
        status: ``True``, ``False`` or ``Unknown``.
        reason: CamelCase reason; empty if absent.
        message: Message for users; empty if absent.
        since_s: Unix time in seconds of the last transition; None if unknown.
    """

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """The facts about a pod from which the functions in `plan` decide. Times are Unix times in seconds; absent texts are empty.

    Attributes:
        name: Name of the pod.
        namespace: Namespace of the pod.
        uid: UID; a name can be reused, a UID cannot.
        graph: Name of its graph.
        service: Name of its service in the graph.
        role: Role of its service: router, prefill, decode or aggregated.
        gpus: Number of GPUs that it counts against the budget.
        gates: Names of the scheduling gates that it still has, in order; a pod is scheduled when it has none left.
        node: Node that it is bound to; empty if it is not scheduled.
        ip: IP address of the pod.
        phase: Phase in the pod's status, such as ``Running``.
        ready: Whether its condition Ready is True.
        terminating: Whether it has a deletion timestamp.
        serving: Value of its label ``penstock.dev/serving``: ``true`` while it gets requests, ``draining`` while it
            finishes its requests and gets no new ones; the Service of a worker selects pods with ``true``. Empty if
            absent.
        metrics_path: HTTP path of its metrics.
        scheme: Scheme of its HTTP endpoints: http or https.
        drain_since_s: Time at which its drain began; None if it does not drain.
        deletion_cost: Its pod-deletion-cost; 0 if it is absent or not a number.
        created_s: Time at which it was created.
        deleted_s: Time at which its termination grace period ends; None unless it is terminating.
        started_s: Time at which the kubelet first saw it; None before that.
        grace_s: Its termination grace period in seconds.
        reason: Reason in the pod's status, such as ``Evicted``.
        message: Message in the pod's status.
        containers: Its containers, init containers first.
        conditions: Its conditions.
        needs: Kind and name of each object that its volumes are read from, such as ``Secret keys``; sorted, without
            optional ones.
        group: Key of its LeaderWorkerSet group; empty for a pod of a Deployment.
        group_index: Ordinal of its group; None for a pod of a Deployment.
        worker_index: Ordinal within its group; 0 is the leader, and the value for a pod of a Deployment.
        group_size: Number of pods in a group; 1 for a pod of a Deployment.
        node_is_deleted: Whether its node no longer exists; Kubernetes deletes the pod about 40 s later.
        node_is_cordoned: Whether its node accepts no new pods; a drain of the node probably follows.
    """

    name: str
    namespace: str = ""
    uid: str = ""
    graph: str = ""
    service: str = ""
    role: str = ""
    gpus: int = 0
    gates: tuple[str, ...] = ()
    node: str = ""
    ip: str = ""
    phase: str = "Pending"
    ready: bool = False
    terminating: bool = False
    serving: str = ""
    metrics_path: str = METRICS_PATH
    scheme: str = "http"
    drain_since_s: float | None = None
    deletion_cost: int = 0
    created_s: float = 0.0
    deleted_s: float | None = None
    started_s: float | None = None
    grace_s: float = 30.0
    reason: str = ""
    message: str = ""
    containers: tuple[ContainerView, ...] = ()
    conditions: tuple[PodCondition, ...] = ()
    needs: tuple[str, ...] = ()
    group: str = ""
    group_index: int | None = None
    worker_index: int = 0
    group_size: int = 1
    node_is_deleted: bool = False
    node_is_cordoned: bool = False

    @property
    def bound(self) -> bool:
        """Whether the pod is assigned to a node."""
        return bool(self.node)

    @property
    def finished(self) -> bool:
        """Whether the pod has succeeded or failed: its containers will not run again."""
        return self.phase in FINISHED_PHASES

    @property
    def ended_s(self) -> float:
        """Unix time, in seconds, at which a finished pod ended, from its status; its creation time if the status does not show it."""
        exits = [each.last_exit.at_s for each in self.containers if each.last_exit is not None]
        changes = [each.since_s for each in self.conditions]
        return max((each for each in (*exits, *changes) if each is not None), default=self.created_s)

    @property
    def gated(self) -> bool:
        """Whether the pod still has the scheduling gate with which it waits for room in its graph's GPU budget."""
        return BUDGET_GATE in self.gates

    @property
    def draining(self) -> bool:
        """Whether the pod has both marks of a drain: the label that takes it out of its Service, and the time at which the drain began."""
        return self.serving == DRAINING and self.drain_since_s is not None

    @property
    def alive(self) -> bool:
        """Whether the pod counts as an existing replica: it is neither terminating nor finished."""
        return not self.terminating and not self.finished

    @property
    def takes_requests(self) -> bool:
        """Whether the pod gets requests as soon as it is ready: its Service selects it. In a LeaderWorkerSet group, only the leader gets any."""
        if self.worker_index:
            return False
        return self.serving == SERVING or (self.role == Role.ROUTER and self.serving != DRAINING)

    @property
    def may_hold_requests(self) -> bool:
        """Whether the pod can have requests in progress: the process of a main container has started.

        A pod that is not ready may still stream responses, so readiness is not considered.
        """
        return self.bound and not self.finished and any(c.started for c in self.containers if not c.init)

    def condition(self, kind: str) -> PodCondition | None:
        """Return the condition of type ``kind``, such as ``Ready``; None if the pod does not have it."""
        return next((each for each in self.conditions if each.type == kind), None)


def on_deleted_node(view: PodView) -> PodView:
    """Return the facts about a pod with its node marked as deleted and the pod as not ready, whatever its condition says."""
    return replace(view, ready=False, node_is_deleted=True)


def on_cordoned_node(view: PodView) -> PodView:
    """Return the facts about a pod with its node marked as cordoned (it accepts no new pods)."""
    return replace(view, node_is_cordoned=True)


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """Return the facts about ``pod``, a Pod in the API's JSON form, from which the operator decides.

    The number of GPUs is read from the GPU annotation or, if that is absent, from the GPU resources that its containers
    request.
    """
    metadata, spec, status = _map(pod, "metadata"), _map(pod, "spec"), _map(pod, "status")
    labels, annotations = _map(metadata, "labels"), _map(metadata, "annotations")
    conditions = tuple(_condition(each) for each in _maps(status, "conditions"))
    grace_s = _integer(spec.get("terminationGracePeriodSeconds"))
    return PodView(
        name=_text(metadata, "name"),
        namespace=_text(metadata, "namespace"),
        uid=_text(metadata, "uid"),
        graph=_text(labels, GRAPH_LABEL),
        service=_text(labels, SERVICE_LABEL),
        role=_text(labels, ROLE_LABEL),
        gpus=_gpus(annotations, spec),
        gates=tuple(_text(each, "name") for each in _maps(spec, "schedulingGates")),
        node=_text(spec, "nodeName"),
        ip=_text(status, "podIP"),
        phase=_text(status, "phase") or "Pending",
        ready=any(each.type == "Ready" and each.status == "True" for each in conditions),
        terminating=bool(metadata.get("deletionTimestamp")),
        serving=_text(labels, SERVING_LABEL),
        metrics_path=_text(annotations, METRICS_PATH_ANNOTATION) or METRICS_PATH,
        scheme=scheme_of(annotations),
        drain_since_s=seconds(annotations.get(DRAIN_ANNOTATION)),
        deletion_cost=_integer(annotations.get(DELETION_COST_ANNOTATION)) or 0,
        created_s=seconds(metadata.get("creationTimestamp")) or 0.0,
        deleted_s=seconds(metadata.get("deletionTimestamp")),
        started_s=seconds(status.get("startTime")),
        grace_s=30.0 if grace_s is None else float(grace_s),
        reason=_text(status, "reason"),
        message=_text(status, "message"),
        containers=tuple(_containers(spec, status)),
        conditions=conditions,
        needs=_needs(spec),
        group=_text(labels, GROUP_KEY_LABEL),
        group_index=_integer(labels.get(GROUP_INDEX_LABEL)),
        worker_index=_integer(labels.get(WORKER_INDEX_LABEL)) or 0,
        group_size=max(1, _integer(annotations.get(GROUP_SIZE_ANNOTATION)) or 1),
    )


def _gpus(annotations: Mapping[str, Any], spec: Mapping[str, Any]) -> int:
    named = _integer(annotations.get(GPUS_ANNOTATION))
    if named is not None:
        return max(0, named)
    found = 0
    for container in _maps(spec, "containers"):
        resources = _map(container, "resources")
        asked = {**_map(resources, "requests"), **_map(resources, "limits")}
        gpus = (name for name in asked if is_accelerator(name))
        found += sum(max(0, _integer(asked[name]) or 0) for name in gpus)
    return found


def _condition(condition: Mapping[str, Any]) -> PodCondition:
    return PodCondition(
        type=_text(condition, "type"),
        status=_text(condition, "status"),
        reason=_text(condition, "reason"),
        message=_text(condition, "message"),
        since_s=seconds(condition.get("lastTransitionTime")),
    )


def _containers(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[ContainerView]:
    for init, names, states in (
        (True, "initContainers", "initContainerStatuses"),
        (False, "containers", "containerStatuses"),
    ):
        seen = {_text(each, "name"): each for each in _maps(status, states)}
        images = {_text(each, "name"): _text(each, "image") for each in _maps(spec, names)}
        for name in {**images, **seen}:
            yield _container(name, images.get(name, ""), seen.get(name, {}), init=init)


def _container(name: str, image: str, status: Mapping[str, Any], *, init: bool) -> ContainerView:
    state = _map(status, "state")
    waiting, running = _map(state, "waiting"), state.get("running")
    ended = _map(state, "terminated") or _map(_map(status, "lastState"), "terminated")
    last_exit = Exit(
        code=_integer(ended.get("exitCode")) or 0,
        reason=_text(ended, "reason"),
        message=_text(ended, "message").strip(),
        at_s=seconds(ended.get("finishedAt")),
    )
    return ContainerView(
        name=name,
        image=_text(status, "image") or image,
        init=init,
        ready=bool(status.get("ready")),
        # If the kubelet does not report `started`, there is no startup probe to wait for.
        started=running is not None and status.get("started") is not False,
        running_since_s=seconds(_map(state, "running").get("startedAt")),
        waiting_reason=_text(waiting, "reason"),
        waiting_message=_text(waiting, "message"),
        last_exit=last_exit if ended else None,
    )


_VOLUME_OBJECTS: Final = (
    ("Secret", "secret", "secretName"),
    ("ConfigMap", "configMap", "name"),
    ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
)


def _needs(spec: Mapping[str, Any]) -> tuple[str, ...]:
    found = set()
    for volume in _maps(spec, "volumes"):
        for kind, field, name in _VOLUME_OBJECTS:
            source = _map(volume, field)
            if source.get(name) and source.get("optional") is not True:
                found.add(f"{kind} {source[name]}")
    return tuple(sorted(found))


def _map(parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return parent.get(key) or {}


def _maps(parent: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    return parent.get(key) or ()


def _text(parent: Mapping[str, Any], key: str) -> str:
    return str(parent.get(key) or "")


def _integer(value: object) -> int | None:
    try:
        return int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None
