"""Finds why a pod does not serve, as a message with a remedy.

Pure functions. Messages are equal for an equal state: they contain no counters or elapsed times, so that a status
with such a message is not rewritten while nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from penstock.kube.objects.names import CONFIG_REASONS, CRASH_LOOP, PULL_REASONS, REPLICA_FAILURE
from penstock.kube.objects.refusals import kind_of_message
from penstock_operator.plan.pods import ContainerView, PodView

SLOW_START_S: Final = 300.0
"""Seconds of startup after which a worker that still loads its model is reported. Chosen: 8B models load in 30 to 120
s."""

NOT_READY_S: Final = 30.0
"""Seconds after which a started container that is not ready counts as failing its probe. Chosen: three probe periods."""

STUCK_S: Final = 60.0
"""Seconds after the end of its grace period at which a terminating pod counts as stuck. Chosen: the kubelet needs
only seconds."""


class Category(StrEnum):
    """Kinds of pod problems, the most serious first.

    The values are a public interface: they appear as condition reasons, in metrics and in alerts.

    Attributes:
        REFUSED: The API server rejects the creation of pods.
        IMAGE_PULL: An image cannot be pulled.
        CONFIG: A container cannot be created, for example because a Secret is missing.
        OUT_OF_MEMORY: A container was OOMKilled.
        CRASH_LOOP: A container exited with an error.
        NODE_LOST: The node was deleted, does not answer or is not ready.
        EVICTED: The pod was evicted.
        FAILED: The pod failed for another reason.
        UNSCHEDULABLE: No node fits, or a scheduling gate other than that of the GPU budget blocks the pod.
        PROBE_FAILING: A running container fails its readiness probe.
        TERMINATING_STUCK: The pod still exists long after its deletion.
        STARTING_SLOWLY: Startup takes longer than expected.
        WAITING_FOR_BUDGET: The pod waits for GPUs of the graph's budget.
    """

    REFUSED = "FailedCreate"
    IMAGE_PULL = "ImagePull"
    CONFIG = "CreateContainerConfigError"
    OUT_OF_MEMORY = "OutOfMemory"
    CRASH_LOOP = "CrashLoop"
    NODE_LOST = "NodeLost"
    EVICTED = "Evicted"
    FAILED = "PodFailed"
    UNSCHEDULABLE = "Unschedulable"
    PROBE_FAILING = "ProbeFailing"
    TERMINATING_STUCK = "TerminatingStuck"
    STARTING_SLOWLY = "StartingSlowly"
    WAITING_FOR_BUDGET = "WaitingForBudget"

    @property
    def is_fault(self) -> bool:
        """Whether this kind of problem means that something is broken; False only for a pod that waits for GPUs of its graph's budget."""
        return self is not Category.WAITING_FOR_BUDGET

    @property
    def is_unplaced(self) -> bool:
        """Whether a replica has no node: no node fits its pod, or the API server rejects the pod's creation."""
        return self in {Category.UNSCHEDULABLE, Category.REFUSED}


_SEVERITY: Final = {category: rank for rank, category in enumerate(Category)}

_REMEDIES: Final[Mapping[Category, str]] = {
    Category.IMAGE_PULL: "correct the image, or add imagePullSecrets in podTemplate",
    Category.CONFIG: "correct env, envFrom or podTemplate of the service",
    Category.OUT_OF_MEMORY: "raise its memory limit in podTemplate or lower model.contextTokens",
    Category.CRASH_LOOP: "see kubectl logs --previous -c {container}",
    Category.NODE_LOST: "check the node; delete it if it will not return",
    Category.EVICTED: "free that resource on the node or raise the pod's requests",
    Category.FAILED: "see kubectl describe pod; it will be replaced automatically",
    Category.PROBE_FAILING: "see kubectl logs {pod} -c {container}",
    Category.TERMINATING_STUCK: "check the node and the pod's finalizers, then kubectl delete --force",
    Category.STARTING_SLOWLY: "see kubectl describe pod {pod} and its logs",
    Category.WAITING_FOR_BUDGET: "raise planner.maxGpuBudget, or its pool's GPUs, or scale another service down",
}
"""Remedy by category, used if the cluster's own message gives no better one."""

_PLACEMENTS: Final = (
    (r"Insufficient \S*(gpu|gaudi|tpu)", "add GPU nodes to the pool, or lower replicas or gpusPerReplica"),
    ("Insufficient", "add nodes, or lower the requests in podTemplate"),
    ("taint", "add the taint to the node pool's tolerations"),
    ("affinity|selector", "label the nodes as the node pool's nodeSelector says, or correct it"),
    ("persistentvolumeclaim|volume", "create the claim, or give it a storage class that can bind it"),
    ("", "see kubectl describe pod"),
)
"""Patterns in the scheduler's message, each with its remedy."""

