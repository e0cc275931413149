"""The router's state machine: admission, queues, dispatch and the workers' circuits; events in, effects out. Pure.

The live driver is `penstock.router.admission`, the virtual one `penstock.simulator.routing`. Each call takes the time
in simulated seconds and returns what the driver has to do, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Generic, TypeVar

from penstock.api import Role, Tier
from penstock.router.core.assignment import Assignment
from penstock.router.core.busy_workers import ALL_BUSY, BusyWorkers
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.effects import Dispatch, Effects, RefusalReason, Refuse
from penstock.router.core.queue_sharing import QueuedPrompt, QueueSharing
from penstock.router.core.tier_backlog import TierBacklog, line_tokens
from penstock.router.core.tier_control import TierControl
from penstock.router.core.turned_away import TurnedAway
from penstock.router.core.wake import WakeTimes
from penstock.router.core.worker import Worker
from penstock.router.core.worker_pool import WorkerPool
from penstock.router.core.worker_spec import WorkerSpec
from penstock.router.policy.busy import BusyThresholds
from penstock.router.policy.routing_policy import Arrival, AssignTime

T = TypeVar("T")

REBALANCE_S = 1.0
"""Chosen: a third of the shortest silence that `decode_delay_s` takes for a bottleneck by default; simulated
seconds."""


class RouterCore(Generic[T]):
    """One router: its workers, and a queue for each role that a request passes.

    Attributes:
        pool: The workers.
        entry: Role of the first stage.
        queues: By role, the first stage's first. Nothing is dispatched in the first stage while no worker of the
            second can be routed to, because a prefill without a decode worker only pins KV blocks.
        busy: By role, the workers that take no new requests. A new request is rejected while that is all of a stage's.
        paused: Roles to whose workers nothing is dispatched for now.
        sharing: What other routers are told of the first stage's queues.
        tiers: Sheds and counts by tier; None: requests have no tiers.
        wake: How long workers take that are started for a request; None: requests wait for none.
        speed: Simulated seconds per second of a client, who is told how long he waited.
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
        self.sharing = QueueSharing()
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

    @property
    def entry_queue(self) -> DispatchQueue[T]:
        """The first stage's queue."""
        return self.queues[self.entry]

    # ------------------------------------------------------------------ requests

    def acquire(
        self, item: T, role: Role, arrival: Arrival, now_s: float, *, again: bool = False
    ) -> Effects[T]:
        """Ask for a worker of a role.

        Args:
            item: The request, unique among those of the role.
            role: A stage's.
            arrival: What the policy may know.
            now_s: Simulated seconds.
            again: It was admitted before: it meets no bound, and waits before all others.
        """
        refused = self._refusal(item, role, arrival, now_s, is_new=role is self.entry and not again)
        if refused is not None:
            return [self._refuse(refused, now_s)]
        queue, busy = self.queues[role], self.busy[role]
        if busy.is_any and queue.policy.assigns is AssignTime.ON_ARRIVAL:
            arrival = self._avoiding(arrival, role)
        moved = queue.moved
        if not queue.submit(item, arrival, now_s, again=again):
            message = f"{len(queue)} requests wait for {role} already; retry later"
            full = Refuse(item, role, RefusalReason.QUEUE_FULL, message, self._wake_left_s(now_s))
            return [self._refuse(full, now_s)]
        if self.tiers is not None:
            self._held[role].enter(item, arrival.tier, arrival.tokens)
            if role is self.entry:
                self._uncomputed.enter(item, arrival.tier, queue.uncached_tokens(item) or 0)
        if role is self.entry and self.sharing.is_on:
            self.sharing.queued(queue.worker_of(item), arrival)
        self._load_changed(role, now_s, queue.worker_of(item) if queue.moved == moved else None)
        return self._dispatch(role, now_s)

    def full_stage(self, role: Role, now_s: float, *, is_new: bool = True) -> Role | None:
        """Follow the workers; return the stage for which a request must be rejected; None: it may go on.

        It must be where none of a stage's workers takes it.

        Args:
            role: The stage that it asks for.
            now_s: Simulated seconds.
            is_new: It was not admitted before: busy workers of this and later stages are not for it. Else only
                those are not that have refused a request themselves.
        """
        if not is_new:
            self._follow(role, now_s)
            return role if self.busy[role].all_at_capacity(self._names[role]) else None
        for each in self._needed(role):
            self._follow(each, now_s)
            names, busy = self._names[each], self.busy[each]
            if busy.none_takes(names):
                return each
            backlog = 0 if each is Role.DECODE else self.queues[each].backlog_tokens
            if backlog and names and busy.prefill_limit_exceeded(backlog / len(names)):
                return each
        return None

    def prefilled(
        self,
        assignment: Assignment[T],
        now_s: float,
        *,
        cached_tokens: int | None = None,
        measured: bool = True,
    ) -> Effects[T]:
        """Note that a worker has computed a prompt; what follows there is decoding.

        Args:
            assignment: The request's.
            now_s: Simulated seconds.
            cached_tokens: Prompt tokens that the worker found in its cache; None: not known.
            measured: Whether this is noticed as it happens, and not only at the end of the answer.
        """
        role, queue = assignment.role, self.queues[assignment.role]
        self._uncomputed.leave(assignment.item)
        before = queue.prompt_tokens.computed
        queue.prefilled(assignment.item, now_s, cached_tokens=cached_tokens, measured=measured)
        self.busy[role].computed(queue.prompt_tokens.computed - before, now_s)
        self._load_changed(role, now_s, assignment.worker.name)
        return self._dispatch_waiting(role, now_s)

    def release(self, assignment: Assignment[T], now_s: float) -> Effects[T]:
        """End a request's stay at its worker; does nothing the second time."""
        if not assignment.is_open:
            return []
        role = assignment.role
        self._left(assignment.item, role)
        assignment.end()
        self.queues[role].release(assignment.item, now_s)
        self.busy[role].released(assignment.worker, now_s - assignment.since_s)
        self._load_changed(role, now_s, assignment.worker.name)
        return self._dispatch_waiting(role, now_s)

    def withdraw(self, item: T, role: Role, now_s: float) -> None:
        """Take out a waiting request whose client has left; does nothing when it does not wait."""
        name = self.queues[role].worker_of(item)
        self.queues[role].withdraw(item)
        self._left(item, role)
        self._load_changed(role, now_s, name)

    # ------------------------------------------------------------------ the workers' load

    def load_read(self, worker: Worker, now_s: float) -> Effects[T]:
        """Take note that a worker's metrics were read again."""
        role = worker.spec.role
        if role not in self.queues:
            return []
        self.busy[role].load_read(worker)
        self.queues[role].fit_cache(worker.name)
        self._load_changed(role, now_s, worker.name)
        return self._dispatch_waiting(role, now_s)

    def choose(self, arrival: Arrival, now_s: float) -> str:
        """Return the worker of the first stage that a request would wait for; see `DispatchQueue.choose`."""
        self._follow(self.entry, now_s)
        if self.busy[self.entry].is_any:
            arrival = self._avoiding(arrival, self.entry)
        return self.entry_queue.choose(arrival, now_s)

    def passed_on(self, worker: str, arrival: Arrival, now_s: float) -> None:
        """Take note that a request went to the router that keeps a worker's queue."""
        tokens = self.entry_queue.learn(worker, arrival)
        self.sharing.passed_on(worker, tokens, now_s)
        self.entry_queue.set_peer_tokens(worker, self.entry_queue.peer_tokens(worker) + tokens)
        self._load_changed(self.entry, now_s, worker)

    def prompts_told(self, prompts: Iterable[QueuedPrompt]) -> None:
        """Take note of what another router has queued."""
        for prompt in prompts:
            self.entry_queue.learn(prompt.worker, prompt.arrival)

    def set_peer_tokens(
        self, tokens: Mapping[str, int], now_s: float, *, asked_s: float | None = None
    ) -> None:
        """Set the tokens that other routers have in flight at each worker of the first stage, as last heard.

        Args:
            tokens: By worker.
            now_s: Simulated seconds.
            asked_s: When they were asked: what was passed on to them since comes on top. None: now.
        """
        untold = self.sharing.untold(tokens, now_s if asked_s is None else asked_s)
        for name, count in tokens.items():
            self.entry_queue.set_peer_tokens(name, count + untold[name])
            self._load_changed(self.entry, now_s, name)

    def own_tokens(self, now_s: float) -> dict[str, int]:
        """Return what this router alone has at each worker of the first stage, for the others; see `pending_tokens`."""
        queue = self.entry_queue
        found = {name: queue.pending_tokens(name, now_s) for name in self._names[self.entry]}
        return {name: tokens for name, tokens in found.items() if tokens > 0}

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

    def refused_at_capacity(self, worker: Worker, now_s: float) -> None:
        """Take note that a worker has no room for another request, whatever its metrics said."""
        self.busy[worker.spec.role].refused(worker.name, now_s)

    def set_thresholds(self, thresholds: BusyThresholds, now_s: float) -> None:
        """Take new thresholds for the workers of every stage; they hold for the next request."""
        for role, busy in self.busy.items():
            busy.set_thresholds(thresholds)
            self._loads_changed(role, now_s)

    # ------------------------------------------------------------------ workers and time

    def set_workers(self, specs: Iterable[WorkerSpec], now_s: float) -> Effects[T]:
        """Take over what discovery reports; new processes have empty caches."""
        for worker in self.pool.apply(specs):
            queue = self.queues.get(worker.spec.role)
            if queue is not None:
                queue.worker_restarted(worker.name)
        return self.workers_changed(now_s)

    def workers_changed(self, now_s: float) -> Effects[T]:
        """Take note of a change in the workers' health or drains."""
        self._follow_service(now_s)
        effects: Effects[T] = []
        for role in self.queues:
            self._follow(role, now_s)
            self._loads_changed(role, now_s)
            effects += self._dispatch(role, now_s)
        return effects

    def expire(self, now_s: float) -> Effects[T]:
        """Refuse what has waited as long as it may."""
        self._follow_service(now_s)
        effects: Effects[T] = []
        left_s = self._wake_left_s(now_s)
        for role, queue in self.queues.items():
            for queued in queue.take_expired(now_s, served_s=self._served_s, hold_s=self.hold_s):
                if self.tiers is not None and role is self.entry:
                    self.tiers.timed_out(queued.arrival.tier, now_s)
                self._left(queued.item, role)
                self._load_changed(role, now_s, queued.worker)
                waited_s = (now_s - queued.since_s) / self.speed
                message = f"no worker took the request within {waited_s:.1f} s; retry later"
                late = Refuse(queued.item, role, RefusalReason.QUEUE_TIMEOUT, message, left_s)
                effects.append(self._refuse(late, now_s))
        return effects

    def tick(self, now_s: float) -> Effects[T]:
        """Do what time alone asks for: relieve decode-bound workers, and dispatch where room has come."""
        queue = self.entry_queue
        if self._rebalanced_s is None or now_s - self._rebalanced_s >= REBALANCE_S:
            self._rebalanced_s = now_s
            if queue.settings.rebalances:
                queue.rebalance(now_s)
        queue.assume_prefilled(now_s)
        if self.tiers is not None:
            self.tiers.tick(now_s, queue.waiting_requests)
        return self.workers_changed(now_s)

    def problems(self, now_s: float) -> list[str]:
        """Return why a request would not be served now; empty when it would, or would wait for workers to come back."""
        queue = self.entry_queue
        found = [f"prefill queue full: {len(queue)} requests wait"] if queue.is_full else []
        for role in self.queues if self.wake is None else ():
            if not self.pool.routable(role, now_s):
                states = [f"{w.name} {w.state(now_s)[1]}" for w in self.pool if w.spec.role is role]
                found.append(f"no {role} worker can be routed to: " + ("; ".join(states) or "none known"))
        return found

    # ------------------------------------------------------------------ within

    def _refusal(
        self, item: T, role: Role, arrival: Arrival, now_s: float, *, is_new: bool
    ) -> Refuse[T] | None:
        """Return why a request may not wait for a worker; None: it may, if the queue has room."""
        if self.tiers is not None and is_new:
            shed = self.tiers.arrived(arrival.tier)
            if shed is not None:
                recover_s = self.tiers.monitor.settings.recover_s
                return Refuse(item, role, RefusalReason.SHED, shed, recover_s)
        missing = self._no_worker_expected(role, now_s)
        if missing is not None:
            message = f"no {missing} worker can take the request; retry later"
            return Refuse(item, missing, RefusalReason.NO_WORKER, message)
        late = self._too_late(item, arrival, now_s) if is_new else None
        if late is not None:
            return late
        full = self.full_stage(role, now_s, is_new=is_new)
        if full is None or self._waits_its_turn(arrival.tier, full, is_new=is_new):
            return None
        return Refuse(item, full, RefusalReason.ALL_BUSY, ALL_BUSY, self.busy[full].free_in_s())

    def _needed(self, role: Role) -> Iterable[Role]:
        """Return the roles that must serve for a request to start in a stage: its own and those after it."""
        return self.queues if role is self.entry else (role,)

    def _no_worker_expected(self, role: Role, now_s: float) -> Role | None:
        """Return a needed role of which no worker serves, and none will by itself or for the request."""
        if self.wake is not None and role is self.entry:
            return None
        for each in self._needed(role):
            if not self.pool.routable(each, now_s) and not self.pool.expects(each):
                return each
        return None

    @property
    def hold_s(self) -> float:
        """How long a request waits for workers that are started for it, simulated seconds; inf: as configured."""
        return inf if self.wake is None else self.wake.hold_s

    def _too_late(self, item: T, arrival: Arrival, now_s: float) -> Refuse[T] | None:
        """Refuse a request whose time is over before even the fastest start is done; None: it may wait.

        It wakes the workers all the same, as every arrival that is counted.
        """
        if self.wake is None or self.pool.knows_any(self.queues):
            return None
        self.wake.asked(now_s)
        least_s = self.wake.least_left_s(now_s)
        if now_s + least_s <= self.entry_queue.settings.deadline_s(arrival.tier, now_s, served_s=inf):
            return None
        message = f"workers are being started, which takes {least_s / self.speed:.0f} s at least; retry later"
        return Refuse(item, self.entry, RefusalReason.NO_WORKER, message, self.wake.left_s(now_s))

    def _refuse(self, refuse: Refuse[T], now_s: float) -> Refuse[T]:
        self.turned_away[refuse.role].add(now_s)
        return refuse

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
        """Tell a queue which workers may be chosen; circuits open and close without a change of the pool."""
        workers = self.pool.routable(role, now_s)
        if workers is not self._routable[role] and workers != self._routable[role]:
            self._routable[role] = workers
            self._names[role] = frozenset(each.name for each in workers)
            quarantined = {each.name for each in self.pool if each.keeps_its_cache}
            self.queues[role].set_workers(workers, now_s, quarantined=quarantined)
            self._loads_changed(role, now_s)

    def _waits_its_turn(self, tier: Tier, full: Role, *, is_new: bool) -> bool:
        """Return whether a request may wait for a stage that takes none now, so that its tier gets its share of it.

        That is while others are what fills it, and its own tier has less than its part in the first stage.
        """
        if self.tiers is None or not is_new or tier is Tier.SYSTEM:
            return self.tiers is not None
        busy, names = self.busy[full], self._names[full]
        if not (self._uncomputed if busy.have_blocks(names) else self._held[full]).has_others(tier):
            return False
        entry = self.busy[self.entry]
        limit = entry.thresholds.prefill_limit(entry.batch_tokens) or 0.0
        line = line_tokens(self.tiers.settings, tier, limit) * len(self._names[self.entry])
        return self._uncomputed.tokens[tier] < line

    def _left(self, item: T, role: Role) -> None:
        self._uncomputed.leave(item)
        self._held[role].leave(item)

    def _avoiding(self, arrival: Arrival, role: Role) -> Arrival:
        """Return a request that passes over busy workers, unless that leaves only such as have failed it."""
        names = self._names[role]
        passed_over = self.busy[role].not_taking(names)
        return arrival.avoiding(passed_over) if names - passed_over - arrival.avoid else arrival

    def _load_changed(self, role: Role, now_s: float, name: str | None) -> None:
        """Decide again whether a worker is busy; None: every worker of the role."""
        busy = self.busy[role]
        if not busy.thresholds.is_set:
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
        if busy.thresholds.is_set:
            for name in names:
                self._load_changed(role, now_s, name)

    def _dispatch_waiting(self, role: Role, now_s: float) -> Effects[T]:
        effects = self._dispatch(role, now_s) if self.queues[role].waiting else []
        if self.tiers is not None and role is not self.entry and self.entry_queue.waiting:
            effects += self._dispatch(self.entry, now_s)
        return effects

    def _dispatch(self, role: Role, now_s: float) -> Effects[T]:
        self._follow(role, now_s)
        queue, pool = self.queues[role], self.pool
        if not queue.waiting or role in self.paused:
            return []
        for each in self._needed(role):
            if not pool.routable(each, now_s):
                return []
        holds = self.tiers is not None and role is self.entry
        if holds and not all(self.busy[each].have_blocks(self._names[each]) for each in self._needed(role)):
            return []
        busy, closed = self.busy[role], self._closed_to_dispatch(role)

        def is_open(name: str) -> bool:
            worker = pool.get(name)
            if name in closed or (holds and not busy.has_blocks(name)):
                return False
            return worker is None or worker.breaker.is_closed or worker.breaker.allows(now_s, is_last=True)

        is_any_open = pool.are_closed(role) and not closed and not (holds and busy.thresholds.is_set)
        effects: Effects[T] = []
        for queued in queue.dispatch(now_s, None if is_any_open else is_open):
            worker = pool.get(queued.worker)
            assert worker is not None  # noqa: S101 - `_follow` has named the pool's own workers
            if self.tiers is not None and role is self.entry:
                self.tiers.dispatched(queued.arrival.tier, max(0.0, now_s - queued.since_s))
            effects.append(
                Dispatch(
                    Assignment(
                        queued.item,
                        worker,
                        queued.tokens,
                        now_s=now_s,
                        queued_s=max(0.0, now_s - queued.since_s),
                        reason=queued.reason,
                    )
                )
            )
            self._load_changed(role, now_s, queued.worker)
        return effects

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
