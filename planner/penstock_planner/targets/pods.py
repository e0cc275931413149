"""Counts a role's replicas from its pods. Pure: the caller passes all state between calls.

A replica is one pod of a Deployment, or one group of pods of a LeaderWorkerSet, which its leader represents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.api import Role
from penstock.core.ports import WORKER_PORT
from penstock.core.stamps import seconds
from penstock.kube.objects.names import (
    BUDGET_GATE,
    CONFIG_REASONS,
    CRASH_LOOP,
    DRAINING,
    FINISHED_PHASES,
    GROUP_KEY_LABEL,
    PULL_REASONS,
    ROLE_LABEL,
    SERVING_LABEL,
    WORKER_INDEX_LABEL,
    scheme_of,
)
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.targets.base import Endpoint

SERVED_AFTER_S: Final = 5.0
"""Seconds (5) between a pod's start and the last change of its Ready condition, above which the pod must have been ready before.

Chosen: the kubelet writes the first value of the condition within a second, so a later change means that the pod was ready once.
"""

CRASHES: Final = 3
"""Number of restarts before the first readiness from which a pod is crash-looping. Chosen: one or two can be due to a dependency."""

_STUCK: Final = PULL_REASONS | CONFIG_REASONS | {CRASH_LOOP}
"""Reasons of the kubelet for a waiting container that does not start by waiting longer."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Fields of a pod that the planner uses.

    Attributes:
        name: Name of the pod.
        uid: Uid of the pod; unlike names, uids are never reused.
        role: Role from its label; None if it has none.
        group: Replica that the pod belongs to: the group key of a LeaderWorkerSet, else the pod's name.
        is_leader: Whether the pod is the leader of its group; True for pods of Deployments.
        url: Base URL of the pod; None before it has an IP address.
        ready: Whether the pod is ready.
        was_ready: Whether the pod was certainly ready before, so that it is restarting if it is not ready now.
        leaving: Whether the pod is terminating or draining.
        finished: Whether all containers of the pod have ended for good.
        is_scheduled: Whether the pod is scheduled on a node, and so holds its GPUs.
        trouble: Kind of problem that prevents the pod from becoming ready: ``gated`` (waits for the GPU budget),
            ``unschedulable``, ``stuck`` (a container cannot start), or empty.
        message: Message of the scheduler or kubelet about the problem; empty if there is none.
    """

    name: str
    uid: str
    role: Role | None
    group: str
    is_leader: bool
    url: str | None
    ready: bool
    was_ready: bool
    leaving: bool
    finished: bool
    is_scheduled: bool
    trouble: str = ""
    message: str = ""


def pod_facts(obj: Mapping[str, Any]) -> PodFacts:
    """Return the fields of a pod object that the planner uses; a missing field has the value that it has in a new pod."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    trouble, message = _trouble(spec, status, conditions.get("PodScheduled", {}))
    address = status.get("podIP") or ""
    host = f"[{address}]" if ":" in address else address
    return PodFacts(
        name=metadata["name"],
        uid=metadata.get("uid", metadata["name"]),
        role=_role(labels.get(ROLE_LABEL)),
        group=labels.get(GROUP_KEY_LABEL) or metadata["name"],
        is_leader=labels.get(WORKER_INDEX_LABEL, "0") == "0",
        url=f"{scheme_of(metadata.get('annotations'))}://{host}:{WORKER_PORT}" if host else None,
        ready=ready.get("status") == "True",
        was_ready=_gap_s(status.get("startTime"), ready.get("lastTransitionTime")) > SERVED_AFTER_S,
        leaving=bool(metadata.get("deletionTimestamp")) or labels.get(SERVING_LABEL) == DRAINING,
        finished=status.get("phase") in FINISHED_PHASES,
        is_scheduled=bool(spec.get("nodeName")),
        trouble=trouble,
        message=message,
    )


@dataclass(frozen=True, slots=True)
class PodPool:
    """Replicas of one role, as counted from its pods.

    Attributes:
        counts: Number of ready, starting and draining replicas.
        is_adjusting: Whether a requested replica has not been ready yet, a replica is leaving, or the operator has not
            acted on the desired number yet.
        endpoints: Addresses of the ready replicas.
        failed: One reason for each failed replica.
    """

    counts: PoolCounts
    is_adjusting: bool
    endpoints: tuple[Endpoint, ...]
    failed: tuple[str, ...]


