"""Counts a role's replicas from its pods. Pure: the caller passes the time and what it remembers.

A replica is one pod of a Deployment, or one group of pods of a LeaderWorkerSet, represented by its leader.
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
from penstock_planner.decide.observation import PoolCounts
from penstock_planner.targets.base import Endpoint

SERVED_AFTER_S: Final = 5.0
"""Chosen: a Ready condition that changed this long after the kubelet first saw the pod changed because the pod
was ready once; the first one is written within a second."""

CRASHES: Final = 3
"""Chosen: restarts before the first readiness that make it a crash loop; one or two may be a dependency."""

_STUCK: Final = PULL_REASONS | CONFIG_REASONS | {CRASH_LOOP}
"""The kubelet's reasons for a container that does not run and will not by waiting alone."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What the planner reads of a pod.

    Attributes:
        uid: Names repeat over time, uids never do.
        url: Base URL; None before it has an address.
        served: Whether it certainly was ready before.
        leaving: Terminating, or asked to drain.
        finished: Its containers are gone for good.
        bound: Whether it has a node, and so holds its GPUs.
        trouble: Why it cannot become ready: ``gated``, ``unschedulable``, ``stuck`` or empty.
        message: The scheduler's or the kubelet's own words about it.
    """

    name: str
    uid: str
    role: Role | None
    group: str
    is_leader: bool
    url: str | None
    ready: bool
    served: bool
    leaving: bool
    finished: bool
    bound: bool
    trouble: str = ""
    message: str = ""


def pod_facts(obj: Mapping[str, Any]) -> PodFacts:
    """Return what the planner reads of a pod object; missing fields are taken as not there yet."""
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
        served=_gap_s(status.get("startTime"), ready.get("lastTransitionTime")) > SERVED_AFTER_S,
        leaving=bool(metadata.get("deletionTimestamp")) or labels.get(SERVING_LABEL) == DRAINING,
        finished=status.get("phase") in FINISHED_PHASES,
        bound=bool(spec.get("nodeName")),
        trouble=trouble,
        message=message,
    )


@dataclass(frozen=True, slots=True)
class PodPool:
    """One role's replicas.

    Attributes:
        counts: For the loop.
        is_adjusting: A requested replica is not ready for the first time, one leaves, or the operator has not
            acted on the desired number yet.
        endpoints: Of the ready ones.
        failed: One reason per replica that was given up.
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
    """Return a role's pool.

    Desired replicas without a pod yet are starting, or given up if the API server has ``refused`` their
    pods; those beyond the ``desired`` number, within bounds, are draining, because the operator is about to take
    them. So a desired number counts from the moment it is written. ``served`` are uids of pods that were ready
    before, ``failing`` of pods that are given up, with the reason.
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
            # A pod given up on a node holds its GPUs until it has ended.
            counts["failed"] += any(pod.bound for pod in replica)
        elif leader.ready:
            counts["ready"] += 1
            if leader.url is not None:
                endpoints.append(Endpoint(leader.name, role, leader.url))
        elif leader.served or leader.uid in served:
            counts["restarting"] += 1
        else:
            counts["starting"] += 1
    missing = desired - sum(counts[kind] for kind in _ALIVE) - len(reasons)
    if refused and missing > 0:
        reasons += [refused] * missing
    return _against_desired(counts, reasons, desired=desired, gpus=gpus, endpoints=tuple(endpoints))


def with_switching(pools: Mapping[Role, PoolCounts], pods: Iterable[PodFacts]) -> dict[Role, PoolCounts]:
    """Return the counts of roles whose workers switch: one that drains is that of the other role whose place it takes.

    A place is a replica that starts and has no GPUs: its pod waits at the budget's gate, or is yet to be made.
    """
    begun = Counter(
        pod.role
        for pod in pods
        if not (pod.ready or pod.leaving or pod.finished) and (pod.bound or pod.trouble == "unschedulable")
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
"""Replicas that are neither leaving nor given up, in the order in which a surplus is taken."""


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
    """Return the seconds between two RFC 3339 times of one clock, the kubelet's; 0 if one is unknown."""
    earlier_s, later_s = seconds(earlier), seconds(later)
    return 0.0 if earlier_s is None or later_s is None else later_s - earlier_s
