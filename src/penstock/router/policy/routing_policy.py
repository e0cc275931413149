"""The one protocol of routing policies: workers with their queues and a request go in, a decision with its reason comes out.

A policy that reads prompts assigns each request when it arrives (`AssignTime.ON_ARRIVAL`), so every worker has a queue.
One that only compares loads assigns when a worker is free (`AssignTime.WHEN_FREE`), so requests wait in one central
queue. To write a policy, give a class the three methods and the attribute, and register it; see docs/routing.md. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from math import exp2, inf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from penstock.router.policy.arrival import Arrival as Arrival  # noqa: PLC0414 - policies take it from here
from penstock.router.policy.arrival import Lane, QueuedRequest
from penstock.router.policy.prefixes import PrefixIndex
from penstock.router.policy.tiers import PRIORITIES, TierQueue

KV_MAX_AGE_S = 10.0
"""Chosen: ten scrapes; an older KV reading is stale, so policies compare tokens instead."""

CACHE_BLOCKS = 8192
"""Keys remembered per worker where nothing else is said. Chosen: 4M tokens of 512-token blocks, or 500,000 of
prompts so short that their first block's sub-block keys are all they have; 90 KiB of memory where prompts bring 24 new
keys, at most 512."""


class WorkerLoad:
    """One worker's load as this router knows it.

    Attributes:
        inflight_requests: Requests that this router has under way there, >= 0.
        inflight_tokens: Their tokens: prompts, and what was generated for them so far, >= 0.
        kv_usage_fraction: KV blocks in use when last scraped, 0-1; None: unknown.
        scraped_tokens: ``inflight_tokens`` at that scrape.
        scraped_uncomputed_tokens: Those of them that belonged to prompts not computed yet, as far as known.
        metrics_at_s: When the worker's metrics were last read, simulated seconds; None: never.
        kv_ranks: ``kv_usage_fraction`` of each of its data-parallel ranks; empty: not distinguished.
        kv_capacity_tokens: Tokens that the KV blocks of all ranks together hold; None: unknown.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inflight_requests = 0
        self.inflight_tokens = 0
        self.kv_usage_fraction: float | None = None
        self.scraped_tokens = 0
        self.scraped_uncomputed_tokens = 0
        self.metrics_at_s: float | None = None
        self.kv_ranks: tuple[float, ...] = ()
        self.kv_total_blocks: int | None = None
        self.kv_capacity_tokens: int | None = None

    def kv_ranks_now(self, inflight_tokens: int, now_s: float) -> tuple[float | None, ...]:
        """Return the KV usage of each rank, with what came and went since the scrape; None: unknown or too old.

        What was sent there since counts in full, although a cache may hold some of it, and evenly for all ranks. So do prompts
        that were there and not computed yet: an engine takes their blocks when it begins with them, and one reading after
        another would miss what waits in it for room.
        Above 1 more is on its way than there is room for. Half full of 100,000 tokens, 10,000 more since: 0.6.
        ``inflight_tokens`` are those there now, of other routers too where they are known.
        """
        usage, capacity = self.kv_usage_fraction, self.kv_capacity_tokens
        if usage is None or self.metrics_at_s is None or now_s - self.metrics_at_s > KV_MAX_AGE_S:
            return (None,)
        ranks = self.kv_ranks or (usage,)
        if not capacity:
            projected = self.projected_kv_usage(inflight_tokens, now_s)
            change = 0.0 if projected is None else projected - usage
        else:
            had_blocks = self.scraped_tokens - self.scraped_uncomputed_tokens
            change = (inflight_tokens - had_blocks) / capacity
        return tuple(max(0.0, each + change) for each in ranks)

    def projected_kv_usage(self, inflight_tokens: int, now_s: float) -> float | None:
        """Return the KV usage scaled by how the in-flight tokens changed since the scrape; None: unknown or too old.

        A scrape is up to a second old; without the projection every request of that second would go to
        the worker that was emptiest at its start. Half full at 1,000 tokens in flight and 1,500 now: 0.75.
        ``inflight_tokens`` as in `kv_ranks_now`.
        """
        usage, scraped = self.kv_usage_fraction, self.scraped_tokens
        if usage is None or self.metrics_at_s is None or now_s - self.metrics_at_s > KV_MAX_AGE_S:
            return None
        if scraped <= 0 and usage == 0:
            # Idle when scraped and busy now: its usage does not include the requests sent since.
            return 0.0 if inflight_tokens <= 0 else None
        if scraped <= 0:
            return usage
        return min(1.0, usage * inflight_tokens / scraped)


