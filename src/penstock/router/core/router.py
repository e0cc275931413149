"""The router's state machine: admission, queues, dispatch and the workers' circuits; events in, effects out. Pure.

The live driver is `penstock.router.admission`, the virtual one `penstock.simulator.routing`. Each call takes the time
in simulated seconds and returns the driver's actions, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from penstock.api import Role, Tier
from penstock.router.core.retries import Assignment
from penstock.router.core.router_state import Effects, RefusalReason, Refuse, RouterState, WakeTimes
from penstock.router.core.tiers import line_tokens
from penstock.router.core.worker import Worker
from penstock.router.core.worker_spec import WorkerSpec
from penstock.router.policy.arrival import QueuedRequest
from penstock.router.policy.busy import ALL_BUSY, BusyThresholds
from penstock.router.policy.routing_policy import Arrival, AssignTime

T = TypeVar("T")

REBALANCE_S = 1.0
"""Chosen: a third of the shortest silence that `decode_delay_s` takes for a bottleneck by default; simulated
seconds."""


@dataclass(frozen=True, slots=True)
class RunningAt:
    """Where a request runs that another router has dispatched.

    Attributes:
        worker: The worker's name.
        tokens: Prompt tokens, and what was generated so far.
        is_prefilled: Its prompt is computed.
        queued_s: How long it waited, simulated seconds.
        reason: Why this worker.
    """

    worker: str
    tokens: int
    is_prefilled: bool = False
    queued_s: float = 0.0
    reason: str = ""


class RouterCore(RouterState[T]):
    """One router: admits, dispatches and refuses as its workers allow."""

    # ------------------------------------------------------------------ requests

    def acquire(
        self,
        item: T,
        role: Role,
        arrival: Arrival,
        now_s: float,
        *,
        again: bool = False,
        waited_s: float | None = None,
    ) -> Effects[T]:
        """Ask for a worker of a role.

        Args:
            item: The request, unique among those of the role.
            role: A stage's.
            arrival: What the policy may know.
            now_s: Simulated seconds.
            again: It was admitted before: it meets no bound, and waits before all others.
            waited_s: Simulated seconds since another picker admitted it: no bound applies. None: it is new.
        """
        is_new = role is self.entry and not again and waited_s is None
        refused = self._refusal(item, role, arrival, now_s, is_new=is_new)
        if refused is not None:
            return [self._refuse(refused, now_s)]
        queue, busy = self.queues[role], self.busy[role]
        if busy.is_any and queue.policy.assigns is AssignTime.ON_ARRIVAL:
            arrival = self._avoiding(arrival, role)
        moved = queue.moved
        if not queue.submit(item, arrival, now_s, again=again, waited_s=waited_s):
            message = f"{len(queue)} requests wait for {role} already; retry later"
            full = Refuse(item, role, RefusalReason.QUEUE_FULL, message, self._wake_left_s(now_s))
            return [self._refuse(full, now_s)]
        if self.tiers is not None:
            self._held[role].enter(item, arrival.tier, arrival.tokens)
            if role is self.entry:
                self._uncomputed.enter(item, arrival.tier, queue.uncached_tokens(item) or 0)
        if busy.has_thresholds:
            self._load_changed(role, now_s, queue.worker_of(item) if queue.moved == moved else None)
        return self._dispatch(role, now_s)

    def full_stage(self, role: Role, now_s: float, *, is_new: bool = True) -> Role | None:
        """Update from the workers; return the stage for which a request must be rejected; None: it may continue.

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
            if not (busy.is_any or busy.has_thresholds):
                continue
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
        """Record that a worker has computed a prompt; it decodes from now on.

        Args:
            assignment: The request's.
            now_s: Simulated seconds.
            cached_tokens: Prompt tokens that the worker found in its cache; None: not known.
            measured: Whether this is noticed as it happens, and not only at the end of the answer.
        """
        role, queue = assignment.role, self.queues[assignment.role]
        if self.tiers is not None:
            self._uncomputed.leave(assignment.item)
            self._handed_over.begun(assignment.item, now_s)
        before = queue.prompt_tokens.computed
        queue.prefilled(assignment.item, now_s, cached_tokens=cached_tokens, measured=measured)
        if self.busy[role].has_thresholds:
            self.busy[role].computed(queue.prompt_tokens.computed - before, now_s)
            self._load_changed(role, now_s, assignment.worker.name)
        return self._dispatch_waiting(role, now_s)

    def release(self, assignment: Assignment[T], now_s: float) -> Effects[T]:
        """End a request's stay at its worker; does nothing the second time."""
        if not assignment.is_open:
            return []
        role, worker = assignment.role, assignment.worker
        queue, busy = self.queues[role], self.busy[role]
        if self.tiers is not None:
            self._left(assignment.item, role)
        assignment.end()
        before = queue.prompt_tokens.computed
        queue.release(assignment.item, now_s, is_computed=assignment.is_computed)
        busy.released(worker, now_s - assignment.since_s)
        if busy.has_thresholds:
            busy.computed(queue.prompt_tokens.computed - before, now_s)
            self._load_changed(role, now_s, worker.name)
        return self._dispatch_waiting(role, now_s)

    def cancel(self, item: T, role: Role, now_s: float) -> None:
        """Take out a waiting request whose client has left; does nothing when it does not wait."""
        name = self.queues[role].worker_of(item)
        self.queues[role].cancel(item)
        self._left(item, role)
        self._load_changed(role, now_s, name)

    # ------------------------------------------------------------------ the workers' load

    def load_read(self, worker: Worker, now_s: float) -> Effects[T]:
        """Record that a worker's metrics were read again."""
        role = worker.spec.role
        if role not in self.queues:
            return []
        self.busy[role].load_read(worker)
        self.queues[role].fit_cache(worker.name)
        self._load_changed(role, now_s, worker.name)
        return self._dispatch_waiting(role, now_s)

    def adopt(
        self, item: T, role: Role, arrival: Arrival, stay: RunningAt, now_s: float
    ) -> Assignment[T] | None:
        """Take over a request that runs at a worker on another router's word; None: no such worker is known.

        Args:
            item: The request, unique among those of the role.
            role: The worker's.
            arrival: What a policy would have known of it.
            stay: Where it runs.
            now_s: Simulated seconds.
        """
        worker = self.pool.get(stay.worker)
        if worker is None or worker.spec.role is not role:
            return None
        self._follow(role, now_s)
        self.queues[role].adopt(item, arrival, worker, now_s, is_prefilled=stay.is_prefilled)
        if self.tiers is not None:
            self._held[role].enter(item, arrival.tier, arrival.tokens)
            if role is self.entry and not stay.is_prefilled:
                uncached = self.queues[role].uncached_tokens(item) or 0
                self._uncomputed.enter(item, arrival.tier, uncached)
        assignment = Assignment(
            item, worker, stay.tokens, now_s=now_s, queued_s=stay.queued_s, reason=stay.reason
        )
        self._load_changed(role, now_s, worker.name)
        return assignment

    def learn(self, worker: str, arrival: Arrival) -> None:
        """Record that a worker of the first stage has computed a prompt, as another router reports."""
        self.entry_queue.learn(worker, arrival)

    def set_peer_loads(self, loads: Mapping[str, tuple[int, float | None]], now_s: float) -> None:
        """Set what other routers have at each worker of the first stage, as last reported: tokens, and its tokens/s."""
        for name in self._names[self.entry]:
            self.entry_queue.set_peer_load(name, *loads.get(name, (0, None)))
            self._load_changed(self.entry, now_s, name)

    def loads(self, now_s: float) -> dict[str, tuple[int, float | None]]:
        """Return the loads for a router that picks beside this one; see `DispatchQueue.load_of`."""
        return {name: self.entry_queue.load_of(name, now_s) for name in self._names[self.entry]}

    def refused_at_capacity(self, worker: Worker, now_s: float) -> None:
        """Record that a worker has no room for another request, whatever its metrics said."""
        self.busy[worker.spec.role].refused(worker.name, now_s)

    def set_thresholds(self, thresholds: BusyThresholds, now_s: float) -> None:
        """Take new thresholds for the workers of every stage; they hold for the next request."""
        for role, busy in self.busy.items():
            busy.set_thresholds(thresholds)
            self._loads_changed(role, now_s)

    # ------------------------------------------------------------------ workers and time

    def set_workers(self, specs: Iterable[WorkerSpec], now_s: float) -> Effects[T]:
        """Apply what discovery reports; new processes have empty caches."""
        for worker in self.pool.apply(specs):
            queue = self.queues.get(worker.spec.role)
            if queue is not None:
                queue.worker_restarted(worker.name)
        return self.workers_changed(now_s)

    def workers_changed(self, now_s: float) -> Effects[T]:
        """Record a change in the workers' health or drains."""
        self._follow_service(now_s)
        effects: Effects[T] = []
        for role in self.queues:
            self._follow(role, now_s)
            self._loads_changed(role, now_s)
            effects += self._dispatch(role, now_s)
        return effects

    def expire(self, now_s: float) -> Effects[T]:
        """Refuse the requests whose time limit in the queue has passed."""
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
        """Act on elapsed time alone: relieve decode-bound workers, and dispatch where there is room now."""
        queue = self.entry_queue
        if self._rebalanced_s is None or now_s - self._rebalanced_s >= REBALANCE_S:
            self._rebalanced_s = now_s
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
                recover_s = self.tiers.monitor.settings.recover_seconds
                return Refuse(item, role, RefusalReason.SHED, shed, recover_s)
        missing = self._no_worker_expected(role, now_s)
        if missing is not None:
            message = f"no {missing} worker can take the request; retry later"
            return Refuse(item, missing, RefusalReason.NO_WORKER, message)
        if is_new and self.wake is not None:
            late = self._too_late(item, arrival, self.wake, now_s)
            if late is not None:
                return late
        full = self.full_stage(role, now_s, is_new=is_new)
        if full is None or self._waits_its_turn(arrival.tier, full, is_new=is_new):
            return None
        return Refuse(item, full, RefusalReason.ALL_BUSY, ALL_BUSY, self.busy[full].free_in_s())

    def _too_late(self, item: T, arrival: Arrival, wake: WakeTimes, now_s: float) -> Refuse[T] | None:
        """Refuse a request whose deadline passes before even the fastest start ends; None: it may wait.

        It wakes the workers all the same, as every arrival that is counted.
        """
        if self.pool.knows_any(self.queues):
            return None
        wake.asked(now_s)
        least_s = wake.least_left_s(now_s)
        if now_s + least_s <= self.entry_queue.settings.deadline_s(arrival.tier, now_s, served_s=inf):
            return None
        message = f"workers are being started, which takes {least_s / self.speed:.0f} s at least; retry later"
        return Refuse(item, self.entry, RefusalReason.NO_WORKER, message, wake.left_s(now_s))

    def _refuse(self, refuse: Refuse[T], now_s: float) -> Refuse[T]:
        self.turned_away[refuse.role].add(now_s)
        return refuse

    def _waits_its_turn(self, tier: Tier, full: Role, *, is_new: bool) -> bool:
        """Return whether a request may wait for a stage that is full now, so that its tier gets its share.

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

    def _lets_tiers_in(self, now_s: float) -> bool:
        """Hold back the tiers that wait in the second stage already; return whether all stages have KV blocks."""
        if Role.DECODE in self.queues:
            self.entry_queue.hold(self._handed_over.held(self._names[Role.DECODE], now_s))
        return all(self.busy[each].have_blocks(self._names[each]) for each in self.queues)

    def _count_dispatch(self, queued: QueuedRequest[T], role: Role, now_s: float) -> None:
        if self.tiers is None:
            return
        if role is self.entry:
            self.tiers.dispatched(queued.arrival.tier, max(0.0, now_s - queued.since_s))
        elif not queued.arrival.is_non_streaming:
            self._handed_over.enter(queued.item, queued.worker, queued.arrival.rank)

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
        if self.tiers is not None and role is self.entry and not self._lets_tiers_in(now_s):
            return []
        effects: Effects[T] = []
        for queued in queue.dispatch(now_s, self._dispatch_check(role, now_s)):
            worker = pool.get(queued.worker)
            assert worker is not None  # noqa: S101 - `_follow` has named the pool's own workers
            self._count_dispatch(queued, role, now_s)
            queued_s = max(0.0, now_s - queued.since_s)
            effects.append(
                Assignment(
                    queued.item, worker, queued.tokens, now_s=now_s, queued_s=queued_s, reason=queued.reason
                )
            )
            self._load_changed(role, now_s, queued.worker)
        return effects

    def _dispatch_check(self, role: Role, now_s: float) -> Callable[[str], bool] | None:
        """Return the check whether a worker may be sent one more request at this moment; None: all may."""
        busy, closed, pool = self.busy[role], self._closed_to_dispatch(role), self.pool
        needs_blocks = self.tiers is not None and role is self.entry and busy.has_thresholds
        if not (closed or needs_blocks) and pool.are_closed(role):
            return None

        def is_open(name: str) -> bool:
            worker = pool.get(name)
            if name in closed or (needs_blocks and not busy.has_blocks(name)):
                return False
            return worker is None or worker.breaker.is_closed or worker.breaker.allows(now_s, is_last=True)

        return is_open
