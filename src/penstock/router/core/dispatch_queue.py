"""The queue of requests in front of the workers of one role; the live router and the simulator use the same class.

If the routing policy assigns a request when it arrives, every worker has a queue of its own. If the policy assigns a request
when a worker has free capacity, all requests wait in one central queue. The caller passes the current time to each method and
does all I/O: it reports which workers are eligible, which requests arrive, and which prompts were prefilled or requests
ended, and it sends the requests that `DispatchQueue.dispatch` returns. Pure.
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
    """The waiting and running requests of one role under one routing policy.

    A request waits until it is dispatched to a worker, and then runs until `release`. ``T`` is the type by which the caller
    identifies a request; its values must be hashable and unique per request. All times are in simulated seconds.

    Attributes:
        policy: Routing policy that chooses the worker of each request.
        settings: Limits, order and tier shares of this queue.
        workers: Eligible and inactive workers of the role, each with its own queue, prefix index and throughput.
        isolated: Waiting requests that are suspected of crashing workers, by request. The policy does not assign them,
            because each must run alone on a worker, so that it is known which request has crashed the worker if the worker
            dies.
        occupancy: Number of waiting requests per tier and tenant; only counted if tiers are enabled.
        moved: Number of times that rebalancing has moved a waiting request to another worker, since this queue was created.
        waiting: Number of requests that wait now, those in `isolated` included.
        tokens: Number of prompt tokens, cached ones included, of the requests that wait now.
        prompt_tokens: Counts of the uncached prompt tokens that wait, were dispatched and were computed.
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
        self.isolated: dict[T, QueuedRequest[T]] = {}
        self.occupancy = QueueOccupancy()
        # Requests that wait (with an empty `worker` while they are in the central queue) and requests that run.
        self._requests: dict[T, QueuedRequest[T]] = {}
        # Running non-streaming requests, with the time at which their prompts should be prefilled.
        self._non_streaming: dict[T, float] = {}
        # Requests whose prompt was prefilled and which have not ended: their worker, and their number of prompt tokens.
        self._decoding: dict[T, tuple[WorkerQueue[T], int]] = {}
        # Names of the workers whose queue or free capacity has changed since the last call of `dispatch`.
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
        out_of_blocks: frozenset[str] = frozenset(),
    ) -> None:
        """Set the eligible workers (those that can be sent requests now). Waiting requests may be assigned again; running ones continue.

        Requests that wait for a worker that is no longer eligible are assigned to another one. If a worker joins, all
        waiting requests are assigned again, because the existing backlog would otherwise not reach the new worker. If the
        policy raises an exception, the requests that are not yet assigned wait in the central queue until the workers
        change again.

        Args:
            loads: Eligible workers, in the order in which the policy sees them.
            now_s: Current time in simulated seconds.
            quarantined: Names of workers that are not eligible now and will return with the same cache; their learned state
                (prefix index, throughput) is kept. The learned state of other ineligible workers is deleted when nothing runs
                there any more.
            out_of_blocks: Names of eligible workers that reject requests or have no free KV blocks; requests are reassigned
                to other workers if possible.
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
                self._relieve(self._assign(queued, now_s, busy=out_of_blocks), now_s)

    def adopt(
        self, item: T, arrival: Arrival, load: WorkerLoad, now_s: float, *, is_prefilled: bool = False
    ) -> None:
        """Count a request as running that another router has dispatched to a worker.

        Args:
            item: The request.
            arrival: The request's prompt and limits, for the policy and the prefix index.
            load: Worker to which the request was sent, and its load; the worker can be one that takes no new requests
                now.
            now_s: Current time in simulated seconds.
            is_prefilled: Whether the worker has already computed the prompt.
        """
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
            self.prompt_tokens.add_pending(worker.name, queued.weight)
            self._expect_prefilled(worker, queued, now_s)

    def learn(self, name: str, arrival: Arrival) -> None:
        """Record that a worker has computed the prompt of ``arrival``, as another router reports.

        The blocks of the prompt then count as cached at the worker. Does nothing if the worker ``name`` cannot be sent
        requests now.
        """
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
        is_retry: bool = False,
        waited_s: float | None = None,
        busy: frozenset[str] = frozenset(),
    ) -> bool:
        """Add a request to the queue; return False, and do nothing, if the limits on waiting requests do not admit it.

        A request that is suspected of crashing workers (`Arrival.alone_at` is not empty) is put into `isolated` (the
        waiting requests that must run alone on a worker) until `dispatch_isolated` is called for it.

        Args:
            item: The request.
            arrival: The request as the policy sees it.
            now_s: Current time in simulated seconds.
            is_retry: Whether the request was admitted before (a retry). It is always admitted and put before the other waiting
                requests.
            waited_s: Simulated seconds since another router admitted the request; it is then always admitted. None for a
                request that no router has admitted yet.
            busy: Names of workers that get the request only if there is no other worker, for example because they are above a
                threshold.
        """
        is_new = not is_retry and waited_s is None
        if is_new and not self._may_wait(arrival):
            return False
        since_s = now_s - (waited_s or 0.0)
        queued = QueuedRequest(item, arrival, since_s, uncached=arrival.tokens, is_retry=is_retry)
        decision = None
        if arrival.alone_at:
            self.isolated[item] = self._requests[item] = queued
        else:
            decision = self._assign(queued, now_s, is_first=is_retry, busy=busy)
        queued.weight = max(1, queued.uncached)
        self.waiting += 1
        if self.settings.tiers is not None:
            self.occupancy.enter(arrival)
        self.tokens += arrival.tokens
        self.workers.density.learn(len(arrival.chain), arrival.tokens)
        self.prompt_tokens.waiting += queued.weight
        if is_new and not arrival.is_continuation:
            self.prompt_tokens.routed += queued.tokens
            self.prompt_tokens.admitted += queued.weight
        self._relieve(decision, now_s)
        return True

    def dispatch_isolated(self, item: T, name: str, now_s: float, *, reason: str) -> QueuedRequest[T]:
        """Dispatch a request that is suspected of crashing workers to the worker ``name``, where it runs alone; return the request.

        ``reason`` is a short phrase for the log that says why the request goes to this worker.

        The request is one of `isolated`, for which the routing policy is not asked.

        Raises:
            KeyError: the request does not wait in `isolated`, or the worker cannot be sent requests now.
        """
        queued, worker = self.isolated.pop(item), self._workers[name]
        queued.reason = reason
        worker.put(queued)
        self._start(worker, queued, now_s)
        return queued

    def dispatch(
        self, now_s: float, limit: Callable[[str], Headroom] | None = None
    ) -> Iterator[QueuedRequest[T]]:
        """Iterate over the requests to send to their workers now; each is counted as running when it is yielded.

        The caller must apply each request to the workers' load before it takes the next one, because the choice of the next
        one depends on that load.

        Args:
            now_s: Current time in simulated seconds.
            limit: Returns, for a worker's name, which requests the caller allows to be sent there now: none, only those
                of the system and premium tiers, or all. This queue's own limits apply in addition. None allows all
                requests everywhere.
        """
        if self.policy.assigns is AssignTime.WHEN_FREE:
            return self._dispatch_central(now_s, limit)
        return self._dispatch_assigned(now_s, limit)

    def prefilled(
        self, item: T, now_s: float, *, cached_tokens: int | None = None, measured: bool = True
    ) -> None:
        """Record that a request's prompt was prefilled; does nothing if the request does not run here.

        If the routing policy assigns requests on arrival, the request no longer counts towards the limits on the worker's
        prompts that are not computed yet. Otherwise it counts until `release`.

        Args:
            item: The request.
            now_s: Current time in simulated seconds.
            cached_tokens: Prompt tokens that the worker found in its cache; None if unknown.
            measured: Whether this is reported at the moment at which the prefill ended, so that its duration can be measured.
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
        """Record the prefills of non-streaming requests as finished if their estimated duration has passed at ``now_s`` (simulated).

        A non-streaming response does not show when its prompt was computed.
        """
        for item in [item for item, due_s in self._non_streaming.items() if due_s <= now_s]:
            self.prefilled(item, now_s, measured=False)

    def release(self, item: T, now_s: float, *, is_computed: bool = False) -> None:
        """Record that a request has left its worker, whether or not its prompt was prefilled; does nothing if it does not run on a worker.

        Args:
            item: The request.
            now_s: Current time in simulated seconds.
            is_computed: Whether the prompt is known to have been computed, although `prefilled` was not called (a
                complete non-streaming response). If False and the prompt was not prefilled, its prefix is removed from
                the worker's prefix index (assumed cache contents).
        """
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
        """Remove a waiting request, for example because its client has disconnected; does nothing if the request does not wait."""
        queued = self._requests.get(item)
        if queued is None or queued.started_s is not None:
            return
        if item in self.isolated:
            del self.isolated[item]
        elif queued.worker:
            self._workers[queued.worker].unassign(queued)
        else:
            self._central.pull(queued)
        del self._requests[item]
        self._stop_waiting(queued)

    def take_expired(
        self, now_s: float, *, served_s: float = -inf, max_startup_wait_s: float = inf
    ) -> list[QueuedRequest[T]]:
        """Remove and return the requests whose time limit in the queue has passed.

        The result is empty if no time limit has passed.

        Args:
            now_s: Current time in simulated seconds.
            served_s: Time since which every stage (prefill and decode, or aggregated) has had a worker; inf if a stage has
                none now. While a stage has none, the longer limit for requests that wait for workers to be started applies.
            max_startup_wait_s: Maximum wait for workers that are starting, in simulated seconds, derived from measured
                startup times; inf applies the configured limit alone.
        """

        def deadline_s(each: QueuedRequest[T]) -> float:
            return self.settings.deadline_s(
                each.arrival.tier,
                each.since_s,
                is_interrupted=each.arrival.is_continuation,
                served_s=served_s,
                max_startup_wait_s=max_startup_wait_s,
            )

        waiting = self.waiting_requests() if self.waiting else ()
        expired = [each for each in waiting if deadline_s(each) <= now_s]
        for queued in expired:
            self.cancel(queued.item)
        return expired

    def rebalance(self, now_s: float, names: Iterable[str] | None = None) -> None:
        """Move waiting requests to the second candidate worker that the policy named for them, if they start sooner there.

        Only requests of a worker whose queue would miss the TTFT target (`QueueSettings.slo_s`) are moved, and only until
        the queue would meet the target.

        Args:
            now_s: Current time in simulated seconds.
            names: Names of the workers whose waiting requests may be moved; None for all workers that are limited by decode
                (they have prompts to compute, but have computed none for a time that the policy sets, because their running
                requests occupy them with decoding), if the policy rebalances such workers at all.
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
        """Replace the tier settings, also for the requests that wait already.

        Tiers must have been enabled when the queue was created; otherwise its requests continue to wait without an order
        of tiers.
        """
        self.settings = replace(self.settings, tiers=tiers)
        self.workers.set_tiers(tiers)

    def set_held_tiers(self, tiers: frozenset[Tier]) -> None:
        """Dispatch no request of these tiers until the next call replaces the set; an empty set dispatches all tiers again."""
        if self.workers.set_held_tiers(tiers):
            self._dirty |= dict.fromkeys(self._workers)

    @property
    def is_full(self) -> bool:
        """Whether a new request would be rejected because `QueueSettings.max_requests` requests wait."""
        bound = self.settings.max_requests
        return bound is not None and self.waiting >= bound

    def oldest_s(self, now_s: float) -> float:
        """Return the waiting time of the request that has waited longest, in simulated seconds; 0 if no request waits."""
        return max((now_s - queued.since_s for queued in self.waiting_requests()), default=0.0)

    def waits(self, item: T) -> bool:
        """Return whether a request waits in this queue; False if it runs on a worker already, or is not in this queue."""
        queued = self._requests.get(item)
        return queued is not None and queued.started_s is None

    def uncomputed_requests(self) -> list[QueuedRequest[T]]:
        """Return the requests whose prompts are not computed yet, both waiting and dispatched ones, in no particular order."""
        return [each for each in self._requests.values() if not each.is_prefilled]

    def waiting_requests(self) -> list[QueuedRequest[T]]:
        """Return the requests that wait, in no particular order."""
        return [each for each in self._requests.values() if each.started_s is None]

    def uncached_tokens(self, item: T) -> int | None:
        """Return the number of prompt tokens expected to be computed (not cached) for a request; None if it is not in this queue."""
        queued = self._requests.get(item)
        return None if queued is None else queued.uncached

    def worker_of(self, item: T) -> str:
        """Return the name of the worker that a request waits for or runs on.

        Returns an empty string if no worker was chosen for the request yet, or if the request is not in this queue.
        """
        queued = self._requests.get(item)
        return "" if queued is None else queued.worker

    def prefill_tokens(self, name: str) -> int:
        """Return the uncached prompt tokens that are queued for the worker ``name`` or were dispatched to it and are not computed yet.

        If the policy assigns requests on arrival, the tokens that other routers have reported for this worker are
        included. Returns 0 if the worker cannot be sent requests now.
        """
        worker = self._workers.get(name)
        if worker is None:
            return 0
        peers = worker.peer_tokens if self.policy.assigns is AssignTime.ON_ARRIVAL else 0
        return worker.queued_tokens + self.prompt_tokens.pending.get(name, 0) + peers

    def uncomputed_tokens(self, name: str, now_s: float) -> int:
        """Return the uncached prompt tokens that were dispatched to a worker and have probably not been computed yet, >= 0.

        The part that the worker should have computed since the last prefill ended, by its measured throughput, is subtracted.
        """
        pending, worker = self.prompt_tokens.pending.get(name, 0), self._workers.get(name)
        if not pending or worker is None or self.policy.assigns is AssignTime.WHEN_FREE:
            return pending
        self._estimates.now_s = now_s
        return max(0, pending - self._estimates.computed_tokens(worker))

    def prompts_at(self, name: str) -> list[int]:
        """Return the uncached tokens of each prompt that a worker has to compute: first the running ones, then those queued for it.

        Returns an empty list if the worker ``name`` cannot be sent requests now.
        """
        worker = self._workers.get(name)
        if worker is None:
            return []
        running = [each.weight for each in worker.running.values() if not each.is_prefilled]
        return running + [each.uncached for each in worker.line]

    @property
    def backlog_tokens(self) -> int:
        """Uncached prompt tokens that all workers together still have to compute, if requests wait without an assigned worker.

        Both waiting and dispatched requests are counted. 0 if no request waits, or if the policy assigns each request to
        a worker on arrival.
        """
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
        """Put a request into the queue of the worker that the policy chooses; return None if it waits in the central queue.

        If the policy raises an exception, the request stays where it was. Workers in ``busy`` are passed over, unless only
        workers that have failed this request (`Arrival.avoid`) would be left.
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
                queued = self._central.next_up(
                    now_s, urgent=True, allow_resuming=not THRESHOLDS.applies(is_interrupted=True)
                )
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
        """Return the workers that have capacity for a request and for which ``limit`` returns at least ``headroom``."""
        if not (queued.arrival.avoid or limit is not None or self._has_slots):
            return self._workers
        # A stream that is resumed is exempt from the thresholds, but needs a free slot like every request of its tier.
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
                    # The caller's limit can rise without an event that this queue sees, so the worker is checked again next
                    # time.
                    self._dirty[name] = None
                if most is Headroom.NONE:
                    break
                allow_resuming = headroom is Headroom.ANY and not THRESHOLDS.applies(is_interrupted=True)
                queued = self._next_up(
                    worker,
                    now_s,
                    urgent=min(most, headroom) is Headroom.URGENT,
                    allow_resuming=allow_resuming,
                )
                if queued is None:
                    break
                self._start(worker, queued, now_s)
                yield queued

    def _next_up(
        self, worker: WorkerQueue[T], now_s: float, *, urgent: bool, allow_resuming: bool
    ) -> QueuedRequest[T] | None:
        order, line = self.settings.order, worker.line
        if isinstance(line, Lane) and len(line.queue) == 1 and not (line.late or line.resuming):
            # A request that waits alone is next, whether it can still meet its target or not.
            return next(iter(line.queue.values()))
        token_s = self._estimates.seconds(worker, 1) if order is QueueOrder.IN_TIME_FIRST else None
        if token_s is None:
            return line.next_up(
                now_s, hit_first=order is QueueOrder.HIT_FIRST, urgent=urgent, allow_resuming=allow_resuming
            )
        self._estimates.now_s = now_s
        ahead = worker.running_tokens - self._estimates.computed_tokens(worker) + worker.peer_tokens

        def is_late(queued: QueuedRequest[T]) -> bool:
            slo_s = self.settings.ttft_slo_s(queued.arrival.tier)
            return slo_s is not None and now_s - queued.since_s + (ahead + queued.uncached) * token_s > slo_s

        return line.next_up(now_s, is_late=is_late, urgent=urgent, allow_resuming=allow_resuming)

    def _start(self, worker: WorkerQueue[T], queued: QueuedRequest[T], now_s: float) -> None:
        worker.start(queued, now_s)
        self._stop_waiting(queued)
        self.prompt_tokens.add_pending(worker.name, queued.weight)
        self._expect_prefilled(worker, queued, now_s)

    def _expect_prefilled(self, worker: WorkerQueue[T], queued: QueuedRequest[T], now_s: float) -> None:
        if queued.arrival.is_non_streaming:
            due_s = self._estimates.seconds(worker, worker.running_tokens)
            self._non_streaming[queued.item] = now_s + (due_s or 0.0)

    def _move(self, queued: QueuedRequest[T], source: WorkerQueue[T], target: WorkerQueue[T]) -> None:
        source.unassign(queued)
        queued.other, queued.other_uncached = source.name, queued.uncached
        # The uncached tokens are counted again: requests with the same prefix may have moved there since this one arrived.
        target.put(queued)
        self._dirty[target.name] = None

    def _may_wait(self, arrival: Arrival) -> bool:
        most, tiers, is_interrupted = self.settings.max_requests, self.settings.tiers, arrival.is_continuation
        if most is None:
            return True
        if tiers is None:
            return self.waiting < most or not QUEUE_LENGTH.applies(is_interrupted=is_interrupted)
        return not TENANT_SHARE.applies(is_interrupted=is_interrupted) or self.occupancy.admits(
            arrival, tiers, most
        )

    def _headroom(self, worker: WorkerQueue[T]) -> Headroom:
        running, tokens = len(worker.running), worker.running_tokens
        if self.policy.assigns is AssignTime.WHEN_FREE:
            # Requests whose prompts are computed still run there and must not be counted as prefill work.
            tokens = self.prompt_tokens.pending.get(worker.name, 0)
        return self.settings.headroom(running, tokens, worker.load.inflight_requests)

    def _end(self, item: T, now_s: float) -> tuple[WorkerQueue[T], QueuedRequest[T], float] | None:
        queued = self._requests.get(item)
        if queued is None or queued.started_s is None:
            return None
        del self._requests[item]
        if not queued.is_prefilled:
            self.prompt_tokens.remove_pending(queued.worker, queued.weight)
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
            self.prompt_tokens.remove_pending(queued.worker, queued.weight)
            if not queued.is_adopted:
                self.prompt_tokens.computed += queued.weight

    def _stop_waiting(self, queued: QueuedRequest[T]) -> None:
        self.waiting -= 1
        if self.settings.tiers is not None:
            self.occupancy.leave(queued.arrival)
        self.prompt_tokens.waiting -= queued.weight
        self.tokens -= queued.tokens