T = TypeVar("T")

WaitingLine = Lane[T] | TierQueue[T]
"""What a queue orders its waiting requests by: one lane, or a lane for each tier and tenant."""

_DECAY = 0.95
"""Chosen: sums over about the last twenty prefills, so that a slower GPU shows within seconds."""
LOAD_COST = 0.25
"""Chosen: tokens computed that take as long as one that is loaded from other memory. An 8B model's 128 KiB a token come
over PCIe 4 (25 GB/s) as 190,000 tokens/s and from a disk (6 GB/s) as 46,000, of some 15,000 that such a GPU computes:
0.08 and 0.33; one number, since each engine names memories in its events as it likes."""
_BORROWED_S = 1.0
"""Chosen: a worker's own measurements outweigh those of all together after a second of computing."""
_IDLE_HALF_LIFE_S = 60.0
"""Chosen: what was measured of a worker weighs half after this long without work, simulated seconds. One that looks slow is
given little and so hardly measured again. After 10 s, half the workers at half speed and 1 Conversation request/s, 95.2%
were in time, after 60 s 99.2% and without any forgetting 100%."""


class PrefillThroughput:
    """Prefill tokens per second, learnt from what was computed: tokens over seconds, both decaying.

    A mean of rates instead would let a prompt of ten new tokens, which takes the time of a launch, weigh as much
    as one of ten thousand. ``tokens_per_s`` is the estimate; None while nothing was measured.
    """

    __slots__ = ("_seconds", "_tokens", "tokens_per_s")

    def __init__(self, tokens_per_s: float | None = None) -> None:
        """Start with a throughput, as if measured over one second, or without one."""
        self._set(tokens_per_s or 0.0, 1.0 if tokens_per_s else 0.0)

    def _set(self, tokens: float, seconds: float) -> None:
        self._tokens, self._seconds = tokens, seconds
        self.tokens_per_s: float | None = tokens / seconds if seconds > 0 and tokens > 0 else None

    def learn(self, tokens: int, took_s: float) -> None:
        """Take one measurement in; ``took_s`` is 0 for requests of the same batch, and a clock that steps back counts as 0."""
        if tokens > 0:
            self._set(self._tokens * _DECAY + tokens, self._seconds * _DECAY + max(0.0, took_s))

    def learn_other(self, tokens_per_s: float) -> None:
        """Take another router's word, as if measured over a second."""
        self._set(self._tokens * _DECAY + tokens_per_s, self._seconds * _DECAY + 1.0)

    def is_own(self, idle_s: float) -> bool:
        """Return whether enough was measured here, and recently enough, to differ from the fleet's."""
        return self._seconds * _weight(idle_s) >= _BORROWED_S

    def idled(self, idle_s: float) -> None:
        """Let what was measured weigh less after a time without work, simulated seconds."""
        weight = _weight(idle_s)
        self._set(self._tokens * weight, self._seconds * weight)

    def mixed(self, fleet: float | None, idle_s: float = 0.0) -> float | None:
        """Return the estimate, tokens/s, borrowing from the fleet's while little was measured here; None: nothing known.

        ``idle_s``: for how long the worker has had nothing to compute, simulated seconds >= 0.
        """
        if fleet is None:
            return self.tokens_per_s
        if idle_s == 0:
            return (self._tokens + _BORROWED_S * fleet) / (self._seconds + _BORROWED_S)
        weight = _weight(idle_s)
        return (self._tokens * weight + _BORROWED_S * fleet) / (self._seconds * weight + _BORROWED_S)


def _weight(idle_s: float) -> float:
    return exp2(-idle_s / _IDLE_HALF_LIFE_S)