def count(
    role: Role,
    pods: Iterable[PodFacts],
    *,
    desired: int,
    gpus: int,
    served: Collection[str],
    failing: Mapping[str, str],
    refused: str = "",
) -> PodPool:
    """Return the replicas of a role, counted from its pods.

    A desired replica without a pod counts as starting, or as failed if the API server refuses its pod. Replicas beyond
    the desired number count as draining, since the operator is about to remove them. A new desired number therefore
    takes effect immediately.

    Args:
        role: The role.
        pods: Pods of the role.
        desired: Desired number of replicas, within the service's bounds.
        gpus: GPUs of one replica.
        served: Uids of pods that were ready at an earlier time, also if they are restarting now.
        failing: Reasons of pods that count as failed, by uid.
        refused: Reason for which the API server refuses further pods; empty if it does not.
    """
    counts: Counter[str] = Counter()
    reasons, endpoints = [], []
    for replica in _replicas(pods):
        leader = next((pod for pod in replica if pod.is_leader), replica[0])
        why = next((failing[pod.uid] for pod in replica if pod.uid in failing), None)
        if any(pod.leaving for pod in replica):
            counts["draining"] += 1
        elif why is not None:
            reasons.append(why)
            # A failed pod that is on a node holds its GPUs until it has ended.
            counts["failed"] += any(pod.is_scheduled for pod in replica)
        elif leader.ready:
            counts["ready"] += 1
            if leader.url is not None:
                endpoints.append(Endpoint(leader.name, role, leader.url))
        elif leader.was_ready or leader.uid in served:
            counts["restarting"] += 1
        else:
            counts["starting"] += 1
    missing = desired - sum(counts[kind] for kind in _ALIVE) - len(reasons)
    if refused and missing > 0:
        reasons += [refused] * missing
    return _against_desired(counts, reasons, desired=desired, gpus=gpus, endpoints=tuple(endpoints))


def with_switching(pools: Mapping[Role, PoolCounts], pods: Iterable[PodFacts]) -> dict[Role, PoolCounts]:
    """Return the replica counts by role, for a graph in which workers can change between the roles without a restart.

    A draining worker counts as a switching replica of the other role if that role has a starting replica without GPUs:
    one whose pod waits for the GPU budget or does not exist yet. The draining worker will change its role and replace
    that replica.

    Args:
        pools: Counts by role, as in `PodPool.counts`.
        pods: Pods of all roles.
    """
    begun = Counter(
        pod.role
        for pod in pods
        if not (pod.ready or pod.leaving or pod.finished)
        and (pod.is_scheduled or pod.trouble == "unschedulable")
    )
    found = dict(pools)
    for giver, taker in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if giver not in found or taker not in found:
            continue
        gives, takes = found[giver], found[taker]
        count = min(gives.draining, max(0, takes.starting - begun[taker]))
        found[giver] = replace(gives, draining=gives.draining - count)
        found[taker] = replace(takes, switching=count)
    return found


_ALIVE: Final = ("starting", "restarting", "ready")
"""Kinds of replicas that are neither leaving nor failed, in the order in which surplus replicas are removed."""


def _against_desired(
    counts: Counter[str], reasons: Sequence[str], *, desired: int, gpus: int, endpoints: tuple[Endpoint, ...]
) -> PodPool:
    beyond = sum(counts[kind] for kind in _ALIVE) + len(reasons) - desired
    missing, dropped = max(0, -beyond), min(max(0, beyond), len(reasons))
    surplus = max(0, beyond) - dropped
    draining = counts["draining"] + surplus
    for kind in _ALIVE:
        taken = min(surplus, counts[kind])
        counts[kind] -= taken
        surplus -= taken
    starting = counts["starting"] + missing
    return PodPool(
        PoolCounts(counts["ready"], starting + counts["restarting"], draining + counts["failed"], gpus),
        bool(starting or draining),
        endpoints,
        tuple(reasons[: len(reasons) - dropped]),
    )


def _replicas(pods: Iterable[PodFacts]) -> list[list[PodFacts]]:
    groups: dict[str, list[PodFacts]] = {}
    for pod in pods:
        if not pod.finished:
            groups.setdefault(pod.group, []).append(pod)
    return list(groups.values())


def _trouble(
    spec: Mapping[str, Any], status: Mapping[str, Any], scheduled: Mapping[str, Any]
) -> tuple[str, str]:
    if any(gate.get("name") == BUDGET_GATE for gate in spec.get("schedulingGates") or ()):
        return "gated", "waiting for GPUs within the graph's budget"
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return (
            "unschedulable",
            f"unschedulable: {scheduled.get('message') or 'the scheduler gives no reason'}",
        )
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        restarts = container.get("restartCount", 0)
        if waiting.get("reason") in _STUCK or (restarts >= CRASHES and not container.get("ready")):
            return "stuck", _stuck(container, waiting, restarts)
    return "", ""


def _stuck(container: Mapping[str, Any], waiting: Mapping[str, Any], restarts: int) -> str:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    parts = [f"container {container.get('name', '')}: {waiting.get('reason') or f'crashed {restarts} times'}"]
    if ended:
        parts.append(f"last exit {ended.get('exitCode')} {ended.get('reason', '')}".rstrip())
    elif waiting.get("message"):
        parts.append(str(waiting["message"]))
    return ": ".join(parts)


def _role(label: str | None) -> Role | None:
    return Role(label) if label in set(Role) else None


def _gap_s(earlier: object, later: object) -> float:
    """Return the seconds between two RFC 3339 times of the kubelet's clock; 0 if one is unknown."""
    earlier_s, later_s = seconds(earlier), seconds(later)
    return 0.0 if earlier_s is None or later_s is None else later_s - earlier_s