_CONFIGS: Final = (
    (r'secret "([^"]+)" not found', r"create Secret \1 in the graph's namespace"),
    (r'configmap "([^"]+)" not found', r"create ConfigMap \1 in the graph's namespace"),
    (r"couldn't find key (\S+) in (Secret|ConfigMap) \S+?/([^\s/]+)", r"add key \1 to \2 \3"),
)
"""Patterns in the kubelet's message about environment variables, each with its remedy."""

_ANY_REFUSAL: Final = (
    "see kubectl describe replicaset, and the quotas, limit ranges and webhooks of the namespace"
)

_NODES: Final = re.compile(r"^\d+/\d+ nodes are available: ")


def _remedy(words: str, table: Iterable[tuple[str, str]]) -> str | None:
    """Return the remedy of the first row whose pattern occurs in ``words``; None if none does."""
    found = ((re.search(pattern, words), remedy) for pattern, remedy in table)
    return next((match.expand(remedy) for match, remedy in found if match is not None), None)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Problem of one pod, or of a workload whose pods cannot be created.

    Attributes:
        category: Kind of problem.
        pod: Name of the pod or workload.
        service: Service that the pod or workload belongs to.
        message: Description of the problem.
        remedy: Action that a user can take.
    """

    category: Category
    pod: str
    service: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.pod}: {self.message}; {self.remedy}"


def worst(diagnoses: Iterable[Diagnosis]) -> Diagnosis | None:
    """Return the most serious of ``diagnoses`` (on a tie, the first by pod name); None if there are none."""
    return min(diagnoses, key=lambda each: (_SEVERITY[each.category], each.pod), default=None)


class _Trouble(NamedTuple):
    """A problem; ``remedy`` overrides the category's remedy, ``container`` is the container concerned."""

    category: Category
    message: str
    remedy: str | None = None
    container: str = ""


def diagnose(
    pod: PodView,
    *,
    now_s: float,
    budget_reason: str = "",
    slow_start_s: float = SLOW_START_S,
) -> Diagnosis | None:
    """Return the problem that keeps a pod from serving; None if none is known.

    Args:
        pod: The pod.
        now_s: Current Unix time in seconds.
        budget_reason: Reason from `budget.plan_ungating` why the GPU budget does not let the pod start; empty if it lets the
            pod start.
        slow_start_s: Seconds after its start during which it is normal that a pod waits for volumes or loads its model;
            300 (`SLOW_START_S`) by default.
    """
    found = _of_the_pod(pod, now_s)
    if found is None and pod.alive and not pod.ready:
        found = _of_scheduling(pod, budget_reason) or _of_containers(pod, now_s, slow_start_s)
    if found is None:
        return None
    remedy = found.remedy or _REMEDIES[found.category].format(pod=pod.name, container=found.container)
    return Diagnosis(found.category, pod.name, pod.service, found.message, remedy)


_TAKEN: Final = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
"""Reasons with which Kubernetes deletes pods whose node does not answer or no longer exists."""


def _of_the_pod(pod: PodView, now_s: float) -> _Trouble | None:
    if pod.node_is_deleted and not pod.finished:
        remedy = "its pods are replaced when Kubernetes notices that the node is missing, after about 40 s"
        return _Trouble(Category.NODE_LOST, f"node {pod.node} was deleted", remedy)
    target = pod.condition("DisruptionTarget")
    taken = target is not None and target.status == "True" and target.reason in _TAKEN
    if pod.reason == "NodeLost" or pod.phase == "Unknown" or (taken and not pod.finished):
        return _Trouble(Category.NODE_LOST, f"node {pod.node} does not answer")
    if pod.alive and _is_cut_off(pod):
        remedy = "check the node; its pods are replaced after five minutes"
        return _Trouble(Category.NODE_LOST, f"node {pod.node} is not ready", remedy)
    if pod.phase == "Failed":
        return _of_failure(pod)
    if pod.terminating and pod.deleted_s is not None and now_s > pod.deleted_s + STUCK_S:
        where = f" on node {pod.node}" if pod.bound else ""
        return _Trouble(Category.TERMINATING_STUCK, f"is still terminating{where}")
    return None


def _is_cut_off(pod: PodView) -> bool:
    """Return whether only the node controller has set the pod to not ready, since its node stopped reporting.

    The node controller then changes the condition Ready and nothing else. The unreachable kubelet had reported all
    containers as ready, and a kubelet always writes both conditions together. Kubernetes deletes the pod five minutes
    later. Source: kubernetes/pkg/controller/util/node/controller_utils.go, MarkPodsNotReady.
    """
    ready, containers = pod.condition("Ready"), pod.condition("ContainersReady")
    return (
        ready is not None
        and ready.status == "False"
        and ready.reason != "ReadinessGatesNotReady"
        and containers is not None
        and containers.status == "True"
    )


