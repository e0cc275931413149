"""A dispatch queue's settings, contents and read-only queries; `dispatch_queue` moves the requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, TypeVar

from penstock.api import QueueOrder, Tier
from penstock.router.core.tiers import QueueRoom
from penstock.router.policy.arrival import KeyDensity, Lane, PromptTokenCounts, QueuedRequest
from penstock.router.policy.prefix_index import PrefixIndex
from penstock.router.policy.routing_policy import (
    AssignTime,
    Estimates,
    LearnsPrompts,
    RoutingPolicy,
    bottleneck_s,
)
from penstock.router.policy.tier_queue import TierQueue
from penstock.router.policy.tiers import TierSettings
from penstock.router.policy.worker_queue import WaitingLine, WorkerLoad, WorkerQueue

CACHE_BLOCKS = 8192
"""Keys remembered per worker where nothing else is said. Chosen: 4M tokens of 512-token blocks, or 500,000 of
prompts so short that their first block's sub-block keys are all they have; 90 KiB of memory where prompts bring 24 new
keys, at most 512."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """How queues behave, whatever the policy.

    Attributes:
        slot_tokens: Uncached tokens dispatched to one worker at a time; None is unbounded. An idle worker always
            takes one request, however long.
        slot_requests: Requests dispatched to one worker at a time; None is unbounded.
        worker_requests: Requests that a worker has room for, answers under way included; None is unbounded.
        max_requests: Most waiting requests; None is unbounded.
        max_wait_s: Longest wait, simulated seconds; None is unbounded.
        max_wake_s: Longest wait while a stage has no worker that may be chosen, but never below `max_wait_s`, which counts
            from when all have one; less once `WakeTimes` knows how long workers take. Simulated seconds; None:
            `max_wait_s` alone, whatever the workers.
        order: Who is next in a worker's queue; the central queue is first in, first out.
        cache_blocks: Prefix blocks that one worker's cache holds.
        slo_s: TTFT that rebalancing and the deadline-aware order aim for, simulated seconds.
        tokens_per_s: Prefill throughput assumed until one is measured; None: none.
        tiers: How tiers share; None: requests are ordered as if all were of one tier.
    """

    slot_tokens: int | None = None
    slot_requests: int | None = None
    worker_requests: int | None = None
    max_requests: int | None = None
    max_wait_s: float | None = None
    max_wake_s: float | None = None
    order: QueueOrder = QueueOrder.ARRIVAL
    cache_blocks: int = CACHE_BLOCKS
    slo_s: float = 5.0
    tokens_per_s: float | None = None
    tiers: TierSettings | None = None

    @property
    def has_slots(self) -> bool:
        """Whether a worker may have no room for another request."""
        bounds = (self.slot_tokens, self.slot_requests, self.worker_requests)
        return any(bound is not None for bound in bounds)

    def ttft_slo_s(self, tier: Tier) -> float | None:
        """Return the TTFT that the deadline-aware order aims for; None: any is in time."""
        return self.slo_s if self.tiers is None else self.tiers.target(tier).ttft_s

    def longest_wait_s(self, tier: Tier) -> float:
        """Return how long a request may wait for workers that serve.

        After its tier's end-to-end target waiting on is of no use.
        """
        return min(self._most_s, self._useful_s(tier))

    def deadline_s(self, tier: Tier, since_s: float, *, served_s: float = -inf, hold_s: float = inf) -> float:
        """Return until when a request may wait, simulated seconds.

        Args:
            tier: Of the request.
            since_s: When it began to wait.
            served_s: Since when every stage has had a worker that may be chosen; inf: one has none now.
            hold_s: Longest wait for workers that is worth it, as far as `max_wake_s` allows; see `WakeTimes`.
        """
        if self.max_wake_s is None:
            own_s = since_s + self._most_s
        elif served_s == inf:
            own_s = since_s + max(min(hold_s, self.max_wake_s), self._most_s)
        else:
            own_s = max(since_s, served_s) + self._most_s
        return min(own_s, since_s + self._useful_s(tier))

    @property
    def _most_s(self) -> float:
        return inf if self.max_wait_s is None else self.max_wait_s

    def _useful_s(self, tier: Tier) -> float:
        e2e_s = None if self.tiers is None else self.tiers.target(tier).e2e_s
        return inf if e2e_s is None else e2e_s


T = TypeVar("T")


class QueueState(Generic[T]):
    """Waiting and running requests of one role, and the workers that they wait for. ``T`` is as in `DispatchQueue`.

    Attributes:
        policy: Chooses the workers.
        settings: Bounds and order.
        moved: Requests that rebalancing has moved so far.
        waiting: Requests that wait.
        tokens: Their prompt tokens.
        room: Counts them by tier, where there are tiers.
        prompt_tokens: On their way through this queue.
    """

    def __init__(self, policy: RoutingPolicy, settings: QueueSettings) -> None:
        self.policy = policy
        self._learner = policy if isinstance(policy, LearnsPrompts) else None
        self._bottleneck_s = bottleneck_s(policy)
        self.settings = settings
        self._estimates = Estimates(settings.tokens_per_s)
        self._workers: dict[str, WorkerQueue[T]] = {}
        # Workers that take nothing now, and are known because they may come back or still compute something.
        self._inactive: dict[str, WorkerQueue[T]] = {}
        # In the central queue, or, under a policy that assigns on arrival, what arrived while there was no worker.
        self._unassigned: dict[T, QueuedRequest[T]] = {}
        self._held: frozenset[Tier] = frozenset()
        self._central: WaitingLine[T] = self._new_line()
        self.room = QueueRoom()
        self._assigned: dict[T, QueuedRequest[T]] = {}
        # Running non-streaming requests, with the time at which their prompts should be prefilled.
        self._non_streaming: dict[T, float] = {}
        # Prefilled and not ended: the worker, and the number of prompt tokens.
        self._decoding: dict[T, tuple[WorkerQueue[T], int]] = {}
        # Names whose queue or room has changed since `dispatch` last saw them.
        self._dirty: dict[str, None] = {}
        self._density = KeyDensity()
        self.moved = 0
        self.waiting = 0
        self.tokens = 0
        self.prompt_tokens = PromptTokenCounts()

    def __len__(self) -> int:
        return self.waiting

    @property
    def is_full(self) -> bool:
        """Whether a new request is refused."""
        bound = self.settings.max_requests
        return bound is not None and self.waiting >= bound

    def index_of(self, name: str) -> PrefixIndex | None:
        """Return the assumed contents of a worker's cache, to be corrected by its events; None: it is ineligible."""
        worker = self._workers.get(name)
        return None if worker is None else worker.index

    def oldest_s(self, now_s: float) -> float:
        """Return how long the longest wait has lasted, simulated seconds; 0 when nothing waits."""
        return max((now_s - queued.since_s for queued in self.waiting_requests()), default=0.0)

    def uncached_tokens(self, item: T) -> int | None:
        """Return the prompt tokens expected to be computed of a request that waits or runs; None: of no other."""
        queued = self._assigned.get(item) or self._unassigned.get(item)
        return None if queued is None else queued.uncached

    def queued_tokens(self, name: str) -> int:
        """Return the uncached tokens that wait for one worker."""
        worker = self._workers.get(name)
        return 0 if worker is None else worker.queued_tokens

    def worker_of(self, item: T) -> str:
        """Return the worker that a request waits for or runs at; empty while none was chosen."""
        queued = self._assigned.get(item)
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

    def prompts_at(self, name: str) -> list[int]:
        """Return the uncached tokens of each prompt that a worker was given or that waits for it, the oldest first."""
        worker = self._workers.get(name)
        if worker is None:
            return []
        running = [each.weight for each in worker.running.values() if not each.is_prefilled]
        return running + [each.uncached for each in worker.line]

    def peer_tokens(self, name: str) -> int:
        """Return the tokens that other routers have in flight at a worker, as last reported."""
        worker = self._workers.get(name)
        return 0 if worker is None else worker.peer_tokens

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens to be computed by all workers together; 0 while no request waits in a central queue."""
        if self.policy.assigns is AssignTime.ON_ARRIVAL or not self._unassigned:
            return 0
        return self.prompt_tokens.waiting + sum(self.prompt_tokens.pending.values())

    def load_of(self, name: str, now_s: float) -> tuple[int, float | None]:
        """Return the load at a worker that a router picking beside this one should count: tokens >= 0, and its tokens/s.

        Where requests are assigned on arrival: uncached tokens that wait, and those dispatched that should not be computed
        yet. Else the tokens in flight.
        """
        worker = self._workers.get(name)
        if worker is None:
            return 0, None
        if self.policy.assigns is AssignTime.WHEN_FREE:
            return worker.load.inflight_tokens, worker.throughput.tokens_per_s
        self._estimates.now_s = now_s
        return self._estimates.pending_tokens(worker), worker.throughput.tokens_per_s

    def waits(self, item: T) -> bool:
        """Return whether a request waits here."""
        queued = self._assigned.get(item) or self._unassigned.get(item)
        return queued is not None and queued.started_s is None

    def inflight_tokens(self) -> dict[str, int]:
        """Return the tokens in flight at each worker, those of other routers included."""
        return {name: each.inflight_tokens for name, each in self._workers.items()}

    def waiting_requests(self) -> list[QueuedRequest[T]]:
        """Return the requests that wait, in no order."""
        assigned = (each for each in self._assigned.values() if each.started_s is None)
        return [*self._unassigned.values(), *assigned]

    def set_tiers(self, tiers: TierSettings) -> None:
        """Share by other settings from now on, where tiers were on before."""
        self.settings = replace(self.settings, tiers=tiers)
        for line in self._tier_queues():
            line.settings = tiers

    def hold(self, tiers: frozenset[Tier]) -> None:
        """Dispatch nothing of these tiers from now on."""
        if tiers == self._held:
            return
        self._held = tiers
        for line in self._tier_queues():
            line.held = tiers
        self._dirty |= dict.fromkeys(self._workers)

    def _tier_queues(self) -> Iterator[TierQueue[T]]:
        known = (*self._workers.values(), *self._inactive.values())
        for line in (self._central, *(each.line for each in known)):
            if isinstance(line, TierQueue):
                yield line

    def _new_line(self) -> WaitingLine[T]:
        if self.settings.tiers is None:
            return Lane()
        line: TierQueue[T] = TierQueue(self.settings.tiers)
        line.held = self._held
        return line

    def _new_worker(self, load: WorkerLoad, now_s: float) -> WorkerQueue[T]:
        # Under a policy that assigns when a worker is free the central queue has shared already.
        line = self._new_line() if self.policy.assigns is AssignTime.ON_ARRIVAL else None
        return WorkerQueue(load, cache_blocks=self.settings.cache_blocks, now_s=now_s, line=line)
