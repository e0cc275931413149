"""Why a pod does not serve, in words, with the remedy.

Pure. Messages say the same for the same state: no counters and no elapsed times in them, so that a status
that carries one is not written again and again while nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.kube.objects.names import CONFIG_REASONS, CRASH_LOOP, PULL_REASONS, REPLICA_FAILURE
from penstock.operator.plan.pods import ContainerView, PodView, pod_view

SLOW_START_S: Final = 300.0
"""A worker that loads its model longer than this is worth a word. Chosen: 8B models load in 30 to 120 s."""

NOT_READY_S: Final = 30.0
"""A started container that is not ready for longer than this fails its probe. Chosen: three probe periods."""

STUCK_S: Final = 60.0
"""A terminating pod this long past its grace does not go by itself. Chosen: the kubelet needs seconds."""


class Category(StrEnum):
    """What is wrong, worst first; names are a contract (condition reasons, metrics, alerts)."""

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
        """Whether something is broken; a pod that waits for GPUs of the budget is not."""
        return self is not Category.WAITING_FOR_BUDGET

    @property
    def is_unplaced(self) -> bool:
        """Whether a replica has no node because none fits, or because its pod may not even exist."""
        return self in {Category.UNSCHEDULABLE, Category.REFUSED}


_SEVERITY: Final = {category: rank for rank, category in enumerate(Category)}

_ABSENT: Final = re.compile(r'(secret|configmap) "([^"]+)" not found')
_KEY_ABSENT: Final = re.compile(r"couldn't find key (\S+) in (Secret|ConfigMap) \S+?/([^\s/]+)")
_NODES: Final = re.compile(r"^\d+/\d+ nodes are available: ")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One pod's trouble, or that of a workload whose pods cannot be created.

    Attributes:
        category: What kind of trouble.
        pod: Pod's name; the workload's for `Category.REFUSED`.
        service: Its service.
        message: What is wrong; one sentence without the pod's name.
        remedy: What a person can do.
    """

    category: Category
    pod: str
    service: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.pod}: {self.message}; {self.remedy}"


def worst(diagnoses: Iterable[Diagnosis]) -> Diagnosis | None:
    """Return the gravest of ``diagnoses``, of equals the first by pod; None if there are none."""
    return min(diagnoses, key=lambda each: (_SEVERITY[each.category], each.pod), default=None)


def diagnose(
    pod: PodView | Mapping[str, Any],
    *,
    now_s: float,
    budget_reason: str = "",
    slow_start_s: float = SLOW_START_S,
) -> Diagnosis | None:
    """Return what keeps ``pod`` from serving; None if nothing is known to.

    Args:
        pod: The view, or the pod as the API returns it.
        now_s: Seconds since the epoch.
        budget_reason: Why the budget does not release it, from `budget.releases`.
        slow_start_s: Seconds that a container may take to start before that is reported.
    """
    view = pod if isinstance(pod, PodView) else pod_view(pod)
    found = _of_the_pod(view, now_s)
    if found is None and view.alive and not view.ready:
        found = _of_scheduling(view, budget_reason) or _of_containers(view, now_s, slow_start_s)
    if found is None:
        return None
    category, message, remedy = found
    return Diagnosis(category, view.name, view.service, message, remedy)


_Words = tuple[Category, str, str]
_Found = _Words | None


def _of_the_pod(pod: PodView, now_s: float) -> _Found:
    target = pod.condition("DisruptionTarget")
    taken = target is not None and target.status == "True" and target.reason == "DeletionByTaintManager"
    if pod.reason == "NodeLost" or pod.phase == "Unknown" or (taken and not pod.finished):
        message = f"node {pod.node} does not answer"
        return Category.NODE_LOST, message, "check the node; delete it if it is gone for good"
    if pod.alive and _is_cut_off(pod):
        message = f"node {pod.node} is not ready"
        return Category.NODE_LOST, message, "check the node; its pods are replaced after five minutes"
    if pod.phase == "Failed":
        return _of_failure(pod)
    if pod.terminating and pod.deleted_s is not None and now_s > pod.deleted_s + STUCK_S:
        where = f" on node {pod.node}" if pod.bound else ""
        message = f"was deleted{where} and does not go"
        return (
            Category.TERMINATING_STUCK,
            message,
            "check the node and the pod's finalizers, then kubectl delete --force",
        )
    return None


