"""Counts the replicas that the pods of one service make. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.kube.objects.names import DRAINING
from penstock_operator.plan.pods import PodView


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