def _of_failure(pod: PodView) -> _Trouble:
    why = pod.message or pod.reason or "no reason given"
    if pod.reason == "Evicted":
        return _Trouble(Category.EVICTED, f"was evicted: {why}")
    ended = [each for each in pod.containers if each.last_exit is not None and each.last_exit.code != 0]
    return _of_exit(ended[0]) if ended else _Trouble(Category.FAILED, f"failed: {why}")


def _of_scheduling(pod: PodView, budget_reason: str) -> _Trouble | None:
    if pod.gated:
        message = f"waits for GPUs of the budget{': ' if budget_reason else ''}{budget_reason}"
        return _Trouble(Category.WAITING_FOR_BUDGET, message)
    if pod.gates:
        message = f"is blocked by scheduling gate {', '.join(pod.gates)}"
        return _Trouble(Category.UNSCHEDULABLE, message, "find out who set spec.schedulingGates of the pod")
    scheduled = pod.condition("PodScheduled")
    if pod.bound or scheduled is None or scheduled.status != "False":
        return None
    if scheduled.reason == "SchedulingGated":  # stale until the scheduler's next attempt
        return None
    # Drop the second half of the message, about preemption: it varies between tries.
    text = scheduled.message.split(" preemption: ", maxsplit=1)[0].strip().rstrip(".,")
    message = f"cannot be scheduled: {text or 'the scheduler gave no reason'}"
    remedy = _remedy(_NODES.sub("", scheduled.message), _PLACEMENTS)
    return _Trouble(Category.UNSCHEDULABLE, message, remedy)


def _of_containers(pod: PodView, now_s: float, slow_start_s: float) -> _Trouble | None:
    for container in pod.containers:
        found = _of_waiting(container)
        if found is not None:
            return found
    main = [each for each in pod.containers if not each.init]
    for container in main:
        if not container.ready and container.last_exit is not None and container.last_exit.code != 0:
            return _of_exit(container)
    ready = pod.condition("Ready")
    since_s = pod.created_s if ready is None or ready.since_s is None else ready.since_s
    if main and all(each.started for each in main):
        unready = [each.name for each in main if not each.ready]
        begun_s = max([since_s, *(each.running_since_s or since_s for each in main)])
        if unready and now_s - begun_s > NOT_READY_S:
            message = f"container {unready[0]} is running but fails its readiness probe"
            return _Trouble(Category.PROBE_FAILING, message, container=unready[0])
        return None
    if pod.bound and now_s - (pod.started_s or pod.created_s) > slow_start_s:
        loading = any(each.running_since_s is not None for each in main)
        needs = f" ({', '.join(pod.needs)})" if pod.needs else ""
        waits = f"still waits for its volumes{needs} or init containers"
        return _Trouble(Category.STARTING_SLOWLY, "is still loading its model" if loading else waits)
    return None


def _of_waiting(container: ContainerView) -> _Trouble | None:
    reason, text = container.waiting_reason, container.waiting_message
    if reason in PULL_REASONS:
        cause = text.rpartition("ErrImagePull: ")[2].strip()
        detail = "" if not cause or cause.startswith("Back-off") else f": {cause}"
        return _Trouble(Category.IMAGE_PULL, f"image {container.image} cannot be pulled{detail}")
    if reason in CONFIG_REASONS:
        message = f"container {container.name} cannot be created: {text or reason}"
        return _Trouble(Category.CONFIG, message, _remedy(text, _CONFIGS))
    return _of_exit(container) if reason == CRASH_LOOP else None


def _of_exit(container: ContainerView) -> _Trouble:
    name, ended = container.name, container.last_exit
    if ended is None:
        return _Trouble(Category.CRASH_LOOP, f"container {name} is crash-looping", container=name)
    if ended.reason == "OOMKilled":
        return _Trouble(Category.OUT_OF_MEMORY, f"container {name} was OOMKilled")
    last = ended.message.splitlines()[-1].strip()[:200] if ended.message.strip() else ""
    message = f"container {name} ended with exit code {ended.code}{': ' if last else ''}{last}"
    return _Trouble(Category.CRASH_LOOP, message, container=name)


_POD: Final = re.compile(r'^(?:[Pp]ods?) "[^"]*" is (?:forbidden|invalid): ')
"""Matches the start of a refusal message. It names the pod, whose generated name changes at every try; the reported
message must not change."""


def refusal(service: str, workload: Mapping[str, Any]) -> Diagnosis | None:
    """Return why the API server rejects further pods of a service's Deployment (``workload``), from its status; None if it rejects none."""
    for each in (workload.get("status") or {}).get("conditions") or ():
        if each.get("type") == REPLICA_FAILURE and each.get("status") == "True":
            words = _POD.sub("", " ".join(str(each.get("message") or "").split()))
            message = (
                f"the API server refuses its pods: {words or each.get('reason') or 'it gives no reason'}"
            )
            name = workload["metadata"]["name"]
            _, remedy = kind_of_message(words)
            return Diagnosis(Category.REFUSED, name, service, message, remedy or _ANY_REFUSAL)
    return None
