"""Decides which gated pods can start now, so that existing workers never occupy more GPUs than the graph's budget.

Pure functions. Every worker pod of a graph with a budget is created with a scheduling gate, which only the operator
removes. A pod counts from its ungating until it is finished or gone, also while it terminates. An outdated view can
delay a start but never exceed the budget: a pod that is not seen yet is gated, a pod that is seen too long counts too
long, and the caller passes ungated pods that the watch has not shown yet.

**Order.** First a role that has no running or ungated replica, because a graph with an empty role serves nothing;
then replacements of replicas that the same service has lost; then by higher ``scaling.priority``, by age, and by
name.

**Head of the line.** A replica that does not fit reserves the free GPUs only if replicas that are leaving
(terminating, deadline not exceeded) will free enough GPUs for it, so that small replicas cannot overtake a big one
forever. If nothing that is leaving would make enough room, a reservation would only leave GPUs idle, so the replicas
after it can start. That delays no replica as long as all desired ones together fit the budget.

**Groups.** A LeaderWorkerSet group starts completely or not at all: ungating its first pod reserves the GPUs of the
entire group, whose remaining pods start as soon as they exist.

**Lost replicas.** A rollout, a kill or a lost node frees GPUs shortly before the replacement requests them. To prevent
another service's waiting pod from taking these GPUs, they stay reserved for the service as long as its workload wants
that many replicas; before the replacement exists, for at most 10 s (`RESERVATION_S`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock_operator.plan.pods import PodView


@dataclass(frozen=True, slots=True)
class Unit:
    """One replica, the unit in which the GPU budget is given out: a single pod, or all pods of a LeaderWorkerSet group.

    Attributes:
        pods: The existing pods of the replica.
    """

    pods: list[PodView]

    @property
    def started(self) -> bool:
        """Whether any of the replica's pods has no scheduling gate any more, so that the complete replica counts against the GPU budget."""
        return not all(pod.gated for pod in self.pods)

    @property
    def first(self) -> PodView:
        """The replica's oldest pod; on a tie, the first by name."""
        return min(self.pods, key=lambda pod: (pod.created_s, pod.name))

    @property
    def service(self) -> str:
        """Service that the replica belongs to."""
        return self.pods[0].service

    @property
    def gated(self) -> list[PodView]:
        """The replica's pods that still have the scheduling gate with which a pod waits for the GPU budget."""
        return [pod for pod in self.pods if pod.gated]

    @property
    def all_gpus(self) -> int:
        """Number of GPUs of the complete replica, including pods of a LeaderWorkerSet group that do not exist yet."""
        size = max(pod.group_size for pod in self.pods)
        return max(size * max(pod.gpus for pod in self.pods), sum(pod.gpus for pod in self.pods))


def units(pods: Iterable[PodView]) -> list[Unit]:
    """Return the replicas that ``pods`` form: one per pod of a Deployment, and one per LeaderWorkerSet group of several pods."""
    found: dict[tuple[str, str], Unit] = {}
    for pod in pods:
        key = (pod.service, f"group {pod.group}" if pod.group else f"pod {pod.uid}")
        found.setdefault(key, Unit([])).pods.append(pod)
    return list(found.values())


def with_gates_removed(pods: Iterable[PodView], uids: Collection[str]) -> list[PodView]:
    """Return ``pods``, but without scheduling gates for those whose UID is in ``uids``.

    The operator has removed these gates already, and the watch does not show it yet.
    """
    return [replace(pod, gates=()) if pod.uid in uids else pod for pod in pods]


RESERVATION_S: Final = 10.0
"""Seconds (API server's clock) for which a lost replica's GPUs stay reserved while its replacement does not exist.
Chosen: a workload's controller creates the replacement within a second, and a service whose pods are rejected must
not block the others."""


@dataclass(frozen=True, slots=True)
class ServiceReservation:
    """The replicas of one service that occupy GPUs or have GPUs reserved.

    Attributes:
        replicas: Number of replicas that occupy GPUs, including terminating ones and those that were lost without
            having been replaced.
        gpus: Number of GPUs of one replica.
        lost_s: Unix time in seconds at which replicas were lost that have not been replaced; None if none are
            missing.
    """

    replicas: int
    gpus: int
    lost_s: float | None = None