def _is_cut_off(pod: PodView) -> bool:
    """Return whether the pod is unready by the node controller's word alone.

    That changes Ready and nothing else, as soon as the node stops reporting; the kubelet, which is unreachable,
    had all containers ready, and a kubelet writes both conditions at once. Five minutes later the pod is deleted.
    Source: kubernetes/pkg/controller/util/node/controller_utils.go, MarkPodsNotReady.
    """
    ready, containers = pod.condition("Ready"), pod.condition("ContainersReady")
    return (
        ready is not None
        and ready.status == "False"
        and ready.reason != "ReadinessGatesNotReady"
        and containers is not None
        and containers.status == "True"
    )


def _of_failure(pod: PodView) -> _Words:
    why = pod.message or pod.reason or "no reason given"
    if pod.reason == "Evicted":
        return (
            Category.EVICTED,
            f"was evicted: {why}",
            "free that resource on the node or raise the pod's requests",
        )
    ended = [each for each in pod.containers if each.last_exit is not None and each.last_exit.code != 0]
    if ended:
        return _of_exit(ended[0])
    return Category.FAILED, f"failed: {why}", "see kubectl describe pod; it is replaced by itself"


def _of_scheduling(pod: PodView, budget_reason: str) -> _Found:
    if pod.gated:
        return (
            Category.WAITING_FOR_BUDGET,
            f"waits for GPUs of the budget{': ' if budget_reason else ''}{budget_reason}",
            "raise planner.maxGpuBudget or scale another service down",
        )
    if pod.gates:
        return (
            Category.UNSCHEDULABLE,
            f"is held by scheduling gate {', '.join(pod.gates)}",
            "see who set spec.schedulingGates of the pod",
        )
    scheduled = pod.condition("PodScheduled")
    if pod.bound or scheduled is None or scheduled.status != "False":
        return None
    if scheduled.reason == "SchedulingGated":  # stale until the scheduler's next attempt
        return None
    return (
        Category.UNSCHEDULABLE,
        f"cannot be scheduled: {_stable(scheduled.message)}",
        _placement(scheduled.message),
    )


def _stable(message: str) -> str:
    """Return the scheduler's message without its second half about preemption, which varies between tries."""
    return (
        message.split(" preemption: ", maxsplit=1)[0].strip().rstrip(".,") or "the scheduler gave no reason"
    )


def _placement(message: str) -> str:
    reasons = _NODES.sub("", message)
    if re.search(r"Insufficient \S*(gpu|gaudi|tpu)", reasons):
        return "add GPU nodes to the pool, or lower replicas or gpusPerReplica"
    if "Insufficient" in reasons:
        return "add nodes, or lower the requests in podTemplate"
    if "taint" in reasons:
        return "add the taint to the node pool's tolerations"
    if "affinity" in reasons or "selector" in reasons:
        return "label the nodes as the node pool's nodeSelector says, or correct it"
    if "persistentvolumeclaim" in reasons or "volume" in reasons:
        return "create the claim, or give it a storage class that can bind it"
    return "see kubectl describe pod"


def _of_containers(pod: PodView, now_s: float, slow_start_s: float) -> _Found:
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
            message = f"container {unready[0]} runs and fails its readiness probe"
            return Category.PROBE_FAILING, message, f"see kubectl logs {pod.name} -c {unready[0]}"
        return None
    if pod.bound and now_s - (pod.started_s or pod.created_s) > slow_start_s:
        loading = any(each.running_since_s is not None for each in main)
        needs = f" ({', '.join(pod.needs)})" if pod.needs else ""
        waits = f"still waits for its volumes{needs} or init containers"
        message = "is still loading its model" if loading else waits
        return Category.STARTING_SLOWLY, message, f"see kubectl describe pod {pod.name} and its logs"
    return None


