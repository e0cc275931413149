"""The queue in front of one role's workers: one body for the live router and the simulator.

Under a policy that assigns on arrival every worker has a queue of its own, under one that assigns when a worker is
free all requests wait in one central queue. The caller owns time and acts: it says which workers may be chosen, what
arrives, what was prefilled or lost, and takes what is dispatched now. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import inf
from typing import TypeVar

from penstock.api import QueueOrder, Tier
from penstock.router.core.queue_state import QueueState
from penstock.router.policy.arrival import Lane, QueuedRequest
from penstock.router.policy.rebalance import RebalanceParams, decode_delay_s, plan_moves
from penstock.router.policy.routing_policy import Arrival, AssignTime, RoutingDecision, eligible
from penstock.router.policy.worker_queue import PrefillThroughput, WorkerLoad, WorkerQueue

T = TypeVar("T")

_CACHE_SLACK = 0.02
"""Chosen: a cache's size in keys follows the prompts' mean length, which moves a little with each."""


class DispatchQueue(QueueState[T]):
    """Waiting requests of one role under one policy. ``T`` is hashable and unique per request."""

    def set_workers(
        self, loads: Iterable[WorkerLoad], now_s: float, *, quarantined: Collection[str] = ()
    ) -> None:
        """Set the eligible workers; requests that wait for others are reassigned, running ones continue.

        When a worker joins, everything that waits is assigned again: a backlog would not reach it otherwise. What a
        policy that raises leaves unassigned waits in the central queue until the workers change again.

        Args:
            loads: Those workers, in the order in which policies see them.
            now_s: Simulated seconds.
            quarantined: Names of workers not eligible now that will come back unchanged: what is known of
                them is kept.
        """
        wanted = {each.name: each for each in loads}
        displaced: list[QueuedRequest[T]] = []
        for name in [name for name in self._workers if name not in wanted]:
            displaced += self._deactivate(name)
        joining = [name for name in wanted if name not in self._workers]
        if joining:
            for worker in self._workers.values():
                displaced += self._unassign(worker)
        for name in joining:
            known = self._inactive.pop(name, None)
            self._workers[name] = known or self._new_worker(wanted[name], now_s)
            self.policy.worker_joined(name)
        self._workers = {name: self._workers[name] for name in wanted}
        for name, load in wanted.items():
            self._workers[name].load = load
        for name in [n for n, each in self._inactive.items() if not each.running and n not in quarantined]:
            del self._inactive[name]
        for queued in displaced:
            self._put_central(queued)
        if self._workers and self.policy.assigns is AssignTime.ON_ARRIVAL:
            for queued in sorted(self._central, key=lambda queued: queued.since_s):
                self._relieve(self._assign(queued, now_s), now_s)

    def worker_restarted(self, name: str) -> None:
        """Forget a worker's cache: its process is a new one."""
        worker = self._workers.get(name) or self._inactive.get(name)
        if worker is not None:
            worker.index.clear()

    def set_peer_load(self, name: str, tokens: int, tokens_per_s: float | None = None) -> None:
        """Set what other routers have at a worker, as last reported.

        Args:
            name: The worker's.
            tokens: Uncached ones in flight.
            tokens_per_s: Throughput that the picker has measured there; None: it has not said.
        """
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.peer_tokens = tokens
        if tokens_per_s is not None:
            worker.throughput = PrefillThroughput(tokens_per_s)
            self._estimates.throughput.learn_other(tokens_per_s)

    def fit_cache(self, name: str) -> None:
        """Set a worker's KV cache capacity from its metrics; as configured while they do not report it."""
        worker = self._workers.get(name)
        capacity = None if worker is None else worker.load.kv_capacity_tokens
        if worker is None or not capacity:
            return
        keys = self._density.keys(capacity)
        if abs(keys - worker.index.capacity) > worker.index.capacity * _CACHE_SLACK:
            worker.index.resize(keys)

    def adopt(
        self, item: T, arrival: Arrival, load: WorkerLoad, now_s: float, *, is_prefilled: bool = False
    ) -> None:
        """Count a request as running that was sent to a worker on another router's word.

        Args:
            item: The request.
            arrival: What a policy would have known of it.
            load: The worker, which may be one that takes nothing now.
            now_s: Simulated seconds.
            is_prefilled: Its prompt is computed.
        """
        worker = self._workers.get(load.name) or self._inactive.get(load.name)
        if worker is None:
            worker = self._inactive[load.name] = self._new_worker(load, now_s)
        if self._learner is not None:
            self._learner.prompt_queued(arrival, load.name, self._workers)
        queued = QueuedRequest(item, arrival, now_s, is_adopted=True)
        if is_prefilled and self.policy.assigns is AssignTime.ON_ARRIVAL:
            worker.index.use(arrival.prefix)
            self._decoding[item] = (worker, queued.tokens)
            worker.decoding_tokens += queued.tokens
            return
        worker.put(queued)
        worker.start(queued, now_s)
        queued.weight, queued.is_prefilled = max(1, queued.uncached), is_prefilled
        self._assigned[item] = queued
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
        self, item: T, arrival: Arrival, now_s: float, *, again: bool = False, waited_s: float | None = None
    ) -> bool:
        """Queue a request; False, and nothing done, when too many wait already.

        Args:
            item: The request.
            arrival: What the policy may know.
            now_s: Simulated seconds.
            again: It was admitted before: it meets no bound, and waits before all others.
            waited_s: Simulated seconds since another picker admitted it: no bound applies. None: it is new.
        """
        is_new = not again and waited_s is None
        if is_new and not self._may_wait(arrival):
            return False
        queued = QueuedRequest(item, arrival, now_s - (waited_s or 0.0), uncached=arrival.tokens)
        decision = self._assign(queued, now_s, is_first=again)
        queued.weight = max(1, queued.uncached)
        self.waiting += 1
        if self.settings.tiers is not None:
            self.room.enter(arrival)
        self.tokens += arrival.tokens
        self._density.learn(len(arrival.chain), arrival.tokens)
        self.prompt_tokens.waiting += queued.weight
        if is_new:
            self.prompt_tokens.admit(queued.tokens, queued.weight)
        self._relieve(decision, now_s)
        return True

    def dispatch(
        self, now_s: float, is_open: Callable[[str], bool] | None = None
    ) -> Iterator[QueuedRequest[T]]:
        """Iterate over the requests to dispatch now, and count them as running; the caller counts each before the next.

        Args:
            now_s: Simulated seconds.
            is_open: Whether a worker may be sent one more request at this moment; None: all may.
        """
        if self.policy.assigns is AssignTime.WHEN_FREE:
            return self._dispatch_central(now_s, is_open)
        return self._dispatch_assigned(now_s, is_open)

    def prefilled(
        self, item: T, now_s: float, *, cached_tokens: int | None = None, measured: bool = True
    ) -> None:
        """Note that a request's prompt was prefilled.

        Where requests are assigned on arrival, its worker has room again; else it weighs until it is released.

        Args:
            item: The request.
            now_s: Simulated seconds.
            cached_tokens: What the worker says it need not compute; None: it does not say.
            measured: Whether it was noticed at once; else the time since does not show the throughput.
        """
        if self.policy.assigns is AssignTime.WHEN_FREE:
            self._count_prefilled(item)
            return
        ended = self._end(item, now_s)
        if ended is None:
            return
        worker, queued, took_s = ended
        self._decoding[item] = (worker, queued.tokens)
        worker.decoding_tokens += queued.tokens
        self._computed(worker, queued, now_s)
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
        """Note that a request left its worker, prefilled or not; ``is_computed``: as far as is known now, it was."""
        decoding = self._decoding.pop(item, None)
        if decoding is not None:
            decoding[0].decoding_tokens -= decoding[1]
            self._dirty[decoding[0].name] = None
            return
        if is_computed and self.policy.assigns is AssignTime.WHEN_FREE:
            self._count_prefilled(item)
            is_computed = False
        ended = self._end(item, now_s)
        if ended is None:
            return
        worker, queued, _ = ended
        if is_computed:
            self._computed(worker, queued, now_s)
        else:
            worker.forget(queued)

    def cancel(self, item: T) -> None:
        """Take out a request whose client has left; does nothing when it does not wait."""
        queued = self._unassigned.get(item)
        if queued is not None:
            self._take_central(queued)
            self._stop_waiting(queued)
            return
        queued = self._assigned.get(item)
        if queued is not None and queued.started_s is None:
            worker = self._workers[queued.worker]
            worker.pull(queued)
            worker.forget(queued)
            del self._assigned[item]
            self._stop_waiting(queued)

    def take_expired(
        self, now_s: float, *, served_s: float = -inf, hold_s: float = inf
    ) -> list[QueuedRequest[T]]:
        """Remove and return the requests whose own, or whose tier's, waiting limit has passed.

        Args:
            now_s: Simulated seconds.
            served_s: As in `QueueSettings.deadline_s`.
            hold_s: As there.
        """
        settings = self.settings
        is_bounded = min(settings.longest_wait_s(tier) for tier in Tier) < inf
        waiting = self.waiting_requests() if is_bounded else []
        expired = [
            each
            for each in waiting
            if settings.deadline_s(each.arrival.tier, each.since_s, served_s=served_s, hold_s=hold_s) <= now_s
        ]
        for queued in expired:
            self.cancel(queued.item)
        return expired

    def rebalance(self, now_s: float, names: Iterable[str] | None = None) -> int:
        """Move requests to the other worker of their pair where that is sooner; return how many moved.

        Args:
            now_s: Simulated seconds.
            names: Workers to relieve; absent: the decode-bound ones.
        """
        settings, bottleneck_s = self.settings, self._bottleneck_s
        if names is None:
            if bottleneck_s == inf:
                return 0
            names = [
                each.name
                for each in self._workers.values()
                if each.queue and decode_delay_s(each, self._estimates, now_s, bottleneck_s)
            ]
        aim = RebalanceParams(settings.slo_s, bottleneck_s, now_s, settings.order is QueueOrder.HIT_FIRST)
        count = 0
        for name in names:
            source, reason = self._workers[name], f"sooner than at {name}: moved"
            for move in plan_moves(source, self._workers, self._estimates, aim):
                self._move(move.queued, source, self._workers[move.to])
                move.queued.reason = reason
                count += 1
        self.moved += count
        return count

    def _take_central(self, queued: QueuedRequest[T]) -> None:
        del self._unassigned[queued.item]
        self._central.pull(queued)

    def _put_central(self, queued: QueuedRequest[T], *, is_first: bool = False) -> None:
        self._unassigned[queued.item] = queued
        self._central.put(queued, is_first=is_first)

    def _assign(
        self, queued: QueuedRequest[T], now_s: float, *, is_first: bool = False
    ) -> RoutingDecision | None:
        """Put a request into the queue of the worker that the policy chooses, or into the central one.

        A policy that raises leaves it where it was.

        Returns:
            The policy's decision; None: it waits in the central queue.
        """
        if self.policy.assigns is AssignTime.WHEN_FREE or not self._workers:
            self._put_central(queued, is_first=is_first)
            return None
        self._estimates.now_s = now_s
        decision = self.policy.route(queued.arrival, self._workers, self._estimates)
        other_uncached = 0
        if decision.other:
            known = decision.other_uncached
            other = self._workers[decision.other]
            other_uncached = other.uncached(queued.arrival) if known is None else known
        worker = self._workers[decision.worker]
        if queued.item in self._unassigned:
            self._take_central(queued)
        queued.reason, queued.other, queued.other_uncached = decision.reason, decision.other, other_uncached
        self._assigned[queued.item] = queued
        worker.put(queued, decision.uncached, is_first=is_first)
        self._dirty[decision.worker] = None
        return decision

    def _relieve(self, decision: RoutingDecision | None, now_s: float) -> None:
        if decision is not None and decision.is_hot:
            self.rebalance(now_s, (decision.worker, decision.other))

    def _free_workers(
        self, avoid: Collection[str], is_open: Callable[[str], bool] | None
    ) -> Mapping[str, WorkerQueue[T]]:
        """Return the workers that may take a request that some have failed."""
        if not avoid and is_open is None and not self.settings.has_slots:
            return self._workers
        return {
            each.name: each
            for each in eligible(self._workers, avoid)
            if self._has_room(each) and (is_open is None or is_open(each.name))
        }

    def _dispatch_central(
        self, now_s: float, is_open: Callable[[str], bool] | None
    ) -> Iterator[QueuedRequest[T]]:
        while (queued := self._central.next_up(now_s)) is not None:
            free = self._free_workers(queued.arrival.avoid, is_open)
            if not free:
                return
            self._estimates.now_s = now_s
            decision = self.policy.route(queued.arrival, free, self._estimates)
            self._take_central(queued)
            self._central.charge(queued)
            worker = self._workers[decision.worker]
            queued.reason = decision.reason
            self._assigned[queued.item] = queued
            worker.put(queued, queued.uncached)
            self._start(worker, queued, now_s)
            yield queued

    def _dispatch_assigned(
        self, now_s: float, is_open: Callable[[str], bool] | None
    ) -> Iterator[QueuedRequest[T]]:
        dirty, self._dirty = self._dirty, {}
        for name in dirty:
            worker = self._workers.get(name)
            while worker is not None and worker.line and self._has_room(worker):
                if is_open is not None and not is_open(name):
                    self._dirty[name] = None
                    break
                queued = self._next_up(worker, now_s)
                if queued is None:
                    break
                self._start(worker, queued, now_s)
                yield queued

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
        source.pull(queued)
        source.forget(queued)
        queued.other, queued.other_uncached = source.name, queued.uncached
        # Recomputed, not the value at arrival: others of its prefix may have moved there before it.
        target.put(queued)
        self._dirty[target.name] = None

    def _deactivate(self, name: str) -> list[QueuedRequest[T]]:
        """Assign nothing more to a worker; return the requests that waited for it."""
        worker = self._workers.pop(name)
        self._inactive[name] = worker
        worker.peer_tokens = 0
        self.policy.worker_left(name)
        return self._unassign(worker)

    def _unassign(self, worker: WorkerQueue[T]) -> list[QueuedRequest[T]]:
        """Take out and return all that waits for a worker."""
        displaced = list(worker.line)
        for queued in displaced:
            worker.pull(queued)
            worker.forget(queued)
            del self._assigned[queued.item]
        return displaced

    def _next_up(self, worker: WorkerQueue[T], now_s: float) -> QueuedRequest[T] | None:
        order, line = self.settings.order, worker.line
        if isinstance(line, Lane) and len(line.queue) == 1 and not line.late:
            # The only one is next, late or not.
            return next(iter(line.queue.values()))
        token_s = self._estimates.seconds(worker, 1) if order is QueueOrder.IN_TIME_FIRST else None
        if token_s is None:
            return line.next_up(now_s, hit_first=order is QueueOrder.HIT_FIRST)
        self._estimates.now_s = now_s
        ahead = worker.running_tokens - self._estimates.computed_tokens(worker) + worker.peer_tokens

        def is_late(queued: QueuedRequest[T]) -> bool:
            slo_s = self.settings.ttft_slo_s(queued.arrival.tier)
            return slo_s is not None and now_s - queued.since_s + (ahead + queued.uncached) * token_s > slo_s

        return line.next_up(now_s, is_late=is_late)

    def _may_wait(self, arrival: Arrival) -> bool:
        most, tiers = self.settings.max_requests, self.settings.tiers
        if most is None:
            return True
        return self.waiting < most if tiers is None else self.room.has_room(arrival, tiers, most)

    def _has_room(self, worker: WorkerQueue[T]) -> bool:
        settings = self.settings
        running, tokens = len(worker.running), worker.running_tokens
        bound = settings.worker_requests
        if bound is not None and worker.load.inflight_requests >= bound:
            return False
        most = settings.slot_requests
        if most is not None and running >= most:
            return False
        if self.policy.assigns is AssignTime.WHEN_FREE:
            # The answer still runs where its prompt has been computed.
            tokens = self.prompt_tokens.pending.get(worker.name, 0)
        return tokens == 0 or settings.slot_tokens is None or tokens < settings.slot_tokens

    def _end(self, item: T, now_s: float) -> tuple[WorkerQueue[T], QueuedRequest[T], float] | None:
        """Remove a running request from its worker; None when it does not run."""
        queued = self._assigned.get(item)
        if queued is None or queued.started_s is None:
            return None
        del self._assigned[item]
        if not queued.is_prefilled:
            self.prompt_tokens.take_back(queued.worker, queued.weight)
        self._non_streaming.pop(item, None)
        worker = self._workers.get(queued.worker)
        if worker is None or item not in worker.running:
            worker = self._inactive[queued.worker]
        self._dirty[queued.worker] = None
        return worker, queued, worker.end(queued, now_s)

    def _computed(self, worker: WorkerQueue[T], queued: QueuedRequest[T], now_s: float) -> None:
        worker.progress_s = now_s
        if not queued.is_adopted:
            self.prompt_tokens.computed += queued.weight

    def _count_prefilled(self, item: T) -> None:
        queued = self._assigned.get(item)
        if queued is not None and queued.started_s is not None and not queued.is_prefilled:
            queued.is_prefilled = True
            self.prompt_tokens.take_back(queued.worker, queued.weight)
            if not queued.is_adopted:
                self.prompt_tokens.computed += queued.weight

    def _stop_waiting(self, queued: QueuedRequest[T]) -> None:
        self.waiting -= 1
        if self.settings.tiers is not None:
            self.room.leave(queued.arrival)
        self.prompt_tokens.waiting -= queued.weight
        self.tokens -= queued.tokens
