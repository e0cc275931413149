"""The queue in front of one role's workers: one body for the live router and the simulator.

Under a policy that assigns on arrival every worker has a queue of its own, under one that assigns when a worker is
free all requests wait in one central queue. The caller owns time and acts: it says which workers may be chosen, what
arrives, what was prefilled or lost, and takes what is dispatched now. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Generic, TypeVar

from penstock.api import QueueOrder, Tier, TiersConfig
from penstock.router.core.known_workers import KnownWorkers
from penstock.router.core.limits import QUEUE_LENGTH, TENANT_SHARE, THRESHOLDS
from penstock.router.core.tiers import QueueOccupancy
from penstock.router.core.waiting import Headroom, QueueSettings
from penstock.router.policy.arrival import Lane, PromptTokenCounts, QueuedRequest
from penstock.router.policy.rebalance import RebalanceParams, decode_bound, plan_moves
from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    LearnsPrompts,
    RoutingDecision,
    RoutingPolicy,
    WorkerLoad,
    WorkerQueue,
    bottleneck_s,
    eligible,
)

T = TypeVar("T")

PREMIUM_RANK = list(Tier).index(Tier.PREMIUM)


class DispatchQueue(Generic[T]):
    """Waiting and running requests of one role under one policy. ``T`` is hashable and unique per request.

    Attributes:
        moved: Requests that rebalancing has moved so far.
        apart: Suspects that wait for a worker of their own; see `penstock.router.core.suspects`.
        waiting: Requests that wait, those apart included.
        tokens: Prompt tokens of those that wait.
        occupancy: Counts those that wait by tier, where there are tiers.
    """

    def __init__(self, policy: RoutingPolicy, settings: QueueSettings) -> None:
        self.policy = policy
        self._learner = policy if isinstance(policy, LearnsPrompts) else None
        self._bottleneck_s = bottleneck_s(policy)
        self.settings = settings
        bounds = (settings.slot_tokens, settings.slot_requests, settings.worker_requests)
        self._has_slots = any(bound is not None for bound in bounds)
        self.workers: KnownWorkers[T] = KnownWorkers(policy.assigns, settings.tiers)
        self._workers = self.workers.eligible
        self._estimates = self.workers.estimates
        self._central = self.workers.central
        self.apart: dict[T, QueuedRequest[T]] = {}
        self.occupancy = QueueOccupancy()
        # Those that wait, without a worker in the central queue, and those that run.
        self._requests: dict[T, QueuedRequest[T]] = {}
        # Running non-streaming requests, with the time at which their prompts should be prefilled.
        self._non_streaming: dict[T, float] = {}
        # Prefilled and not ended: the worker, and the number of prompt tokens.
        self._decoding: dict[T, tuple[WorkerQueue[T], int]] = {}
        # Names whose queue or room has changed since `dispatch` last saw them.
        self._dirty: dict[str, None] = {}
        self.moved = 0
        self.waiting = 0
        self.tokens = 0
        self.prompt_tokens = PromptTokenCounts()

    def __len__(self) -> int:
        return self.waiting

    def set_workers(
        self,
        loads: Iterable[WorkerLoad],
        now_s: float,
        *,
        quarantined: Collection[str] = (),
        full: frozenset[str] = frozenset(),
    ) -> None:
        """Set the eligible workers; requests that wait for others are reassigned, running ones continue.

        When a worker joins, everything that waits is assigned again: a backlog would not reach it otherwise. What a
        policy that raises leaves unassigned waits in the central queue until the workers change again. What is known of
        quarantined workers, which are not eligible now and will come back unchanged, is kept. ``full`` ones are passed over.
        """
        left, joined = self.workers.change(loads, now_s)
        for worker in left:
            self.policy.worker_left(worker.name)
        for name in joined:
            self.policy.worker_joined(name)
        for worker in (*left, *self._workers.values()) if joined else left:
            for queued in list(worker.line):
                worker.unassign(queued)
                self._put_central(queued)
        self.workers.forget_idle(quarantined)
        if self._workers and self.policy.assigns is AssignTime.ON_ARRIVAL:
            for queued in sorted(self._central, key=lambda queued: queued.since_s):
                self._relieve(self._assign(queued, now_s, busy=full), now_s)

    def adopt(
        self, item: T, arrival: Arrival, load: WorkerLoad, now_s: float, *, is_prefilled: bool = False
    ) -> None:
        """Count a request as running that was sent to a worker, eligible or not, on another router's word."""
        worker = self.workers.adopt(load, now_s)
        if self._learner is not None:
            self._learner.prompt_queued(arrival, load.name, self._workers)
        queued = QueuedRequest(item, arrival, now_s, is_adopted=True)
        if is_prefilled and self.policy.assigns is AssignTime.ON_ARRIVAL:
            worker.index.use(arrival.prefix)
            self._decodes(worker, queued)
            return
        worker.put(queued)
        worker.start(queued, now_s)
        queued.weight, queued.is_prefilled = max(1, queued.uncached), is_prefilled
        self._requests[item] = queued
        if not is_prefilled:
            self.prompt_tokens.give(worker.name, queued.weight)
            self._expect_prefilled(worker, queued, now_s)

    def learn(self, name: str, arrival: Arrival) -> None:
        """Record that a worker has computed a prompt."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.index.use(arrival.prefix)
            if self._learner is not None:
                self._learner.prompt_queued(arrival, name, self._workers)

    def submit(
        self,
        item: T,
        arrival: Arrival,
        now_s: float,
        *,
        again: bool = False,
        waited_s: float | None = None,
        busy: frozenset[str] = frozenset(),
    ) -> bool:
        """Queue a request, not at ``busy`` workers; False, and nothing done, when too many wait; see `RouterCore.acquire`.

        A suspect is put apart, until `start_apart`.
        """
        is_new = not again and waited_s is None
        if is_new and not self._may_wait(arrival):
            return False
        since_s = now_s - (waited_s or 0.0)
        queued = QueuedRequest(item, arrival, since_s, uncached=arrival.tokens, is_retry=again)
        decision = None
        if arrival.alone_at:
            self.apart[item] = self._requests[item] = queued
        else:
            decision = self._assign(queued, now_s, is_first=again, busy=busy)
        queued.weight = max(1, queued.uncached)
        self.waiting += 1
        if self.settings.tiers is not None:
            self.occupancy.enter(arrival)
        self.tokens += arrival.tokens
        self.workers.density.learn(len(arrival.chain), arrival.tokens)
        self.prompt_tokens.waiting += queued.weight
        if is_new and not arrival.is_rest:
            self.prompt_tokens.routed += queued.tokens
            self.prompt_tokens.admitted += queued.weight
        self._relieve(decision, now_s)
        return True

    def start_apart(self, item: T, name: str, now_s: float, *, reason: str) -> QueuedRequest[T]:
        """Give a worker to a suspect that waits, whatever the policy says."""
        queued, worker = self.apart.pop(item), self._workers[name]
        queued.reason = reason
        worker.put(queued)
        self._start(worker, queued, now_s)
        return queued

    def dispatch(
        self, now_s: float, limit: Callable[[str], Headroom] | None = None
    ) -> Iterator[QueuedRequest[T]]:
        """Iterate over the requests to dispatch now, and count them as running; the caller counts each before the next.

        ``limit`` returns whose requests may be sent to a worker at this moment, as far as its slots allow; None: all.
        """
        if self.policy.assigns is AssignTime.WHEN_FREE:
            return self._dispatch_central(now_s, limit)
        return self._dispatch_assigned(now_s, limit)

    def prefilled(
        self, item: T, now_s: float, *, cached_tokens: int | None = None, measured: bool = True
    ) -> None:
        """Record that a request's prompt was prefilled; see `RouterCore.prefilled`.

        Where requests are assigned on arrival, its worker has room again; else it weighs until it is released.
        """
        if self.policy.assigns is AssignTime.WHEN_FREE:
            self._count_prefilled(item)
            return
        ended = self._end(item, now_s)
        if ended is None:
            return
        worker, queued, took_s = ended
        self._decodes(worker, queued)
        self._count_computed(worker, queued, now_s)
        if queued.is_adopted or not measured:
            return
        uncached = queued.uncached if cached_tokens is None else max(1, queued.tokens - cached_tokens)
        worker.throughput.learn(uncached, took_s)
        self._estimates.throughput.learn(uncached, took_s)
        worker.relative_slowdown = self._estimates.measured_slowdown(worker)

    def assume_prefilled(self, now_s: float) -> None:
        """Assume that a non-streaming request's prefill has finished once its estimated time has passed."""
        for item in [item for item, due_s in self._non_streaming.items() if due_s <= now_s]:
            self.prefilled(item, now_s, measured=False)

    def release(self, item: T, now_s: float, *, is_computed: bool = False) -> None:
        """Record that a request left its worker, prefilled or not; ``is_computed``: as far as is known now, it was."""
        decoding = self._decoding.pop(item, None)
        if decoding is not None:
            decoding[0].decoding_tokens -= decoding[1]
            self._dirty[decoding[0].name] = None
            return
        is_central = self.policy.assigns is AssignTime.WHEN_FREE
        if is_computed and is_central:
            self._count_prefilled(item)
        ended = self._end(item, now_s)
        if ended is None:
            return
        worker, queued, _ = ended
        if is_computed and not is_central:
            self._count_computed(worker, queued, now_s)
        else:
            worker.forget(queued)

    def cancel(self, item: T) -> None:
        """Take out a request whose client has left; does nothing when it does not wait."""
        queued = self._requests.get(item)
        if queued is None or queued.started_s is not None:
            return
        if item in self.apart:
            del self.apart[item]
        elif queued.worker:
            self._workers[queued.worker].unassign(queued)
        else:
            self._central.pull(queued)
        del self._requests[item]
        self._stop_waiting(queued)

    def take_expired(
        self, now_s: float, *, served_s: float = -inf, hold_s: float = inf
    ) -> list[QueuedRequest[T]]:
        """Remove and return the requests whose waiting limit has passed; see `QueueSettings.deadline_s`."""

        def deadline_s(each: QueuedRequest[T]) -> float:
            return self.settings.deadline_s(
                each.arrival.tier,
                each.since_s,
                begun=each.arrival.is_rest,
                served_s=served_s,
                hold_s=hold_s,
            )

        waiting = self.waiting_requests() if self.waiting else ()
        expired = [each for each in waiting if deadline_s(each) <= now_s]
        for queued in expired:
            self.cancel(queued.item)
        return expired

    def rebalance(self, now_s: float, names: Iterable[str] | None = None) -> None:
        """Move requests to the other worker of their pair where that is sooner.

        ``names`` are the workers to relieve; None: the decode-bound ones.
        """
        settings, bottleneck_s = self.settings, self._bottleneck_s
        if names is None:
            if bottleneck_s == inf:
                return
            names = decode_bound(self._workers, self._estimates, now_s, bottleneck_s)
        params = RebalanceParams(settings.slo_s, bottleneck_s, now_s, settings.order is QueueOrder.HIT_FIRST)
        for name in names:
            source = self._workers[name]
            for queued in plan_moves(source, self._workers, self._estimates, params):
                self._move(queued, source, self._workers[queued.other])
                queued.reason = f"sooner than at {name}: moved"
                self.moved += 1

    def set_tiers(self, tiers: TiersConfig) -> None:
        """Share by other settings from now on, where tiers were on before."""
        self.settings = replace(self.settings, tiers=tiers)
        self.workers.set_tiers(tiers)

    def hold(self, tiers: frozenset[Tier]) -> None:
        """Dispatch nothing of these tiers from now on."""
        if self.workers.hold(tiers):
            self._dirty |= dict.fromkeys(self._workers)

    @property
    def is_full(self) -> bool:
        """Whether a new request is refused."""
        bound = self.settings.max_requests
        return bound is not None and self.waiting >= bound

    def oldest_s(self, now_s: float) -> float:
        """Return how long the longest wait has lasted, simulated seconds; 0 when nothing waits."""
        return max((now_s - queued.since_s for queued in self.waiting_requests()), default=0.0)

    def waits(self, item: T) -> bool:
        """Return whether a request waits here."""
        queued = self._requests.get(item)
        return queued is not None and queued.started_s is None

    def uncomputed_requests(self) -> list[QueuedRequest[T]]:
        """Return the requests whose prompts are not computed, those that wait among them, in no order."""
        return [each for each in self._requests.values() if not each.is_prefilled]

    def waiting_requests(self) -> list[QueuedRequest[T]]:
        """Return the requests that wait, in no order."""
        return [each for each in self._requests.values() if each.started_s is None]

    def uncached_tokens(self, item: T) -> int | None:
        """Return the prompt tokens expected to be computed of a request that waits or runs; None: of no other."""
        queued = self._requests.get(item)
        return None if queued is None else queued.uncached

    def worker_of(self, item: T) -> str:
        """Return the worker that a request waits for or runs at; empty while none was chosen."""
        queued = self._requests.get(item)
        return "" if queued is None else queued.worker

    def prefill_tokens(self, name: str) -> int:
        """Return the uncached prompt tokens that wait for one worker or were given to it, tokens >= 0.

        Where requests are assigned on arrival, those that other routers have there are among them.
        """
        worker = self._workers.get(name)
        if worker is None:
            return 0
        peers = worker.peer_tokens if self.policy.assigns is AssignTime.ON_ARRIVAL else 0
        return worker.queued_tokens + self.prompt_tokens.pending.get(name, 0) + peers

    def uncomputed_tokens(self, name: str, now_s: float) -> int:
        """Return the uncached prompt tokens that a worker was given and has probably not computed yet, tokens >= 0."""
        pending, worker = self.prompt_tokens.pending.get(name, 0), self._workers.get(name)
        if not pending or worker is None or self.policy.assigns is AssignTime.WHEN_FREE:
            return pending
        self._estimates.now_s = now_s
        return max(0, pending - self._estimates.computed_tokens(worker))

    def prompts_at(self, name: str) -> list[int]:
        """Return the uncached tokens of each prompt that a worker was given or that waits for it, the oldest first."""
        worker = self._workers.get(name)
        if worker is None:
            return []
        running = [each.weight for each in worker.running.values() if not each.is_prefilled]
        return running + [each.uncached for each in worker.line]

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens to be computed by all workers together; 0 while no request waits in a central queue."""
        if self.policy.assigns is AssignTime.ON_ARRIVAL or not self.waiting:
            return 0
        return self.prompt_tokens.waiting + sum(self.prompt_tokens.pending.values())

    def _put_central(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        queued.worker = ""
        self._requests[queued.item] = queued
        self._central.put(queued, is_first=is_first)

    def _assign(
        self, queued: QueuedRequest[T], now_s: float, *, is_first: bool = False, busy: frozenset[str]
    ) -> RoutingDecision | None:
        """Put a request into the queue of the worker that the policy chooses; None: it waits in the central one.

        A policy that raises leaves it where it was. Busy workers are passed over unless that leaves only such as failed it.
        """
        if self.policy.assigns is AssignTime.WHEN_FREE or not self._workers:
            self._put_central(queued, is_first=is_first)
            return None
        estimates, arrival = self._estimates, queued.arrival
        estimates.now_s, estimates.ttft_slo_s = now_s, self.settings.ttft_slo_s(arrival.tier)
        if busy and self._workers.keys() - busy - arrival.avoid:
            arrival = arrival.avoiding(busy)
        decision = self.policy.route(arrival, self._workers, estimates)
        other_uncached = 0
        if decision.other:
            known = decision.other_uncached
            other = self._workers[decision.other]
            other_uncached = other.uncached(arrival) if known is None else known
        worker = self._workers[decision.worker]
        if queued.item in self._requests:
            self._central.pull(queued)
        queued.reason, queued.other, queued.other_uncached = decision.reason, decision.other, other_uncached
        self._requests[queued.item] = queued
        worker.put(queued, decision.uncached, is_first=is_first)
        self._dirty[decision.worker] = None
        return decision

    def _relieve(self, decision: RoutingDecision | None, now_s: float) -> None:
        if decision is not None and decision.is_hot:
            self.rebalance(now_s, (decision.worker, decision.other))

    def _dispatch_central(
        self, now_s: float, limit: Callable[[str], Headroom] | None
    ) -> Iterator[QueuedRequest[T]]:
        while (queued := self._central.next_up(now_s)) is not None:
            free = self._free_for(queued, Headroom.ANY, limit)
            if not free and self.settings.tiers is not None:
                queued = self._central.next_up(now_s, urgent=True, begun=not THRESHOLDS.binds(begun=True))
                free = {} if queued is None else self._free_for(queued, Headroom.URGENT, limit)
            if queued is None or not free:
                return
            self._estimates.now_s = now_s
            decision = self.policy.route(queued.arrival, free, self._estimates)
            self._central.pull(queued)
            self._central.charge(queued)
            worker = self._workers[decision.worker]
            queued.reason = decision.reason
            worker.put(queued, queued.uncached)
            self._start(worker, queued, now_s)
            yield queued

    def _free_for(
        self, queued: QueuedRequest[T], headroom: Headroom, limit: Callable[[str], Headroom] | None
    ) -> Mapping[str, WorkerQueue[T]]:
        """Return the workers to which a request may go for which they have room and ``limit`` at least ``headroom``."""
        if not (queued.arrival.avoid or limit is not None or self._has_slots):
            return self._workers
        # A begun stream passes the thresholds, and needs a slot as all of its tier.
        room = Headroom.ANY if queued.arrival.rank > PREMIUM_RANK else headroom
        return {
            each.name: each
            for each in eligible(self._workers, queued.arrival.avoid)
            if self._headroom(each) >= room and (limit is None or limit(each.name) >= headroom)
        }

    def _dispatch_assigned(
        self, now_s: float, limit: Callable[[str], Headroom] | None
    ) -> Iterator[QueuedRequest[T]]:
        dirty, self._dirty = self._dirty, {}
        for name in dirty:
            worker = self._workers.get(name)
            while worker is not None and worker.line and (headroom := self._headroom(worker)):
                most = headroom if limit is None else limit(name)
                if most < headroom:
                    # It may rise without an event of this queue.
                    self._dirty[name] = None
                if most is Headroom.NONE:
                    break
                begun = headroom is Headroom.ANY and not THRESHOLDS.binds(begun=True)
                queued = self._next_up(
                    worker, now_s, urgent=min(most, headroom) is Headroom.URGENT, begun=begun
                )
                if queued is None:
                    break
                self._start(worker, queued, now_s)
                yield queued

    def _next_up(
        self, worker: WorkerQueue[T], now_s: float, *, urgent: bool, begun: bool
    ) -> QueuedRequest[T] | None:
        order, line = self.settings.order, worker.line
        if isinstance(line, Lane) and len(line.queue) == 1 and not (line.late or line.begun):
            # The only one is next, late or not.
            return next(iter(line.queue.values()))
        token_s = self._estimates.seconds(worker, 1) if order is QueueOrder.IN_TIME_FIRST else None
        if token_s is None:
            return line.next_up(now_s, hit_first=order is QueueOrder.HIT_FIRST, urgent=urgent, begun=begun)
        self._estimates.now_s = now_s
        ahead = worker.running_tokens - self._estimates.computed_tokens(worker) + worker.peer_tokens

        def is_late(queued: QueuedRequest[T]) -> bool:
            slo_s = self.settings.ttft_slo_s(queued.arrival.tier)
            return slo_s is not None and now_s - queued.since_s + (ahead + queued.uncached) * token_s > slo_s

        return line.next_up(now_s, is_late=is_late, urgent=urgent, begun=begun)

    def _start(self, worker: WorkerQueue[T], queued: QueuedRequest[T], now_s: float) -> None:
        worker.start(queued, now_s)
        self._stop_waiting(queued)
        self.prompt_tokens.give(worker.name, queued.weight)
        self._expect_prefilled(worker, queued, now_s)

    def _expect_prefilled(self, worker: WorkerQueue[T], queued: QueuedRequest[T], now_s: float) -> None:
        if queued.arrival.is_non_streaming:
            due_s = self._estimates.seconds(worker, worker.running_tokens)
            self._non_streaming[queued.item] = now_s + (due_s or 0.0)

    def _move(self, queued: QueuedRequest[T], source: WorkerQueue[T], target: WorkerQueue[T]) -> None:
        source.unassign(queued)
        queued.other, queued.other_uncached = source.name, queued.uncached
        # Recomputed, not the value at arrival: others of its prefix may have moved there before it.
        target.put(queued)
        self._dirty[target.name] = None

    def _may_wait(self, arrival: Arrival) -> bool:
        most, tiers, begun = self.settings.max_requests, self.settings.tiers, arrival.is_rest
        if most is None:
            return True
        if tiers is None:
            return self.waiting < most or not QUEUE_LENGTH.binds(begun=begun)
        return not TENANT_SHARE.binds(begun=begun) or self.occupancy.admits(arrival, tiers, most)

    def _headroom(self, worker: WorkerQueue[T]) -> Headroom:
        running, tokens = len(worker.running), worker.running_tokens
        if self.policy.assigns is AssignTime.WHEN_FREE:
            # The answer still runs where its prompt has been computed.
            tokens = self.prompt_tokens.pending.get(worker.name, 0)
        return self.settings.headroom(running, tokens, worker.load.inflight_requests)

    def _end(self, item: T, now_s: float) -> tuple[WorkerQueue[T], QueuedRequest[T], float] | None:
        queued = self._requests.get(item)
        if queued is None or queued.started_s is None:
            return None
        del self._requests[item]
        if not queued.is_prefilled:
            self.prompt_tokens.take_back(queued.worker, queued.weight)
        self._non_streaming.pop(item, None)
        worker = self._workers.get(queued.worker)
        if worker is None or item not in worker.running:
            worker = self.workers.inactive[queued.worker]
        self._dirty[queued.worker] = None
        return worker, queued, worker.end(queued, now_s)

    def _decodes(self, worker: WorkerQueue[T], queued: QueuedRequest[T]) -> None:
        self._decoding[queued.item] = (worker, queued.tokens)
        worker.decoding_tokens += queued.tokens

    def _count_computed(self, worker: WorkerQueue[T], queued: QueuedRequest[T], now_s: float) -> None:
        worker.progress_s = now_s
        if not queued.is_adopted:
            self.prompt_tokens.computed += queued.weight

    def _count_prefilled(self, item: T) -> None:
        queued = self._requests.get(item)
        if queued is not None and queued.started_s is not None and not queued.is_prefilled:
            queued.is_prefilled = True
            self.prompt_tokens.take_back(queued.worker, queued.weight)
            if not queued.is_adopted:
                self.prompt_tokens.computed += queued.weight

    def _stop_waiting(self, queued: QueuedRequest[T]) -> None:
        self.waiting -= 1
        if self.settings.tiers is not None:
            self.occupancy.leave(queued.arrival)
        self.prompt_tokens.waiting -= queued.weight
        self.tokens -= queued.tokens