class WorkerQueue(Generic[T]):
    """One worker: its queue, its cache, its throughput, its load.

    Attributes:
        queued_tokens: Uncached tokens of those that wait.
        running: Requests dispatched and not computed yet.
        running_tokens: Uncached tokens of those that run.
        running_by_rank: The same by rank of their tier, the highest first.
        running_prompt_tokens: Prompt tokens of those that run, cached or not.
        peer_tokens: Uncached tokens that other routers have there, as last reported.
        decoding_tokens: Prompt tokens of the requests that it has computed and still answers.
        progress_s: When it last computed a prompt, or had nothing to compute.
        relative_slowdown: How many times as long as all together it took for a token when it was last measured; 1 unless
            it clearly differs. `Estimates.relative_slowdown` is what is believed now.
    """

    __slots__ = (
        "decoding_tokens",
        "index",
        "line",
        "load",
        "name",
        "peer_tokens",
        "progress_s",
        "queued_tokens",
        "relative_slowdown",
        "running",
        "running_by_rank",
        "running_prompt_tokens",
        "running_tokens",
        "throughput",
    )

    def __init__(self, load: WorkerLoad, *, now_s: float, line: WaitingLine[T] | None = None) -> None:
        self.load = load
        self.name = load.name
        self.index = PrefixIndex(CACHE_BLOCKS)
        self.throughput = PrefillThroughput()
        self.line: WaitingLine[T] = Lane() if line is None else line
        self.queued_tokens = 0
        self.running: dict[T, QueuedRequest[T]] = {}
        self.running_tokens = 0
        self.running_by_rank = [0] * len(PRIORITIES)
        self.running_prompt_tokens = 0
        self.peer_tokens = 0
        self.decoding_tokens = 0
        self.progress_s = now_s
        self.relative_slowdown = 1.0

    def idle_s(self, now_s: float) -> float:
        """Return for how long it has had nothing to compute, simulated seconds >= 0."""
        return 0.0 if self.running else max(0.0, now_s - self.progress_s)

    @property
    def pending_tokens(self) -> int:
        """Uncached tokens of all requests here but, without tiers, the late ones, which let others go first."""
        return self.queued_tokens - self.line.late_tokens + self.running_tokens + self.peer_tokens

    def pending_for(self, arrival: Arrival) -> int:
        """Return the uncached tokens to compute before a request that comes now.

        Without tiers late requests let it go first. With tiers those of lower tiers do: the ones that wait here, up to their
        share of one round, and the ones in the engine, except the one whose prompt is being computed.
        """
        line = self.line
        pending = self.queued_tokens - line.late_tokens + self.running_tokens + self.peer_tokens
        if not line.has_tiers:
            return pending
        rank = arrival.rank
        overtaken = sum(self.running_by_rank[rank + 1 :])
        if overtaken:
            first = next(iter(self.running.values()))
            overtaken -= first.uncached if first.arrival.rank > rank else 0
        return pending - line.lower_tokens(rank) - overtaken

    @property
    def inflight_tokens(self) -> int:
        """Tokens in flight there: this router's, and those of its peers as last reported."""
        return self.load.inflight_tokens + self.peer_tokens

    def projected_kv_usage(self, now_s: float) -> float | None:
        """Return the KV usage expected now, 0-1; None: unknown."""
        if self.load.kv_usage_fraction is None:
            return None
        return self.load.projected_kv_usage(self.inflight_tokens, now_s)

    @property
    def queue(self) -> dict[T, QueuedRequest[T]]:
        """Requests that wait for it and were not found late."""
        return self.line.queue

    def uncached(self, arrival: Arrival) -> int:
        """Return how many of a prompt's tokens would have to be computed here; at least 1 of any.

        A prompt is never wholly cached: its last token is computed for the first answer. What is to be loaded from other
        memory counts as `LOAD_COST` of as many tokens.
        """
        index = self.index
        missing = arrival.uncached(index.held(arrival.prefix))
        return missing if index.anywhere is None else self._loaded(arrival, missing)

    def _loaded(self, arrival: Arrival, missing: int) -> int:
        anywhere = self.index.anywhere
        if anywhere is None:
            return missing
        computed = min(missing, arrival.uncached(anywhere.held(arrival.prefix)))
        return computed + int(LOAD_COST * (missing - computed))

    def put(self, queued: QueuedRequest[T], uncached: int | None = None, *, is_first: bool = False) -> None:
        """Queue a request here, behind or before all others; its blocks count as held from now on.

        ``uncached`` are its tokens to compute here; None: to be counted.
        """
        queued.worker = self.name
        queued.held = self.index.use(queued.arrival.prefix)
        if uncached is None:
            uncached = self._loaded(queued.arrival, queued.arrival.uncached(queued.held))
        queued.uncached = uncached
        self.line.put(queued, is_first=is_first)
        self.queued_tokens += queued.uncached

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Take a request out of the queue."""
        self.line.pull(queued)
        self.queued_tokens -= queued.uncached

    def forget(self, queued: QueuedRequest[T]) -> None:
        """Unlearn the blocks that a request would have brought here, had it been computed."""
        self.index.limit(queued.arrival.prefix, queued.held)

    def unassign(self, queued: QueuedRequest[T]) -> None:
        """Take a request out of the queue that will not be computed here."""
        self.pull(queued)
        self.forget(queued)

    def start(self, queued: QueuedRequest[T], now_s: float) -> None:
        """Dispatch a request."""
        self.pull(queued)
        self.line.charge(queued)
        queued.started_s = now_s
        if now_s > queued.since_s:
            # It is used now, and one that moved away meanwhile may have taken shared blocks with it.
            self.index.use(queued.arrival.prefix)
        if not self.running:
            self.throughput.idled(self.idle_s(now_s))
            self.progress_s = now_s
        self.running[queued.item] = queued
        self.running_tokens += queued.uncached
        self.running_by_rank[queued.arrival.rank] += queued.uncached
        self.running_prompt_tokens += queued.tokens

    def end(self, queued: QueuedRequest[T], now_s: float) -> float:
        """Take back a request; return the seconds since it was given or something was last computed here, >= 0."""
        del self.running[queued.item]
        self.running_tokens -= queued.uncached
        self.running_by_rank[queued.arrival.rank] -= queued.uncached
        self.running_prompt_tokens -= queued.tokens
        started_s = now_s if queued.started_s is None else queued.started_s
        return max(0.0, now_s - max(started_s, self.progress_s))


_CLEARLY = 1.25
"""Chosen: measured throughputs of equal GPUs differ by less, since prompts differ; mixed GPUs differ by more."""

WorkerQueues = Mapping[str, WorkerQueue[Any]]


class AssignTime(Enum):
    """When a policy assigns a request to a worker."""

    ON_ARRIVAL = auto()
    """At once, among all workers; it waits in that worker's queue, and the policy reads its prompt."""
    WHEN_FREE = auto()
    """At the head of the central queue, among the workers that have room."""