def reservations(
    pods: Iterable[PodView],
    before: Mapping[str, ServiceReservation],
    *,
    replicas: Mapping[str, int],
    now_s: float,
) -> dict[str, ServiceReservation]:
    """Return, for each service, the replicas whose GPUs count as occupied: existing ones, and lost ones that are to be replaced.

    The GPUs of a lost replica (whose pod was deleted) stay reserved for a limited time, so that no other service takes
    them before its replacement exists.

    Args:
        pods: All worker pods of the graph.
        before: The result of the previous reconcile; empty at first.
        replicas: Number of replicas that each service's workload should have; GPUs are reserved for no more replicas
            than that. Services that are not listed are left out of the result.
        now_s: Current Unix time in seconds.

    Returns:
        By service: number of replicas that occupy GPUs, GPUs of each, and since when a replica is lost.
    """
    started = _started(pods)
    counts = Counter(each.service for each in started)
    found = {}
    for service in {*counts, *before} & set(replicas):
        sizes = [each.all_gpus for each in started if each.service == service]
        previous = before.get(service)
        number, wanted = counts[service], replicas[service]
        gpus = max(sizes) if previous is None or sizes else previous.gpus
        reserved = 0 if previous is None else min(previous.replicas, wanted)
        lost_s = now_s if previous is None or previous.lost_s is None else previous.lost_s
        if number < reserved and now_s - lost_s < RESERVATION_S:
            found[service] = ServiceReservation(reserved, gpus, lost_s)
        else:
            found[service] = ServiceReservation(min(number, wanted), gpus)
    return found


def missing_replicas(held: Mapping[str, ServiceReservation], pods: Iterable[PodView]) -> Counter[str]:
    """Return, by service, how many replicas that occupied GPUs (``held``) no longer exist in ``pods``; services without a loss are left out."""
    missing = Counter({service: each.replicas for service, each in held.items()})
    missing.subtract(each.service for each in _started(pods))
    return +missing


def _started(pods: Iterable[PodView]) -> list[Unit]:
    return [each for each in units([pod for pod in pods if not pod.finished]) if each.started]


OVERDUE_S: Final = 60.0
"""Seconds after its deadline at which a terminating pod counts as stuck (most likely its node is gone), so that no
pod waits for its GPUs. Chosen."""


