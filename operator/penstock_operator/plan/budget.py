"""Which gated pods may start now, so that existing workers never hold more GPUs than the graph's budget.

Pure. Every worker pod of a graph with a ceiling is born with a scheduling gate, which only the operator lifts. A pod
counts from its release until it is finished or gone, terminating or not. A view that lags can delay a start and never
exceed the budget: a pod not seen yet is gated, one seen too long counts too long, and releases not seen yet are handed in.

**Order.** A role with nothing running or released first, because a graph with an empty role serves nothing; then the
replacement of a replica that the same service has lost; then the higher ``scaling.priority``; then the older; then by name.

**Head of the line.** A replica that does not fit keeps the free GPUs to itself only while replicas on their way out
(terminating, deadline not past) will complete its room, so that small ones cannot slip past a big one for ever. If
nothing on its way out would make room, holding GPUs back would only idle them, and those behind it pass; that delays no
replica as long as all wanted ones together fit the budget.

**Groups.** A LeaderWorkerSet group starts completely or not at all: the first release takes the GPUs of the
entire group, whose remaining pods then start as they appear.

**Lost replicas.** A rollout, a kill or a lost node frees GPUs a moment before the replacement asks for them. So that no
other service's waiting pod takes them, what a service held stays its own while its workload wants that many replicas, for
`KEEP_S` also before the replacement exists.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock_operator.plan.pods import PodView


@dataclass(frozen=True, slots=True)
class Unit:
    """One replica: a pod, or all pods of a group."""

    pods: list[PodView]

    @property
    def started(self) -> bool:
        """Whether a pod of it is released, so that all of it counts against the budget."""
        return not all(pod.gated for pod in self.pods)

    @property
    def first(self) -> PodView:
        """Return the unit's oldest pod."""
        return min(self.pods, key=lambda pod: (pod.created_s, pod.name))

    @property
    def service(self) -> str:
        """Service that it belongs to."""
        return self.pods[0].service

    @property
    def gated(self) -> list[PodView]:
        """Return the unit's pods that the budget's gate still holds."""
        return [pod for pod in self.pods if pod.gated]

    @property
    def all_gpus(self) -> int:
        """GPUs of the complete replica, also of pods that do not exist yet."""
        size = max(pod.group_size for pod in self.pods)
        return max(size * max(pod.gpus for pod in self.pods), sum(pod.gpus for pod in self.pods))


def units(pods: Iterable[PodView]) -> list[Unit]:
    """Return the replicas that ``pods`` are part of."""
    found: dict[tuple[str, str], Unit] = {}
    for pod in pods:
        key = (pod.service, f"group {pod.group}" if pod.group else f"pod {pod.uid}")
        found.setdefault(key, Unit([])).pods.append(pod)
    return list(found.values())


def released(pods: Iterable[PodView], uids: Collection[str]) -> list[PodView]:
    """Return the pods as they are once the gates of those with these uids are lifted, which a watch may not show yet."""
    return [replace(pod, gates=()) if pod.uid in uids else pod for pod in pods]


KEEP_S: Final = 10.0
"""How long GPUs are kept for a replacement that does not exist yet. Chosen: a workload's controller makes it
within a second; one whose pods are refused must not hold up the others."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one service holds.

    Attributes:
        replicas: Replicas that hold GPUs, terminating ones and those lost since ``lost_s`` included.
        gpus: GPUs of one of them.
        lost_s: Since when fewer hold GPUs, seconds since the epoch; None: all of them do.
    """

    replicas: int
    gpus: int
    lost_s: float | None = None