def _of_waiting(container: ContainerView) -> _Found:
    reason = container.waiting_reason
    if reason in PULL_REASONS:
        cause = container.waiting_message.rpartition("ErrImagePull: ")[2].strip()
        detail = "" if not cause or cause.startswith("Back-off") else f": {cause}"
        message = f"image {container.image} cannot be pulled{detail}"
        return Category.IMAGE_PULL, message, "correct the image, or add imagePullSecrets in podTemplate"
    if reason in CONFIG_REASONS:
        return _of_config(container)
    if reason == CRASH_LOOP:
        return _of_exit(container)
    return None


def _of_config(container: ContainerView) -> _Words:
    text = container.waiting_message
    message = f"container {container.name} cannot be created: {text or container.waiting_reason}"
    absent, key = _ABSENT.search(text), _KEY_ABSENT.search(text)
    if absent is not None:
        kind = {"secret": "Secret", "configmap": "ConfigMap"}[absent.group(1)]
        return Category.CONFIG, message, f"create {kind} {absent.group(2)} in the graph's namespace"
    if key is not None:
        return Category.CONFIG, message, f"add key {key.group(1)} to {key.group(2)} {key.group(3)}"
    return Category.CONFIG, message, "correct env, envFrom or podTemplate of the service"


def _of_exit(container: ContainerView) -> _Words:
    ended = container.last_exit
    if ended is None:
        return (
            Category.CRASH_LOOP,
            f"container {container.name} ends again and again",
            f"see kubectl logs --previous -c {container.name}",
        )
    if ended.reason == "OOMKilled":
        message = f"container {container.name} was killed for want of memory"
        return (
            Category.OUT_OF_MEMORY,
            message,
            "raise its memory limit in podTemplate or lower model.contextTokens",
        )
    last = ended.message.splitlines()[-1].strip()[:200] if ended.message.strip() else ""
    message = f"container {container.name} ended with exit code {ended.code}{': ' if last else ''}{last}"
    return Category.CRASH_LOOP, message, f"see kubectl logs --previous -c {container.name}"


_POD: Final = re.compile(r'^(?:[Pp]ods?) "[^"]*" is (?:forbidden|invalid): ')
"""The pod's generated name differs from try to try; the message must not."""

_QUOTA: Final = re.compile(r"exceeded quota: ([^,]+)")
_WEBHOOK: Final = re.compile(r'webhook "([^"]+)"')


def refusal(service: str, workload: Mapping[str, Any]) -> Diagnosis | None:
    """Return why no further pod of ``workload`` can be created; None if none was refused.

    Args:
        service: Service's name.
        workload: A Deployment with its status, as the API returns it.
    """
    conditions = (workload.get("status") or {}).get("conditions") or ()
    held = [
        each for each in conditions if each.get("type") == REPLICA_FAILURE and each.get("status") == "True"
    ]
    if not held:
        return None
    words = _POD.sub("", " ".join(str(held[0].get("message") or "").split()))
    message = f"the API server refuses its pods: {words or held[0].get('reason') or 'it gives no reason'}"
    return Diagnosis(Category.REFUSED, workload["metadata"]["name"], service, message, _remedy(words))


def _remedy(words: str) -> str:
    quota, webhook = _QUOTA.search(words), _WEBHOOK.search(words)
    if quota is not None:
        return f"raise ResourceQuota {quota.group(1)} of the namespace, or lower replicas"
    if "violates PodSecurity" in words:
        return "change podTemplate or cacheMount to what the namespace's pod security level allows"
    if webhook is not None:
        return f"ask who runs admission webhook {webhook.group(1)}, or change podTemplate"
    if "minimum" in words or "maximum" in words:
        return "set resources in podTemplate within the namespace's LimitRange"
    return "see kubectl describe replicaset, and the quotas, limit ranges and webhooks of the namespace"