WAITING_FOR_BUDGET: Final = "WaitingForBudget"
"""Condition reason of a pod that waits for the GPU budget."""


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pod with a scheduling gate that cannot start yet, with the reason.

    Attributes:
        uid: UID of the pod.
        name: Name of the pod.
        service: Service of the pod.
        reason: One sentence for users; it is the same text as long as the state is the same.
        cause: Condition reason: ``WaitingForBudget`` (`WAITING_FOR_BUDGET`), or the kind of refusal if the API server rejected the
            removal of the pod's gate.
    """

    uid: str
    name: str
    service: str
    reason: str
    cause: str = WAITING_FOR_BUDGET

    @property
    def cause_is_refusal(self) -> bool:
        """Whether the GPU budget allows the pod to start but the API server rejected the removal of its scheduling gate."""
        return self.cause != WAITING_FOR_BUDGET


@dataclass(frozen=True, slots=True)
class UngatePlan:
    """Pods with a scheduling gate that the GPU budget allows to start now, and pods with one that have to wait.

    Attributes:
        ungate: UIDs of the pods whose gate should be removed, in this order.
        waiting: The other pods with a gate.
        gpus: Number of GPUs that count against the budget before the pods in ``ungate`` start.
    """

    ungate: tuple[str, ...]
    waiting: tuple[WaitingPod, ...]
    gpus: int


def plan_ungating(
    pods: Iterable[PodView],
    *,
    budget: int | None,
    priorities: Mapping[str, int],
    held: Mapping[str, ServiceReservation],
    now_s: float,
) -> UngatePlan:
    """Return which pods with a scheduling gate can start within the GPU budget, and why the others have to wait.

    Args:
        pods: All worker pods of the graph; pods whose gate this operator has just removed must be passed without the
            gate, although the watch still shows it.
        budget: Maximum number of GPUs of existing workers; None means no limit.
        priorities: ``scaling.priority`` by service; 0 for services that are not listed.
        held: Replicas of each service that occupied GPUs at the previous reconcile; empty if unknown.
        now_s: Current Unix time in seconds.
    """
    present = [pod for pod in pods if not pod.finished]
    terminating = [pod for pod in present if pod.terminating and not pod.gated]
    remaining = units([pod for pod in present if not pod.terminating])
    running = [unit for unit in remaining if unit.started]
    gpus = sum(pod.gpus for pod in terminating) + sum(unit.all_gpus for unit in running)
    terminating_gpus = sum(
        pod.gpus for pod in terminating if pod.deleted_s is None or now_s < pod.deleted_s + OVERDUE_S
    )
    allowed: list[str] = []
    for unit in running:  # remaining pods of a group whose GPUs already count
        if budget is None or gpus <= budget:
            allowed += _gated_in_order(unit)
    missing = missing_replicas(held, present)
    first, rest = _queue_order([unit for unit in remaining if not unit.started], running, priorities, missing)
    missing.subtract(unit.service for unit in first)
    reserved_gpus = sum(number * held[service].gpus for service, number in (+missing).items())
    queue = [*((unit, 0) for unit in first), *((unit, reserved_gpus) for unit in rest)]
    started, waiting = _admit(queue, gpus, terminating_gpus, budget)
    allowed += [uid for unit in started for uid in _gated_in_order(unit)]
    over = [
        WaitingPod(pod.uid, pod.name, pod.service, f"{gpus} GPUs are in use and the budget is {budget}")
        for unit in running
        for pod in unit.gated
        if pod.uid not in allowed
    ]
    return UngatePlan(tuple(allowed), tuple(sorted([*over, *waiting], key=lambda each: each.name)), gpus)


def blocked_on_budget(found: UngatePlan, pods: Iterable[PodView]) -> frozenset[str]:
    """Return the services whose pods wait for GPUs of the budget that no terminating pod will return.

    Returns an empty set if a waiting pod can start now, or if any pod is terminating.

    Args:
        found: Pods that can start and pods that have to wait, from `plan_ungating`.
        pods: The pods from which ``found`` was computed.
    """
    if found.ungate or any(pod.terminating and not pod.finished for pod in pods):
        return frozenset()
    return frozenset(each.service for each in found.waiting)


def blocked(found: UngatePlan, pods: Iterable[PodView]) -> Counter[str]:
    """Return, by service, the number of replicas that cannot run because the GPU budget has no room.

    A replica that only waits for the GPUs of a terminating replica of its own service does not count.

    Args:
        found: Pods that can start and pods that have to wait, from `plan_ungating`.
        pods: The pods from which ``found`` was computed.
    """
    waiting = {each.uid for each in found.waiting}
    present = [pod for pod in pods if not pod.finished]
    count = Counter(each.service for each in units([p for p in present if p.uid in waiting]))
    terminating = units([p for p in present if p.terminating and not p.gated])
    count.subtract(each.service for each in terminating)
    return +count


def _gated_in_order(unit: Unit) -> list[str]:
    return [pod.uid for pod in sorted(unit.gated, key=lambda pod: (pod.worker_index, pod.name))]


def _queue_order(
    gated: Sequence[Unit], running: Sequence[Unit], priorities: Mapping[str, int], missing: Mapping[str, int]
) -> tuple[list[Unit], list[Unit]]:
    """Return the waiting replicas in order, in two lists: those for empty roles and replacements, and the rest.

    Only the first replica of an empty role has precedence.
    """
    filled = {unit.first.role for unit in running}
    by_role: dict[str, list[Unit]] = defaultdict(list)

    def rank(unit: Unit) -> tuple[int, float, str]:
        return (-priorities.get(unit.service, 0), unit.first.created_s, unit.first.name)

    ordered = sorted(gated, key=rank)
    for unit in ordered:
        by_role[unit.first.role].append(unit)
    for_empty_roles = [waiting[0] for role, waiting in by_role.items() if role not in filled]
    for_empty_roles.sort(key=rank)
    seen = Counter(unit.service for unit in for_empty_roles)
    replacements: list[Unit] = []
    others: list[Unit] = []
    for unit in ordered:
        if not any(unit is each for each in for_empty_roles):
            is_replacement = seen[unit.service] < missing.get(unit.service, 0)
            (replacements if is_replacement else others).append(unit)
            seen[unit.service] += 1
    return for_empty_roles + replacements, others


def _admit(
    queue: Sequence[tuple[Unit, int]], gpus: int, terminating_gpus: int, budget: int | None
) -> tuple[list[Unit], list[WaitingPod]]:
    """Return the replicas that start and the pods that wait; each entry of ``queue`` is a replica with the GPUs reserved for replacements."""
    started: list[Unit] = []
    waiting: list[WaitingPod] = []
    next_in_line: Unit | None = None
    for unit, reserved_gpus in queue:
        need = unit.all_gpus
        headroom = None if budget is None else budget - gpus - reserved_gpus
        if headroom is None or (need <= headroom and next_in_line is None):
            started.append(unit)
            gpus += need
            continue
        reason = _reason(need, headroom, terminating_gpus + reserved_gpus, budget, next_in_line)
        waiting += [WaitingPod(pod.uid, pod.name, pod.service, reason) for pod in unit.gated]
        if next_in_line is None and headroom < need <= headroom + terminating_gpus:
            next_in_line = unit
    return started, waiting


def _reason(
    need: int, headroom: int, expected_gpus: int, budget: int | None, next_in_line: Unit | None
) -> str:
    free = f"needs {need} of {budget} GPUs and {max(0, headroom)} are free"
    if budget is not None and need > budget:
        return f"needs {need} GPUs, more than the budget of {budget}; raise planner.maxGpuBudget or its pool's GPUs"
    if next_in_line is not None:
        return f"{free}; {next_in_line.service} is next in line"
    if need <= headroom + expected_gpus:
        return f"{free}; {expected_gpus} more are being freed"
    return f"{free}; scale something down, or raise planner.maxGpuBudget or its pool's GPUs"