def holdings(
    pods: Iterable[PodView],
    before: Mapping[str, Holding],
    *,
    replicas: Mapping[str, int],
    now_s: float,
) -> dict[str, Holding]:
    """Return what each service holds, including what it is to get back of what it held before.

    ``replicas`` are, by service, the number that its workload is to have; the rest is as in `releases`.
    """
    started = _started(pods)
    counts = Counter(each.service for each in started)
    found = {}
    for service in {*counts, *before} & set(replicas):
        sizes = [each.all_gpus for each in started if each.service == service]
        was = before.get(service)
        number, wanted = counts[service], replicas[service]
        gpus = max(sizes) if was is None or sizes else was.gpus
        kept = 0 if was is None else min(was.replicas, wanted)
        lost_s = now_s if was is None or was.lost_s is None else was.lost_s
        if number < kept and now_s - lost_s < KEEP_S:
            found[service] = Holding(kept, gpus, lost_s)
        else:
            found[service] = Holding(min(number, wanted), gpus)
    return found


def lost(held: Mapping[str, Holding], pods: Iterable[PodView]) -> Counter[str]:
    """Return how many replicas each service has lost, of those that it held, that it is to get back."""
    missing = Counter({service: each.replicas for service, each in held.items()})
    missing.subtract(each.service for each in _started(pods))
    return +missing


def _started(pods: Iterable[PodView]) -> list[Unit]:
    return [each for each in units([pod for pod in pods if not pod.finished]) if each.started]


OVERDUE_S: Final = 60.0
"""A terminating pod this long past its deadline is stuck (its node is gone, most likely); nothing waits for it. Chosen."""


WAITING: Final = "WaitingForBudget"
"""Why most gated pods wait, as a condition's reason."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A gated pod that may not start yet, and why: one sentence for a person, the same for the same state.

    Attributes:
        cause: One word for it, a condition's reason.
    """

    uid: str
    name: str
    service: str
    reason: str
    cause: str = WAITING

    @property
    def cause_is_refusal(self) -> bool:
        """Whether the budget would let it start and the API server does not."""
        return self.cause != WAITING


@dataclass(frozen=True, slots=True)
class Releases:
    """What the budget allows now.

    Attributes:
        release: Uids of the pods whose gate to lift, in order.
        waiting: The gated pods that stay.
        gpus: GPUs that count against the budget before ``release``.
    """

    release: tuple[str, ...]
    waiting: tuple[Waiting, ...]
    gpus: int


def releases(
    pods: Iterable[PodView],
    *,
    budget: int | None,
    priorities: Mapping[str, int],
    held: Mapping[str, Holding],
    now_s: float,
) -> Releases:
    """Return which gated pods may start and why the others wait.

    Args:
        pods: All worker pods of the graph; those whose gate this operator has lifted as `released` returns them.
        budget: Most GPUs that existing workers may hold together; None: no ceiling.
        priorities: ``scaling.priority`` by service; 0 where absent.
        held: What each service held at the last look; empty if unknown.
        now_s: Seconds since the epoch.
    """
    present = [pod for pod in pods if not pod.finished]
    leaving = [pod for pod in present if pod.terminating and not pod.gated]
    staying = units([pod for pod in present if not pod.terminating])
    running = [unit for unit in staying if unit.started]
    gpus = sum(pod.gpus for pod in leaving) + sum(unit.all_gpus for unit in running)
    coming = sum(pod.gpus for pod in leaving if pod.deleted_s is None or now_s < pod.deleted_s + OVERDUE_S)
    allowed: list[str] = []
    for unit in running:  # the rest of a group whose GPUs are taken already
        if budget is None or gpus <= budget:
            allowed += _to_lift(unit)
    missing = lost(held, present)
    first, rest = _line([unit for unit in staying if not unit.started], running, priorities, missing)
    missing.subtract(unit.service for unit in first)
    kept = sum(number * held[service].gpus for service, number in (+missing).items())
    line = [*((unit, 0) for unit in first), *((unit, kept) for unit in rest)]
    started, waiting = _admit(line, gpus, coming, budget)
    allowed += [uid for unit in started for uid in _to_lift(unit)]
    over = [
        Waiting(pod.uid, pod.name, pod.service, f"{gpus} GPUs are in use and the budget is {budget}")
        for unit in running
        for pod in unit.gated
        if pod.uid not in allowed
    ]
    return Releases(tuple(allowed), tuple(sorted([*over, *waiting], key=lambda each: each.name)), gpus)


