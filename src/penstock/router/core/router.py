"""The router's state machine: admission, queues, dispatch and the workers' circuit breakers; events in, effects out. Pure.

The live driver is `penstock.router.admission`, the simulated one `penstock.simulator.routing`. Each call receives the current
time in simulated seconds and returns the actions that the driver must carry out, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from math import inf
from typing import Generic, TypeVar

from penstock.api import Role
from penstock.router.core.deflection import PrefillDeflection
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.limits import NO_WORKER, SHEDDING, THRESHOLDS
from penstock.router.core.retries import Assignment, Effects, RefusalReason, Refuse, RunningAt
from penstock.router.core.stages import Stages
from penstock.router.core.suspect_dispatch import SuspectDispatch
from penstock.router.core.tiers import TierControl
from penstock.router.core.waiting import Headroom, RejectionCounter, WakeTimes
from penstock.router.core.worker import Worker, WorkerPool, WorkerSpec
from penstock.router.policy.arrival import QueuedRequest
from penstock.router.policy.busy import ALL_BUSY, BusyThresholds, BusyWorkers
from penstock.router.policy.routing_policy import Arrival, AssignTime

T = TypeVar("T")

REBALANCE_S = 1.0
"""Interval of rebalancing in simulated seconds. Chosen: a third of the shortest silence after which `decode_delay_s` treats a
worker as limited by decode, by default."""


class RouterCore(Generic[T]):
    """The state of one router: admits requests, dispatches them to workers, and rejects them if no worker can take them.

    A stage is the set of workers of one role that a request passes: prefill then decode, or aggregated alone. A method that
    returns effects returns the actions that the driver (the code that does the I/O) must carry out, in order: each
    `Assignment` is a request to send to its worker, each `Refuse` a request to reject. All times are in simulated seconds.

    Attributes:
        pool: All workers, of all roles.
        queues: Dispatch queue of each role, the first stage's first. The first stage dispatches nothing while no worker of
            the second stage can be routed to, because a prefill without a decode worker only occupies KV blocks.
        busy: For each role, the workers that take no new requests because they are above a threshold or refused a request.
            A new request is rejected while all workers of a stage are busy.
        stages: The workers of each stage: which of them can be routed to, and whether all are busy.
        tiers: Sheds requests and holds them back by tier; None if tiers are disabled.
        deflection: Lets decode workers compute prompts while prefill workers are behind; None if this is disabled.
        entry: Role of the first stage.
        entry_queue: Dispatch queue of the first stage.
        rejections: For each role, counter of the requests that were rejected because of that stage.
        paused: Roles to whose workers nothing is dispatched for now; the driver sets it.
        wake: Measured startup times of workers that are started for a request; None if requests do not wait for such
            workers.
        speed: Time factor: simulated seconds per real second, 1 in production. Used to report waiting times to clients in
            real seconds.
    """

    def __init__(
        self,
        pool: WorkerPool,
        queues: Mapping[Role, DispatchQueue[T]],
        busy: Mapping[Role, BusyWorkers],
        tiers: TierControl | None,
        deflection: PrefillDeflection | None = None,
    ) -> None:
        self.pool, self.queues, self.busy = pool, queues, busy
        self.tiers, self.deflection = tiers, deflection
        self.entry = next(iter(queues))
        self.entry_queue = queues[self.entry]
        self.rejections = {role: RejectionCounter() for role in queues}
        self.stages = Stages(pool, queues, busy)
        self._suspects = SuspectDispatch(pool, queues, self.stages)
        self.paused: Collection[Role] = ()
        self.speed = 1.0
        self._rebalanced_s = -inf
        # Time since which every stage has had a worker that can be routed to; inf if a stage has none.
        self._served_s = -inf
        max_wake_s = self.entry_queue.settings.max_wake_s
        self.wake = None if max_wake_s is None else WakeTimes(max_wake_s)

    @property
    def max_startup_wait_s(self) -> float:
        """Maximum wait of a request for workers that are being started, in simulated seconds.

        inf if no such limit is configured; the wait then ends by the timeouts of the queue alone, which apply in any case.
        """
        return inf if self.wake is None else self.wake.max_startup_wait_s

    # ------------------------------------------------------------------ requests

    def acquire(
        self,
        item: T,
        role: Role,
        arrival: Arrival,
        now_s: float,
        *,
        is_retry: bool = False,
        waited_s: float | None = None,
    ) -> Effects[T]:
        """Queue a request for a worker of a role, and return the assignments and rejections that follow at once.

        The caller sends each `Assignment` to its worker and rejects each `Refuse`. They can concern other waiting
        requests; if the request has to wait, its `Assignment` or `Refuse` is returned by a later call. With prefill
        deflection, a request for a prefill worker can be assigned to a decode worker, which then computes the prompt as
        well.

        Args:
            item: The request; unique among the requests of the role.
            role: Role of the workers of which one is needed.
            arrival: The request as the routing policy sees it.
            now_s: Current time in simulated seconds.
            is_retry: Whether the request was admitted before (a retry). No limit on new requests applies to it, and it is
                put before all waiting requests.
            waited_s: Simulated seconds since another router admitted the request; no limit on new requests applies then.
                None if no router has admitted it yet.
        """
        is_new = role is self.entry and not is_retry and waited_s is None
        refused = self._refuse_if_needed(item, role, arrival, now_s, is_new=is_new)
        if refused is not None:
            return [self._count_refusal(refused, now_s)]
        if is_new and self.deflection is not None and role not in self.paused:
            dispatch = partial(self._dispatch, Role.DECODE, now_s)
            deflected = self.deflection.assign(
                item, arrival, self.queues, self.stages.routable, now_s, dispatch
            )
            if deflected:
                return deflected
        queue, busy = self.queues[role], self.busy[role]
        names, passed_over = self.stages.names[role], frozenset[str]()
        if busy.is_any:
            # If all workers are busy, those that still have KV blocks are preferred.
            passed_over = busy.unavailable(names) or busy.out_of_blocks(names)
        if arrival.alone_at:
            self._suspects.add(item, role)
        if self._suspects.has_any:
            passed_over |= self._suspects.reserved_workers(role)
        moved = queue.moved
        if not queue.submit(item, arrival, now_s, is_retry=is_retry, waited_s=waited_s, busy=passed_over):
            self._suspects.remove(item, role)
            message = f"{len(queue)} requests wait for {role} already; retry later"
            full = Refuse(item, role, RefusalReason.QUEUE_FULL, message, self._wake_remaining_s(now_s))
            return [self._count_refusal(full, now_s)]
        if self.tiers is not None:
            uncached = queue.uncached_tokens(item) if role is self.entry else None
            self.tiers.entered(item, role, arrival, uncomputed_tokens=uncached)
        if busy.has_thresholds:
            self.stages.update_busy(role, now_s, queue.worker_of(item) if queue.moved == moved else None)
        return self._dispatch(role, now_s)

    def prefilled(
        self,
        assignment: Assignment[T],
        now_s: float,
        *,
        cached_tokens: int | None = None,
        measured: bool = True,
    ) -> Effects[T]:
        """Record that a worker has computed a request's prompt, so that the request decodes from now on.

        Returns the assignments of the waiting requests that the caller has to send to their workers now.

        Args:
            assignment: The request's assignment to the worker.
            now_s: Current time in simulated seconds.
            cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
            measured: Whether this is reported at the moment at which the prefill ended, so that its duration is meaningful;
                False if it is only known from the end of the response.
        """
        role, queue = assignment.role, self.queues[assignment.role]
        if self.tiers is not None:
            self.tiers.computed(assignment.item, now_s)
        if measured and role is self.entry:
            assignment.computed(cached_tokens or 0, now_s)
        before = queue.prompt_tokens.computed
        queue.prefilled(assignment.item, now_s, cached_tokens=cached_tokens, measured=measured)
        return self._work_done(assignment, before, now_s)

    def release(self, assignment: Assignment[T], now_s: float) -> Effects[T]:
        """Remove a request from its worker, so that waiting requests may be sent there; does nothing if it was removed before.

        Returns the assignments of the waiting requests that the caller has to send to their workers now.
        """
        if not assignment.is_open:
            return []
        role, queue = assignment.role, self.queues[assignment.role]
        if self.tiers is not None and role is self.entry and assignment.is_computed:
            # For a non-streaming response, its end is the first sign that its prompt was computed.
            self.tiers.computed(assignment.item, now_s)
        self._forget(assignment.item, role)
        assignment.end()
        before = queue.prompt_tokens.computed
        queue.release(assignment.item, now_s, is_computed=assignment.is_computed)
        self.busy[role].released(assignment.worker, now_s - assignment.since_s)
        return self._work_done(assignment, before, now_s)

    def cancel(self, item: T, role: Role, now_s: float) -> None:
        """Remove a waiting request of a role's queue, for example because its client has disconnected.

        Does nothing if the request does not wait.
        """
        name = self.queues[role].worker_of(item)
        self.queues[role].cancel(item)
        self._forget(item, role)
        self.stages.update_busy(role, now_s, name)

    # ------------------------------------------------------------------ alongside other routers

    def adopt(
        self, item: T, role: Role, arrival: Arrival, running_at: RunningAt, now_s: float
    ) -> Assignment[T] | None:
        """Count a request that another router has dispatched, as that router reports; return its assignment here.

        Returns None if the worker is unknown or has another role. The caller must `release` the returned assignment.

        Args:
            item: The request.
            role: Role for which the other router dispatched it. With prefill deflection, the worker can be a decode worker
                although the role is prefill.
            arrival: The request as the routing policy sees it.
            running_at: Worker on which the request runs, and its progress there.
            now_s: Current time in simulated seconds.
        """
        worker = self.pool.get(running_at.worker)
        is_deflected = self.deflection is not None and worker is not None and worker.spec.role is Role.DECODE
        if worker is None or not (worker.spec.role is role or is_deflected):
            return None
        role, queue = worker.spec.role, self.queues[worker.spec.role]
        self.stages.refresh(role, now_s)
        is_alone = role in arrival.alone_at
        queue.adopt(item, arrival, worker, now_s, is_prefilled=running_at.is_prefilled)
        if self.tiers is not None:
            is_pending = role is self.entry and not running_at.is_prefilled
            uncached = queue.uncached_tokens(item) if is_pending else None
            self.tiers.entered(item, role, arrival, uncomputed_tokens=uncached)
        assignment = Assignment(
            item,
            worker,
            running_at.tokens,
            now_s=now_s,
            queued_s=running_at.queued_s,
            reason=running_at.reason,
        )
        if is_alone:
            self._suspects.adopt(assignment)
        self.stages.update_busy(role, now_s, worker.name)
        return assignment

    def learn(self, worker: str, arrival: Arrival) -> None:
        """Record that a worker has computed the prompt of ``arrival``, as another router reports: its blocks count as cached there.

        ``worker`` is the name of a worker of the first stage (prefill or aggregated); nothing is recorded for a worker of
        another role.
        """
        self.entry_queue.learn(worker, arrival)

    def set_peer_loads(self, loads: Mapping[str, tuple[int, float | None]], now_s: float) -> None:
        """Replace the load that other routers have put on the workers of the first stage (prefill or aggregated).

        Args:
            loads: By worker name, the in-flight tokens of other routers as last reported, and the worker's measured prefill
                throughput in tokens/s (None if unknown). Workers that are missing have no such load.
            now_s: Current time in simulated seconds.
        """
        for name in self.stages.names[self.entry]:
            self.entry_queue.workers.set_peer_load(name, *loads.get(name, (0, None)))
            self.stages.update_busy(self.entry, now_s, name)

    def loads(self, now_s: float) -> dict[str, tuple[int, float | None]]:
        """Return this router's load at each worker of the first stage (prefill or aggregated), by worker name.

        Other routers of the graph add it to their own load, to know the total load of a worker.

        Each value is the number of tokens that this router has queued for the worker or sent there and that are probably
        not computed yet (if the policy does not assign on arrival: its tokens in flight), and the measured prefill
        throughput in tokens per simulated second (None if unknown).
        """
        return {name: self.entry_queue.workers.load_of(name, now_s) for name in self.stages.names[self.entry]}

    # ------------------------------------------------------------------ the workers' load

    def load_read(self, worker: Worker, now_s: float) -> Effects[T]:
        """Record that a worker's metrics were scraped; waiting requests may fit there now.

        Returns the assignments of the waiting requests that the caller has to send to their workers now. Returns an empty
        list for a worker whose role is not a stage of this router.
        """
        role = worker.spec.role
        if role not in self.queues:
            return []
        self.busy[role].load_read(worker)
        self.queues[role].workers.fit_cache(worker.name)
        self.stages.update_busy(role, now_s, worker.name)
        return self._dispatch_waiting(role, now_s)

    def refused_at_capacity(self, worker: Worker, now_s: float) -> None:
        """Record that a worker has refused a request for lack of capacity.

        It counts as busy until its metrics are scraped, one of its requests ends, or one simulated second (`AT_CAPACITY_S`)
        has passed.
        """
        self.busy[worker.spec.role].refused(worker.name, now_s)

    def set_thresholds(self, thresholds: BusyThresholds, now_s: float) -> None:
        """Replace the thresholds above which workers of every stage are busy, and decide again which workers are busy at ``now_s``.

        ``now_s`` is the current time in simulated seconds. The thresholds apply to new requests; no waiting request is
        rejected.
        """
        for role, busy in self.busy.items():
            busy.set_thresholds(thresholds)
            self.stages.update_all_busy(role, now_s)

    def inflight_tokens(self, worker: Worker) -> int:
        """Return the tokens in flight at a worker, including those that other routers have reported."""
        queue = self.queues.get(worker.spec.role)
        return worker.inflight_tokens + (0 if queue is None else queue.workers.peer_tokens(worker.name))

    def uncomputed_tokens(self, worker: Worker, now_s: float) -> int:
        """Return the prompt tokens in flight at a worker that it has probably not computed yet, by its measured speed, >= 0.

        Returns 0 if the router has no queue for the worker's role.
        """
        queue = self.queues.get(worker.spec.role)
        return 0 if queue is None else queue.uncomputed_tokens(worker.name, now_s)

    # ------------------------------------------------------------------ workers and time

    def set_workers(self, specs: Iterable[WorkerSpec], now_s: float) -> Effects[T]:
        """Apply ``specs``, the complete list of workers that discovery reports.

        A worker with a new process starts with an empty prefix index (assumed cache contents). Returns the assignments of
        the waiting requests that the caller has to send to their workers now.
        """
        for worker in self.pool.apply(specs):
            queue = self.queues.get(worker.spec.role)
            if queue is not None:
                queue.workers.restarted(worker.name)
        return self.workers_changed(now_s)

    def workers_changed(self, now_s: float) -> Effects[T]:
        """Update the queues after a worker's health or drain state has changed.

        Returns the assignments of the waiting requests that the caller has to send to their workers now.
        """
        self._update_served_since(now_s)
        effects: Effects[T] = []
        for role in self.queues:
            self.stages.refresh(role, now_s)
            self.stages.update_all_busy(role, now_s)
        for role in self.queues:
            effects += self._dispatch(role, now_s)
        return effects

    def expire(self, now_s: float) -> Effects[T]:
        """Reject the waiting requests of all stages whose time limit in the queue has passed.

        Returns these rejections (`Refuse`), which the caller passes on to the clients.
        """
        self._update_served_since(now_s)
        effects: Effects[T] = []
        left_s = self._wake_remaining_s(now_s)
        for role, queue in self.queues.items():
            for queued in queue.take_expired(
                now_s, served_s=self._served_s, max_startup_wait_s=self.max_startup_wait_s
            ):
                if self.tiers is not None and role is self.entry and not queued.is_retry:
                    self.tiers.timed_out(queued.arrival.tier, now_s)
                self._forget(queued.item, role)
                self.stages.update_busy(role, now_s, queued.worker)
                waited_s = (now_s - queued.since_s) / self.speed
                message = f"no worker took the request within {waited_s:.1f} s; retry later"
                late = Refuse(queued.item, role, RefusalReason.QUEUE_TIMEOUT, message, left_s)
                effects.append(self._count_refusal(late, now_s))
        return effects

    def tick(self, now_s: float) -> Effects[T]:
        """Apply the effects of elapsed time alone; called several times a second.

        Moves waiting requests away from workers that are limited by decode (they have prompts to compute, but have computed
        none for some time, because their running requests occupy them with decoding), evaluates the tiers' SLOs, and
        dispatches requests to workers that have free capacity now.

        Returns the assignments of the waiting requests that the caller has to send to their workers now.
        """
        queue = self.entry_queue
        if now_s - self._rebalanced_s >= REBALANCE_S:
            self._rebalanced_s = now_s
            queue.rebalance(now_s)
        for each in self.queues.values():
            each.assume_prefilled(now_s)
        if self.tiers is not None:
            self.tiers.tick(now_s, queue.uncomputed_requests)
        return self.workers_changed(now_s)

    def problems(self, now_s: float) -> list[str]:
        """Return the reasons for which a new request would be rejected now, as text for a readiness check.

        Returns an empty list if a request would be served, or would wait for workers to be started.
        """
        queue = self.entry_queue
        found = [f"prefill queue full: {len(queue)} requests wait"] if queue.is_full else []
        for role in self.queues if self.wake is None else ():
            if not self.pool.routable(role, now_s):
                states = [f"{w.name} {w.state(now_s)[1]}" for w in self.pool if w.spec.role is role]
                found.append(f"no {role} worker can be routed to: " + ("; ".join(states) or "none known"))
        return found

    def _refuse_if_needed(
        self, item: T, role: Role, arrival: Arrival, now_s: float, *, is_new: bool
    ) -> Refuse[T] | None:
        is_interrupted = arrival.is_continuation
        if self.tiers is not None and is_new and SHEDDING.applies(is_interrupted=is_interrupted):
            tokens = self.entry_queue.prompt_tokens.expected(arrival.tokens)
            self.tiers.count_requested(arrival.tier, tokens, self.stages.entry_capacity(now_s), now_s)
            shed = self.tiers.arrived(arrival.tier)
            if shed is not None:
                recover_s = self.tiers.monitor.tiers.shedding.recover_seconds
                return Refuse(item, role, RefusalReason.SHED, shed, recover_s)
        if NO_WORKER.applies(is_interrupted=is_interrupted):
            unserved = self._refuse_without_worker(item, role, arrival, now_s, is_new=is_new)
            if unserved is not None:
                return unserved
        full = self.stages.full(role, now_s, is_new=is_new)
        if full is None or not THRESHOLDS.applies(is_interrupted=is_interrupted):
            return None
        if self.tiers and (not is_new or self._waits_its_turn(self.tiers, arrival, full, now_s)):
            return None
        return Refuse(item, full, RefusalReason.ALL_BUSY, ALL_BUSY, self.busy[full].free_in_s())

    def _refuse_without_worker(
        self, item: T, role: Role, arrival: Arrival, now_s: float, *, is_new: bool
    ) -> Refuse[T] | None:
        """Return the rejection of a request for which no worker serves and none is expected in time; None if it may wait for one."""
        if self.wake is not None and role is self.entry:
            return self._refuse_if_too_late(item, arrival, self.wake, now_s) if is_new else None
        for each in self.stages.required(role):
            if not self.pool.routable(each, now_s) and not self.pool.expects(each):
                message = f"no {each} worker can take the request; retry later"
                return Refuse(item, each, RefusalReason.NO_WORKER, message)
        return None

    def _refuse_if_too_late(
        self, item: T, arrival: Arrival, wake: WakeTimes, now_s: float
    ) -> Refuse[T] | None:
        """Return the rejection of a request whose deadline passes before even the fastest start of workers ends; None if it may wait.

        A rejected request still counts as demand, so that workers are started.
        """
        if self.pool.knows_any(self.queues):
            return None
        wake.requested(now_s)
        min_s = wake.min_remaining_s(now_s)
        if now_s + min_s <= self.entry_queue.settings.deadline_s(arrival.tier, now_s, served_s=inf):
            return None
        message = f"workers are being started, which takes {min_s / self.speed:.0f} s at least; retry later"
        return Refuse(item, self.entry, RefusalReason.NO_WORKER, message, wake.remaining_s(now_s))

    def _count_refusal(self, refuse: Refuse[T], now_s: float) -> Refuse[T]:
        self.rejections[refuse.role].add(now_s)
        return refuse

    def _wake_remaining_s(self, now_s: float) -> float | None:
        return None if self.wake is None else self.wake.remaining_s(now_s)

    def _waits_its_turn(self, tiers: TierControl, arrival: Arrival, full: Role, now_s: float) -> bool:
        return tiers.waits_its_turn(
            arrival.tier,
            self.entry_queue.prompt_tokens.expected(arrival.tokens),
            full,
            self.stages.entry_capacity(now_s),
            has_blocks=self.busy[full].any_has_blocks(self.stages.names[full]),
        )

    def _update_served_since(self, now_s: float) -> None:
        if not all(self.pool.routable(role, now_s) for role in self.queues):
            self._served_s = inf
            return
        if self._served_s == inf:
            self._served_s = now_s
        if self.wake is not None:
            self.wake.served(now_s)

    # ------------------------------------------------------------------ within

    def _forget(self, item: T, role: Role) -> None:
        if self._suspects.has_any:
            self._suspects.remove(item, role)
        if self.tiers is not None:
            self.tiers.left(item, role)

    def _work_done(self, assignment: Assignment[T], computed_before: int, now_s: float) -> Effects[T]:
        role, counts = assignment.role, self.queues[assignment.role].prompt_tokens
        if self.deflection is not None:
            self.deflection.ended(assignment.item)
            if role is self.entry:
                self.deflection.computed(counts.computed - computed_before, counts.pending, now_s)
        if self.busy[role].has_thresholds:
            self.busy[role].computed(counts.computed - computed_before, now_s)
            self.stages.update_busy(role, now_s, assignment.worker.name)
        return self._dispatch_waiting(role, now_s)

    def _dispatch_waiting(self, role: Role, now_s: float) -> Effects[T]:
        effects = self._dispatch(role, now_s) if self.queues[role].waiting else []
        if self.tiers is not None and role is not self.entry and self.entry_queue.waiting:
            effects += self._dispatch(self.entry, now_s)
        return effects

    def _dispatch(self, role: Role, now_s: float) -> Effects[T]:
        self.stages.refresh(role, now_s)
        queue, pool, tiers = self.queues[role], self.pool, self.tiers
        if not queue.waiting or role in self.paused:
            return []
        for each in self.stages.required(role):
            if not pool.routable(each, now_s):
                return []
        effects: Effects[T] = []
        if queue.isolated:
            effects += self._suspects.dispatch(role, now_s, self._assign)
        if tiers is not None and role is self.entry and Role.DECODE in self.queues:
            queue.set_held_tiers(tiers.held_back(self.stages.names[Role.DECODE], now_s))
        if self._suspects.has_any and any(
            self._suspects.are_all_reserved(each) for each in self.stages.required(role) if each is not role
        ):
            return effects
        for queued in queue.dispatch(now_s, self._dispatch_limit(role, now_s)):
            effects.append(self._assign(queued, role, now_s))
        return effects

    def _assign(self, queued: QueuedRequest[T], role: Role, now_s: float) -> Assignment[T]:
        worker = self.pool.get(queued.worker)
        assert worker is not None  # noqa: S101 - `_update_routable` has named the pool's own workers
        queued_s = max(0.0, now_s - queued.since_s)
        if self.tiers is not None:
            self.tiers.dispatched(queued, queued_s, is_entry=role is self.entry)
        assignment = Assignment(
            queued.item, worker, queued.tokens, now_s=now_s, queued_s=queued_s, reason=queued.reason
        )
        self.stages.update_busy(role, now_s, queued.worker)
        return assignment

    def _dispatch_limit(self, role: Role, now_s: float) -> Callable[[str], Headroom] | None:
        """Return the function that says which requests can be sent to a worker at this moment; None if all can be sent to all workers.

        Nothing is sent to a worker that refused a request for lack of capacity, is reserved for suspects, or has an open
        circuit. If requests wait in one central queue, nothing is sent to a busy worker while others have capacity either. A
        request in a worker's own queue is sent there even if the worker is busy, because its queue is part of what makes it
        busy. With tiers, a worker above the threshold of KV blocks still gets urgent requests (system and premium), which
        overtake or preempt the others there.
        """
        busy, pool = self.busy[role], self.pool
        closed = busy.at_capacity() if busy.is_any else frozenset()
        if busy.is_any and self.queues[role].policy.assigns is AssignTime.WHEN_FREE:
            closed |= busy.unavailable(self.stages.names[role])
        if self._suspects.has_any:
            closed |= self._suspects.reserved_workers(role)
        by_blocks = self.tiers is not None and role is self.entry and busy.has_thresholds
        max_headroom = (
            self.stages.headroom_after(role)
            if self.tiers is not None and role is self.entry
            else Headroom.ANY
        )
        if not (closed or by_blocks) and max_headroom is Headroom.ANY and pool.are_closed(role):
            return None

        def limit(name: str) -> Headroom:
            worker = pool.get(name)
            is_broken = worker is not None and not (
                worker.breaker.is_closed or worker.breaker.allows(now_s, is_last=True)
            )
            if name in closed or is_broken:
                return Headroom.NONE
            return (
                min(max_headroom, Headroom.URGENT)
                if by_blocks and not busy.has_blocks(name)
                else max_headroom
            )

        return limit
