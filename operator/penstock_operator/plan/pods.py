"""One view of a pod, parsed once; all that the plans read.

Pure. Tolerant of missing fields: a pod may be seen a moment after its creation.
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
"""LeaderWorkerSet's own: which group of its set a pod belongs to, and of how many pods."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a container ended: code, the kubelet's word such as ``OOMKilled``, its last words, and when; None: unknown."""

    code: int
    reason: str = ""
    message: str = ""
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container of a pod as the kubelet reports it.

    Attributes:
        init: Whether it runs before the main containers.
        started: Whether its process runs and passed its startup probe (or has none).
        running_since_s: When its process started, seconds since the epoch; None while it does not run.
        waiting_reason: Why it does not run, for example ``ImagePullBackOff``; empty otherwise.
        last_exit: How its newest ended process ended; None if none did.
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
    """A condition of a pod; times in seconds since the epoch, None if unknown."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """What the plans know about a pod. Times are seconds since the epoch; a text is empty where there is none.

    Attributes:
        uid: Names repeat over time, uids never do.
        gpus: GPUs that it counts against the budget.
        gates: Names of the scheduling gates that still hold it, in order.
        metrics_path: Where it has its metrics.
        scheme: By which it is reached: http or https.
        drain_since_s: When its drain began; None if it does not drain.
        deletion_cost: Its pod-deletion-cost; 0 if absent or no number.
        deleted_s: When its deletion's grace ends or ended; None unless terminating.
        started_s: When the kubelet first saw it; None before.
        containers: Init containers first.
        needs: Objects that its volumes come from and that must exist: ``Secret keys``, sorted.
        group: Key of its LeaderWorkerSet group; empty for a pod of a Deployment.
        group_index: Group's ordinal; None for a pod of a Deployment.
        worker_index: Ordinal within the group; 0 is the leader.
        group_size: Pods of one group; 1 for a pod of a Deployment.
        node_is_deleted: Its node is no more; Kubernetes deletes the pod some 40 s later.
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

    @property
    def bound(self) -> bool:
        """Whether it is assigned to a node."""
        return bool(self.node)

    @property
    def finished(self) -> bool:
        """Whether its containers are gone for good."""
        return self.phase in FINISHED_PHASES

    @property
    def ended_s(self) -> float:
        """When a finished one ended, as far as its status tells; else when it was made."""
        exits = [each.last_exit.at_s for each in self.containers if each.last_exit is not None]
        changes = [each.since_s for each in self.conditions]
        return max((each for each in (*exits, *changes) if each is not None), default=self.created_s)

    @property
    def gated(self) -> bool:
        """Whether the budget's scheduling gate still holds it."""
        return BUDGET_GATE in self.gates

    @property
    def draining(self) -> bool:
        """Whether it is marked to leave: label and time both there."""
        return self.serving == DRAINING and self.drain_since_s is not None

    @property
    def alive(self) -> bool:
        """Whether it counts as a replica: neither on its way out nor finished."""
        return not self.terminating and not self.finished

    @property
    def takes_requests(self) -> bool:
        """Whether its Service may send it requests, readiness aside; only a group's leader gets any."""
        if self.worker_index:
            return False
        return self.serving == SERVING or (self.role == Role.ROUTER and self.serving != DRAINING)

    @property
    def may_hold_requests(self) -> bool:
        """Whether a request can be under way in it: a main container's process is past its start.

        A pod that is not ready may still stream answers, so readiness does not decide this.
        """
        return self.bound and not self.finished and any(c.started for c in self.containers if not c.init)

    def condition(self, kind: str) -> PodCondition | None:
        """Return the condition of type ``kind``, or None."""
        return next((each for each in self.conditions if each.type == kind), None)


def on_deleted_node(view: PodView) -> PodView:
    """Return the view of a pod whose node is no more: it is not ready, though its condition still says so."""
    return replace(view, ready=False, node_is_deleted=True)


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """Return the view of ``pod``, a Pod as the API returns it.

    GPUs are those of the GPU annotation; without it, the GPU resources that its containers ask for.
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
        # A kubelet that does not report `started` has no startup probe to wait for.
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
