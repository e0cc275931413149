"""A router's state: workers, their queues, busy ones, and each tier's requests by place; and its effects. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Generic, TypeVar

from penstock.api import Role
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.retries import Assignment
from penstock.router.core.tiers import HandedOver, TierBacklog, TierControl
from penstock.router.core.worker import Worker
from penstock.router.core.worker_pool import WorkerPool
from penstock.router.policy.busy import BusyWorkers
from penstock.router.policy.routing_policy import Arrival, AssignTime

T = TypeVar("T")


class RefusalReason(Enum):
    """Why a request gets no worker."""

    QUEUE_FULL = auto()
    QUEUE_TIMEOUT = auto()
    NO_WORKER = auto()
    SHED = auto()
    ALL_BUSY = auto()


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """A request gets no worker.

    Attributes:
        item: The request.
        role: Of the stage that has no worker for it.
        reason: Why.
        message: For the client: what was exceeded or is missing, and the remedy.
        retry_after_s: When there is expected to be room, simulated seconds from now; None: unknown.
    """

    item: T
    role: Role
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


Effects = list[Assignment[T] | Refuse[T]]
"""Each `Assignment` is a request that goes to its worker now; `RouterCore.release` ends it."""


LATELY_S = 15.0
"""Chosen: the time between two syncs of a HorizontalPodAutoscaler, so that each sees what was turned away since the last."""


class TurnedAway:
    """Counts of one stage of one router.

    Attributes:
        total: Rejected, shed, refused by a full queue, or timed out there, so far.
    """

    def __init__(self) -> None:
        self.total = 0
        self._at_s: deque[float] = deque()

    def add(self, now_s: float) -> None:
        """Count a request, at a simulated second."""
        self.total += 1
        self._at_s.append(now_s)
        self.lately(now_s)

    def lately(self, now_s: float) -> int:
        """Return how many were turned away within `LATELY_S` before now."""
        while self._at_s and self._at_s[0] <= now_s - LATELY_S:
            self._at_s.popleft()
        return len(self._at_s)


KEPT = 8
"""Wake-ups remembered. Chosen: a slow image pull counts for a while, and not for ever."""

LEARNT_FROM = 3
"""Wake-ups seen before they bound the wait. Chosen: a replica that was lost and not scaled to zero may be half started
when the first request comes; one such short time must not refuse requests."""

HOLD_FACTOR = 2.0
"""Chosen: starts vary with image caches and nodes. A wait that is too long costs only requests that are lost anyway, one
that is too short loses requests that would have been served."""


class WakeTimes:
    """The wake-ups of one router."""

    def __init__(self, max_s: float) -> None:
        """Know none yet; ``max_s`` is the longest wait that is configured, simulated seconds > 0."""
        self._max_s = max_s
        self._took_s: deque[float] = deque(maxlen=KEPT)
        self._begun_s: float | None = None
        self._was_served = False

    @property
    def slowest_s(self) -> float | None:
        """The slowest remembered wake-up, simulated seconds; None: too few were seen."""
        return max(self._took_s) if len(self._took_s) >= LEARNT_FROM else None

    @property
    def hold_s(self) -> float:
        """How long a request waits for a worker, simulated seconds: the configured bound until enough is learnt."""
        slowest_s = self.slowest_s
        return self._max_s if slowest_s is None else min(self._max_s, HOLD_FACTOR * slowest_s)

    def asked(self, now_s: float) -> None:
        """Record a request that finds no worker of any stage.

        Before workers have served once they may have begun to start long ago: that teaches nothing.
        """
        if self._begun_s is None and self._was_served:
            self._begun_s = now_s

    def served(self, now_s: float) -> None:
        """Record that every stage has a worker."""
        self._was_served = True
        if self._begun_s is not None:
            self._took_s.append(now_s - self._begun_s)
            self._begun_s = None

    def left_s(self, now_s: float) -> float | None:
        """Return how long workers are expected to take still, simulated seconds; None: none is being waited for.

        A wake-up that already takes longer than any remembered one, or than nothing, is expected to take as long again.
        """
        if self._begun_s is None:
            return None
        past_s, slowest_s = now_s - self._begun_s, self.slowest_s
        return slowest_s - past_s if slowest_s is not None and past_s < slowest_s else past_s

    def least_left_s(self, now_s: float) -> float:
        """Return the least time that workers take still, as the fastest remembered wake-up did; 0: any may be next."""
        if self._begun_s is None or len(self._took_s) < LEARNT_FROM:
            return 0.0
        return max(0.0, min(self._took_s) - (now_s - self._begun_s))


class RouterState(Generic[T]):
    """One router: its workers, and a queue for each role that a request passes.

    Attributes:
        pool: The workers.
        entry: Role of the first stage.
        queues: By role, the first stage's first. Nothing is dispatched in the first stage while no worker of the
            second can be routed to, because a prefill without a decode worker only pins KV blocks.
        busy: By role, the workers that take no new requests. A new request is rejected while that is all of a stage's.
        paused: Roles to whose workers nothing is dispatched for now.
        tiers: Sheds and counts by tier; None: requests have no tiers.
        wake: How long workers take that are started for a request; None: requests wait for none.
        speed: Simulated seconds per second of a client, to report how long it waited.
        turned_away: By role, the requests that it had no worker for.
    """

    def __init__(
        self,
        pool: WorkerPool,
        queues: Mapping[Role, DispatchQueue[T]],
        busy: Mapping[Role, BusyWorkers] | None = None,
    ) -> None:
        """Tie pool and queues; ``queues`` names the first stage first, ``busy`` the same stages or nothing."""
        self.pool = pool
        self.queues = dict(queues)
        self.busy = dict(busy or {role: BusyWorkers() for role in self.queues})
        self.entry = next(iter(self.queues))
        self.turned_away = {role: TurnedAway() for role in self.queues}
        self.paused: Collection[Role] = ()
        self.speed = 1.0
        self._routable: dict[Role, Sequence[Worker]] = {role: [] for role in self.queues}
        self._names: dict[Role, frozenset[str]] = {role: frozenset() for role in self.queues}
        self._rebalanced_s: float | None = None
        # Since when every stage has had a worker that may be chosen; inf: one has none.
        self._served_s = -inf
        self.tiers: TierControl | None = None
        max_wake_s = self.entry_queue.settings.max_wake_s
        self.wake = None if max_wake_s is None else WakeTimes(max_wake_s)
        # While requests have tiers: those of the first stage whose prompts are not computed, and all of each stage.
        self._uncomputed: TierBacklog[T] = TierBacklog()
        self._held: dict[Role, TierBacklog[T]] = {role: TierBacklog() for role in self.queues}
        self._handed_over: HandedOver[T] = HandedOver()

    @property
    def entry_queue(self) -> DispatchQueue[T]:
        """The first stage's queue."""
        return self.queues[self.entry]

    @property
    def hold_s(self) -> float:
        """How long a request waits for workers that are started for it, simulated seconds; inf: as configured."""
        return inf if self.wake is None else self.wake.hold_s

    def inflight_tokens(self, worker: Worker) -> int:
        """Return the tokens in flight at a worker, those of other routers included where they are known."""
        queue = self.queues.get(worker.spec.role)
        return worker.inflight_tokens + (0 if queue is None else queue.peer_tokens(worker.name))

    def active_prefill_tokens(self, worker: Worker) -> int:
        """Return the prompt tokens that a worker has still to compute; a decode worker computes none."""
        role = worker.spec.role
        if role is Role.DECODE or role not in self.queues:
            return 0
        return self.queues[role].prefill_tokens(worker.name)

    def _needed(self, role: Role) -> Iterable[Role]:
        """Return the roles that must serve for a request to start in a stage: its own and those after it."""
        return self.queues if role is self.entry else (role,)

    def _no_worker_expected(self, role: Role, now_s: float) -> Role | None:
        """Return a needed role without a serving worker, present or expected."""
        if self.wake is not None and role is self.entry:
            return None
        for each in self._needed(role):
            if not self.pool.routable(each, now_s) and not self.pool.expects(each):
                return each
        return None

    def _wake_left_s(self, now_s: float) -> float | None:
        return None if self.wake is None else self.wake.left_s(now_s)

    def _follow_service(self, now_s: float) -> None:
        if not all(self.pool.routable(role, now_s) for role in self.queues):
            self._served_s = inf
            return
        if self._served_s == inf:
            self._served_s = now_s
        if self.wake is not None:
            self.wake.served(now_s)

    def _follow(self, role: Role, now_s: float) -> None:
        """Set the workers that a queue may choose; circuits open and close without a change of the pool."""
        workers = self.pool.routable(role, now_s)
        if workers is not self._routable[role] and workers != self._routable[role]:
            self._routable[role] = workers
            self._names[role] = frozenset(each.name for each in workers)
            quarantined = {each.name for each in self.pool if each.keeps_its_cache}
            self.queues[role].set_workers(workers, now_s, quarantined=quarantined)
            self._loads_changed(role, now_s)

    def _avoiding(self, arrival: Arrival, role: Role) -> Arrival:
        """Return a request that passes over busy workers, unless that leaves only such as have failed it."""
        names = self._names[role]
        passed_over = self.busy[role].not_taking(names)
        return arrival.avoiding(passed_over) if names - passed_over - arrival.avoid else arrival

    def _load_changed(self, role: Role, now_s: float, name: str | None) -> None:
        """Decide again whether a worker is busy; None: every worker of the role."""
        busy = self.busy[role]
        if not busy.has_thresholds:
            return
        if name is None:
            self._loads_changed(role, now_s)
            return
        worker = self.pool.get(name)
        if worker is not None:
            queue, tokens = self.queues[role], self.active_prefill_tokens(worker)
            prompts = queue.prompts_at(name) if tokens and len(worker.kv_ranks) > 1 else ()
            peers = queue.peer_tokens(name)
            busy.refresh(worker, prefill_tokens=tokens, peer_tokens=peers, now_s=now_s, prompts=prompts)

    def _loads_changed(self, role: Role, now_s: float) -> None:
        names, busy = self._names[role], self.busy[role]
        busy.keep_only(names, now_s)
        if busy.has_thresholds:
            for name in names:
                self._load_changed(role, now_s, name)

    def _closed_to_dispatch(self, role: Role) -> frozenset[str]:
        """Return the workers that get nothing for now: those at capacity, and busy ones beside others with room.

        What already waits for a busy worker goes there, as its own queue is part of what makes it busy; with tiers, once
        it has KV blocks, so that the next of them goes to the tier whose turn it is.
        """
        busy, names = self.busy[role], self._names[role]
        if not busy.is_any:
            return frozenset()
        full = busy.at_capacity()
        if self.queues[role].policy.assigns is AssignTime.ON_ARRIVAL:
            return full
        return full | busy.not_taking(names)

    def _left(self, item: T, role: Role) -> None:
        if self.tiers is None:
            return
        self._uncomputed.leave(item)
        self._handed_over.leave(item)
        self._held[role].leave(item)