class RoutingDecision(NamedTuple):
    """Where a request goes.

    Attributes:
        reason: One short phrase for logs.
        other: The other candidate to which it may be moved while it waits; empty if there is none.
        is_hot: Both candidates are overloaded: their queues should be rebalanced.
        uncached: Tokens to compute there, if the policy has counted them; None: it has not.
        other_uncached: Tokens to compute at ``other``, likewise.
    """

    worker: str
    reason: str
    other: str = ""
    is_hot: bool = False
    uncached: int | None = None
    other_uncached: int | None = None


class RoutingPolicy(Protocol):
    """Chooses a worker for each request.

    A class that has parameters has a class method ``from_config`` besides, which takes the graph's router section and its ``spec.slo``. It may
    say more by the attributes that `bottleneck_s` and `reads_usage` read.

    Attributes:
        assigns: When `route` is called for a request.
    """

    assigns: AssignTime

    def worker_joined(self, name: str) -> None:
        """Record a new worker."""

    def worker_left(self, name: str) -> None:
        """Record that a worker is gone."""

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the decision for a request; ``workers`` is not empty."""


def bottleneck_s(policy: RoutingPolicy) -> float:
    """Return the silence after which a worker counts as decode-bound and a policy's waiting requests leave it.

    Simulated seconds, see `decode_delay_s`; inf, as where the policy does not say: they stay.
    """
    return float(getattr(policy, "bottleneck_s", inf))


def reads_usage(policy: RoutingPolicy) -> bool:
    """Return whether a policy reads the entry workers' KV usage; one that does not say may."""
    return bool(getattr(policy, "reads_usage", True))