def blocked_on_budget(found: Releases, pods: Iterable[PodView]) -> frozenset[str]:
    """Return the services whose gated pods, of those asked about, wait for GPUs that nothing on its way out will free."""
    if found.release or any(pod.terminating and not pod.finished for pod in pods):
        return frozenset()
    return frozenset(each.service for each in found.waiting)


def blocked(found: Releases, pods: Iterable[PodView]) -> Counter[str]:
    """Return how many replicas of each service the budget keeps from running.

    A replica that only waits for the GPUs of a leaving one of its own service is not among them.
    """
    waiting = {each.uid for each in found.waiting}
    present = [pod for pod in pods if not pod.finished]
    count = Counter(each.service for each in units([p for p in present if p.uid in waiting]))
    leaving = units([p for p in present if p.terminating and not p.gated])
    count.subtract(each.service for each in leaving)
    return +count


def _to_lift(unit: Unit) -> list[str]:
    return [pod.uid for pod in sorted(unit.gated, key=lambda pod: (pod.worker_index, pod.name))]


def _line(
    gated: Sequence[Unit], running: Sequence[Unit], priorities: Mapping[str, int], missing: Mapping[str, int]
) -> tuple[list[Unit], list[Unit]]:
    """Return the waiting replicas in their order, those of empty roles and replacements apart from the rest.

    One placed in an empty role ends that role's precedence.
    """
    filled = {unit.first.role for unit in running}
    by_role: dict[str, list[Unit]] = defaultdict(list)

    def rank(unit: Unit) -> tuple[int, float, str]:
        return (-priorities.get(unit.service, 0), unit.first.created_s, unit.first.name)

    ordered = sorted(gated, key=rank)
    for unit in ordered:
        by_role[unit.first.role].append(unit)
    heads = [line[0] for role, line in by_role.items() if role not in filled]
    heads.sort(key=rank)
    seen = Counter(unit.service for unit in heads)
    replacements: list[Unit] = []
    others: list[Unit] = []
    for unit in ordered:
        if not any(unit is head for head in heads):
            is_replacement = seen[unit.service] < missing.get(unit.service, 0)
            (replacements if is_replacement else others).append(unit)
            seen[unit.service] += 1
    return heads + replacements, others


def _admit(
    line: Sequence[tuple[Unit, int]], gpus: int, coming: int, budget: int | None
) -> tuple[list[Unit], list[Waiting]]:
    """Return who starts and who waits of a line, each with the GPUs that it leaves to replacements yet to come."""
    started: list[Unit] = []
    waiting: list[Waiting] = []
    held_for: Unit | None = None
    for unit, kept in line:
        need = unit.all_gpus
        headroom = None if budget is None else budget - gpus - kept
        if headroom is None or (need <= headroom and held_for is None):
            started.append(unit)
            gpus += need
            continue
        reason = _reason(need, headroom, coming + kept, budget, held_for)
        waiting += [Waiting(pod.uid, pod.name, pod.service, reason) for pod in unit.gated]
        if held_for is None and headroom < need <= headroom + coming:
            held_for = unit
    return started, waiting


def _reason(need: int, headroom: int, coming: int, budget: int | None, held_for: Unit | None) -> str:
    free = f"needs {need} of {budget} GPUs and {max(0, headroom)} are free"
    if budget is not None and need > budget:
        return f"needs {need} GPUs, more than the budget of {budget}; raise planner.maxGpuBudget or its pool's GPUs"
    if held_for is not None:
        return f"{free}; {held_for.service} is next in line"
    if need <= headroom + coming:
        return f"{free}; {coming} more are being freed"
    return f"{free}; scale something down, or raise planner.maxGpuBudget or its pool's GPUs"