@runtime_checkable
class LearnsPrompts(Protocol):
    """A policy that remembers where prompts went, beyond each worker's index."""

    def prompt_queued(self, arrival: Arrival, worker: str, workers: WorkerQueues) -> None:
        """Record that another router has queued a request for a worker."""


class Estimates:
    """Estimates over all workers, the same for every policy.

    Attributes:
        throughput: Of all workers together; is in for one that has computed little yet.
        now_s: Time of the decision, simulated seconds.
        ttft_slo_s: TTFT that the request to place is to have, simulated seconds; None: any is in time.
    """

    def __init__(self) -> None:
        self.throughput = PrefillThroughput()
        self.now_s = 0.0
        self.ttft_slo_s: float | None = None

    def seconds(self, worker: WorkerQueue[Any], tokens: int) -> float | None:
        """Return how long a worker computes this many tokens; None while no throughput is known."""
        tokens_per_s = self.tokens_per_s(worker)
        return None if tokens_per_s is None else tokens / tokens_per_s

    def tokens_per_s(self, worker: WorkerQueue[Any]) -> float | None:
        """Return a worker's prefill throughput; None while none is known."""
        return worker.throughput.mixed(self.throughput.tokens_per_s, worker.idle_s(self.now_s))

    def computed_tokens(self, worker: WorkerQueue[Any]) -> int:
        """Return the tokens that a worker should have computed of the prompt under way there, >= 0.

        Its throughput over the time since it began, at most the entire prompt: those dispatched after it wait until its
        end is reported. 10,000 tokens/s, 8,000 to compute, begun 0.3 s ago: 3,000.
        """
        running = worker.running
        tokens_per_s = worker.throughput.mixed(self.throughput.tokens_per_s) if running else None
        if tokens_per_s is None:
            return 0
        first, began_s = next(iter(running.values())), worker.progress_s
        if first.started_s is not None and first.started_s > began_s:
            began_s = first.started_s
        computed = int((self.now_s - began_s) * tokens_per_s)
        if computed >= first.uncached:
            return first.uncached
        return max(0, computed)

    def pending_tokens(self, worker: WorkerQueue[Any], arrival: Arrival | None = None) -> int:
        """Return the uncached tokens that a worker computes before a request that comes now; None: of any tier."""
        pending = worker.pending_tokens if arrival is None else worker.pending_for(arrival)
        return pending - self.computed_tokens(worker) if worker.running else pending

    def relative_slowdown(self, worker: WorkerQueue[Any]) -> float:
        """Return how many times as long as all together a worker takes for a token; 1 where they hardly differ."""
        if worker.relative_slowdown == 1.0 or worker.running:
            return worker.relative_slowdown
        return self.measured_slowdown(worker)

    def measured_slowdown(self, worker: WorkerQueue[Any]) -> float:
        """Return the same by what has been measured, however little the difference was before."""
        fleet, own = self.throughput.tokens_per_s, self.tokens_per_s(worker)
        if fleet is None or own is None or not worker.throughput.is_own(worker.idle_s(self.now_s)):
            return 1.0
        ratio = fleet / own
        return 1.0 if 1 / _CLEARLY <= ratio <= _CLEARLY else ratio

    def ttft_s(self, worker: WorkerQueue[Any], uncached: int) -> float | None:
        """Return the estimated TTFT of a request that comes now: pending and own tokens over the throughput."""
        return self.seconds(worker, self.pending_tokens(worker) + uncached)


def eligible(workers: WorkerQueues, avoid: Collection[str]) -> list[WorkerQueue[Any]]:
    """Return the workers besides ``avoid``, or all when that leaves none."""
    if not avoid:
        return list(workers.values())
    rest = [each for name, each in workers.items() if name not in avoid]
    return rest or list(workers.values())
