"""The protocol of routing policies: workers with their queues and a request go in, a decision with its reason comes out.

A policy that reads prompts assigns each request when it arrives (`AssignTime.ON_ARRIVAL`), so every worker has a queue. A
policy that only compares loads assigns when a worker has free capacity (`AssignTime.WHEN_FREE`), so requests wait in one
central queue. To write a policy, implement the three methods and the attribute of `RoutingPolicy` in a class, and register
it; see docs/routing.md. Pure.
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
"""Age in simulated seconds above which a scraped KV usage is stale, so that policies compare tokens instead. Chosen: ten
scrapes."""

CACHE_BLOCKS = 8192
"""Number of prefix keys remembered per worker if its cache size is unknown. Chosen: 4M tokens of 512-token blocks, or 500,000
tokens of prompts so short that the first block's sub-block keys are their only ones; 90 KiB of memory if each prompt adds 24 new
keys, at most 512."""


class WorkerLoad:
    """The load of one worker as this router knows it.

    Attributes:
        name: Name of the worker.
        inflight_requests: Number of requests that this router has in flight there, >= 0.
        inflight_tokens: Number of tokens of these requests: prompts plus the tokens generated so far, >= 0.
        kv_usage_fraction: Fraction of the KV blocks in use at the last scrape, 0-1; None if unknown.
        scraped_tokens: Value of `inflight_tokens` at that scrape.
        scraped_uncomputed_tokens: Part of `scraped_tokens` that belonged to prompts not computed yet at that scrape, as far
            as known.
        metrics_at_s: Time of the last scrape in simulated seconds; None if there was none.
        kv_ranks: Value of `kv_usage_fraction` for each data-parallel rank; empty if the ranks are not reported separately.
        kv_total_blocks: Number of KV blocks of the worker; None if unknown.
        kv_capacity_tokens: Number of tokens for which the KV blocks of all ranks together have room; None if unknown.
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

    def set_inflight(self, requests: int, tokens: int) -> None:
        """Replace the numbers of requests and tokens in flight by counts that the worker itself has made (in the simulator)."""
        self.inflight_requests, self.inflight_tokens = requests, tokens

    def record_scrape(
        self, usage: float | None, *, tokens: int, uncomputed_tokens: int, now_s: float
    ) -> None:
        """Record a scrape of the worker's metrics at ``now_s``, in simulated seconds.

        Args:
            usage: Fraction of the KV blocks in use, 0-1; None if the metrics do not contain it.
            tokens: Tokens in flight at the worker at the scrape.
            uncomputed_tokens: Part of ``tokens`` that belonged to prompts not computed yet.
            now_s: Time of the scrape.
        """
        self.kv_usage_fraction, self.metrics_at_s = usage, now_s
        self.scraped_tokens, self.scraped_uncomputed_tokens = tokens, uncomputed_tokens

    def kv_ranks_now(self, inflight_tokens: int, now_s: float) -> tuple[float | None, ...]:
        """Return the expected fraction of KV blocks in use on each data-parallel rank now.

        Returns (None,) if the scraped fraction is unknown or over 10 simulated seconds old (`KV_MAX_AGE_S`). Each value is the
        scraped fraction plus the change of the in-flight tokens since then, distributed evenly over the ranks. Tokens sent
        since the scrape count in full, although part of them may be cached. So do prompts that were in flight at the
        scrape and not computed yet: an engine allocates their blocks only when it starts to compute them, so that
        successive scrapes would miss the prompts that wait inside the engine. A value above 1 means that more is in
        flight than fits. Example: 0.5 of a capacity of 100,000 tokens at the scrape, 10,000 more tokens since: 0.6.

        Args:
            inflight_tokens: Number of tokens in flight at the worker now, including those of other routers if they are known.
            now_s: Current time in simulated seconds.
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
        """Return the expected fraction of KV blocks in use now, at most 1; None if unknown or scraped over 10 simulated seconds ago.

        It is the scraped fraction times the tokens in flight now, divided by those in flight at the scrape. A scrape is
        up to a second old; without this projection every request of that second would be sent to the worker that was
        emptiest at its start. Example: 0.5 with 1,000 tokens in flight at the scrape, and 1,500 tokens now: 0.75.

        Args:
            inflight_tokens: Number of tokens in flight at the worker now, including those of other routers if they are known.
            now_s: Current time in simulated seconds.
        """
        usage, scraped = self.kv_usage_fraction, self.scraped_tokens
        if usage is None or self.metrics_at_s is None or now_s - self.metrics_at_s > KV_MAX_AGE_S:
            return None
        if scraped <= 0 and usage == 0:
            # The worker was idle at the scrape and is busy now: its usage does not include the requests sent since.
            return 0.0 if inflight_tokens <= 0 else None
        if scraped <= 0:
            return usage
        return min(1.0, usage * inflight_tokens / scraped)


T = TypeVar("T")

WaitingLine = Lane[T] | TierQueue[T]
"""The order of a queue's waiting requests: one lane, or a lane for each tier and tenant."""

_DECAY = 0.95
"""Chosen: sums over about the last twenty prefills, so that a slower GPU shows within seconds."""
LOAD_COST = 0.25
"""Cost of loading a token from other memory than the GPU's, relative to computing it. Chosen: an 8B model's 128 KiB per token are
loaded over PCIe 4 (25 GB/s) at 190,000 tokens/s and from a disk (6 GB/s) at 46,000, while such a GPU computes about 15,000
tokens/s: 0.08 and 0.33. It is one number, because engines name memories in their events differently."""
_PRIOR_S = 1.0
"""Chosen: a worker's own measurements outweigh the fleet's after a second of computing."""
_IDLE_HALF_LIFE_S = 60.0
"""Time without work after which a worker's measured throughput has half its weight, in simulated seconds. Chosen: a worker that
appears slow gets few requests and so is hardly measured again. With 10 s, half the workers at half speed and 1 Conversation
request/s, 95.2% of requests were on time, with 60 s 99.2%, and without any forgetting 100%."""


class PrefillThroughput:
    """Prefill tokens per simulated second: tokens of about the last 20 prefills divided by the seconds that these took.

    Both sums are weighted exponentially: each new prefill reduces the weight of all earlier ones to 95%.

    A mean of rates would give a prompt of ten uncached tokens, which takes the time of a kernel launch, the same weight as a
    prompt of ten thousand.

    Attributes:
        tokens_per_s: Present estimate; None if nothing was measured.
    """

    __slots__ = ("_seconds", "_tokens", "tokens_per_s")

    def __init__(self, tokens_per_s: float | None = None) -> None:
        """Start with ``tokens_per_s`` as if it were measured over one second; None starts without a measurement."""
        self._set(tokens_per_s or 0.0, 1.0 if tokens_per_s else 0.0)

    def _set(self, tokens: float, seconds: float) -> None:
        self._tokens, self._seconds = tokens, seconds
        self.tokens_per_s: float | None = tokens / seconds if seconds > 0 and tokens > 0 else None

    def learn(self, tokens: int, took_s: float) -> None:
        """Add one measurement: tokens computed, and the simulated seconds that this took; does nothing if ``tokens`` is 0.

        ``took_s`` is 0 for the further requests of a batch, whose time the first request of the batch contains; a negative
        value (the clock was set back) counts as 0.
        """
        if tokens > 0:
            self._set(self._tokens * _DECAY + tokens, self._seconds * _DECAY + max(0.0, took_s))

    def learn_other(self, tokens_per_s: float) -> None:
        """Add the throughput ``tokens_per_s`` that another router has measured, with the weight of one second of prefill.

        It is in tokens per simulated second.
        """
        self._set(self._tokens * _DECAY + tokens_per_s, self._seconds * _DECAY + 1.0)

    def is_own(self, idle_s: float) -> bool:
        """Return whether enough was measured on this worker to use its own throughput instead of that of all workers together.

        Measurements with the weight of one simulated second of prefill are enough; the weight halves with each 60 s without
        work.

        ``idle_s`` is the time for which the worker has had nothing to compute, in simulated seconds.
        """
        return self._seconds * _weight(idle_s) >= _PRIOR_S

    def idled(self, idle_s: float) -> None:
        """Reduce the weight of the measurements after ``idle_s`` simulated seconds without work; the weight halves every 60 s."""
        weight = _weight(idle_s)
        self._set(self._tokens * weight, self._seconds * weight)

    def mixed(self, fleet: float | None, idle_s: float = 0.0) -> float | None:
        """Return the worker's prefill tokens per simulated second, as a mean with ``fleet``; None if both are unknown.

        Where little was measured on the worker, the throughput of all workers is thus decisive: it has the weight of one
        second of measurement.

        Args:
            fleet: Throughput of all workers together, in tokens/s; None if unknown.
            idle_s: Time for which the worker has had nothing to compute, in simulated seconds, >= 0.
        """
        if fleet is None:
            return self.tokens_per_s
        if idle_s == 0:
            return (self._tokens + _PRIOR_S * fleet) / (self._seconds + _PRIOR_S)
        weight = _weight(idle_s)
        return (self._tokens * weight + _PRIOR_S * fleet) / (self._seconds * weight + _PRIOR_S)


def _weight(idle_s: float) -> float:
    return exp2(-idle_s / _IDLE_HALF_LIFE_S)


class WorkerQueue(Generic[T]):
    """One worker as policies see it: its queue, its assumed cache contents, its throughput, and its load.

    A late request is one that can no longer meet its TTFT target. All times are in simulated seconds.

    Attributes:
        load: Load as scraped and counted by this router.
        name: Name of the worker.
        index: Prefixes that the worker is assumed to have in its cache.
        throughput: Measured prefill throughput.
        line: Requests that wait for this worker, in order.
        queued_tokens: Number of uncached tokens of the requests that wait.
        running: Requests that were dispatched and whose prompts are not computed yet, by the caller's identifier.
        running_tokens: Number of uncached tokens of the running requests.
        running_by_rank: `running_tokens` by rank of the tier, the highest tier first.
        running_prompt_tokens: Number of prompt tokens of the running requests, cached or not.
        peer_tokens: Number of uncached tokens that other routers have in flight there, as last reported.
        decoding_tokens: Number of prompt tokens of the requests whose prompts the worker has computed and which it still
            answers.
        progress_s: Time at which the worker last finished a prompt or became busy, in simulated seconds.
        relative_slowdown: Prefill time per token divided by that of all workers together, at the last measurement; 1 unless
            the two differ by more than 25%. It multiplies the tokens that wait here, when policies compare workers.
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
        """Return how long the worker has had nothing to compute, in simulated seconds; 0 if it is busy."""
        return 0.0 if self.running else max(0.0, now_s - self.progress_s)

    @property
    def pending_tokens(self) -> int:
        """Uncached tokens to compute of all requests that wait for the worker or were sent there, by this router or another one.

        Requests of other routers are counted as last reported. Without tiers, requests that can no longer meet their TTFT
        target are not included while they wait, because they let others go first.
        """
        return self.queued_tokens - self.line.late_tokens + self.running_tokens + self.peer_tokens

    def pending_for(self, arrival: Arrival) -> int:
        """Return the uncached tokens that this worker has to compute before the request ``arrival``, if it arrives now.

        Late requests are those that can no longer meet their TTFT target. Without tiers, they are not included, because
        they let the new request go first. With tiers, late requests are included, but requests of lower tiers are not:
        neither those that wait here nor those in the engine, except the one whose prompt is being computed.
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
        """Tokens of all requests in flight at the worker: prompts and generated tokens of this router's, and those of other routers.

        The tokens of other routers are counted as they last reported them.
        """
        return self.load.inflight_tokens + self.peer_tokens

    def projected_kv_usage(self, now_s: float) -> float | None:
        """Return the expected fraction of KV blocks in use now, 0-1; None if unknown."""
        if self.load.kv_usage_fraction is None:
            return None
        return self.load.projected_kv_usage(self.inflight_tokens, now_s)

    @property
    def queue(self) -> dict[T, QueuedRequest[T]]:
        """Requests that wait for the worker and can still meet their TTFT target, as far as known, by the caller's identifier."""
        return self.line.queue

    def uncached(self, arrival: Arrival) -> int:
        """Return how many tokens of the prompt of ``arrival`` this worker would have to compute; at least 1 unless it is empty.

        A prompt is never cached entirely: its last token is computed to generate the first output token. A token that would be
        loaded from other memory than the GPU's counts as 0.25 tokens (`LOAD_COST`).
        """
        index = self.index
        missing = arrival.uncached(index.held(arrival.prefix))
        return missing if index.any_memory is None else self._loaded(arrival, missing)

    def _loaded(self, arrival: Arrival, missing: int) -> int:
        any_memory = self.index.any_memory
        if any_memory is None:
            return missing
        computed = min(missing, arrival.uncached(any_memory.held(arrival.prefix)))
        return computed + int(LOAD_COST * (missing - computed))

    def put(self, queued: QueuedRequest[T], uncached: int | None = None, *, is_first: bool = False) -> None:
        """Add ``queued`` to the requests that wait for this worker, after all others or (``is_first``) before them.

        The request's prompt counts as cached at the worker from now on. ``uncached`` is the number of tokens of the prompt
        to compute here; None calculates the number.
        """
        queued.worker = self.name
        queued.cached_keys = self.index.use(queued.arrival.prefix)
        if uncached is None:
            uncached = self._loaded(queued.arrival, queued.arrival.uncached(queued.cached_keys))
        queued.uncached = uncached
        self.line.put(queued, is_first=is_first)
        self.queued_tokens += queued.uncached

    def pull(self, queued: QueuedRequest[T]) -> None:
        """Remove ``queued`` from the requests that wait for this worker; its blocks stay in the prefix index (assumed cache)."""
        self.line.pull(queued)
        self.queued_tokens -= queued.uncached

    def forget(self, queued: QueuedRequest[T]) -> None:
        """Remove the blocks of ``queued`` from the prefix index (assumed cache), because the worker did not compute them.

        Blocks that were in the index before the request are kept.
        """
        self.index.truncate(queued.arrival.prefix, queued.cached_keys)

    def unassign(self, queued: QueuedRequest[T]) -> None:
        """Remove ``queued`` from the requests that wait for this worker, and its blocks from the prefix index (assumed cache).

        Blocks that were in the index before the request are kept.
        """
        self.pull(queued)
        self.forget(queued)

    def start(self, queued: QueuedRequest[T], now_s: float) -> None:
        """Move ``queued`` from the requests that wait for this worker to those that run on it, because it was dispatched.

        ``now_s`` is the time of the dispatch in simulated seconds.
        """
        self.pull(queued)
        self.line.charge(queued)
        queued.started_s = now_s
        if now_s > queued.since_s:
            # The prompt is used now; and if a request with a shared prefix was moved away meanwhile, that has removed the
            # shared blocks.
            self.index.use(queued.arrival.prefix)
        if not self.running:
            self.throughput.idled(self.idle_s(now_s))
            self.progress_s = now_s
        self.running[queued.item] = queued
        self.running_tokens += queued.uncached
        self.running_by_rank[queued.arrival.rank] += queued.uncached
        self.running_prompt_tokens += queued.tokens

    def end(self, queued: QueuedRequest[T], now_s: float) -> float:
        """Remove ``queued`` from the requests whose prompts the worker computes; return how long its prompt took.

        The result is in simulated seconds, >= 0; ``now_s`` is the time at which the prompt was computed or the request left.

        The time counts from the request's dispatch, or from the end of the previous prompt if that was later.
        """
        del self.running[queued.item]
        self.running_tokens -= queued.uncached
        self.running_by_rank[queued.arrival.rank] -= queued.uncached
        self.running_prompt_tokens -= queued.tokens
        started_s = now_s if queued.started_s is None else queued.started_s
        return max(0.0, now_s - max(started_s, self.progress_s))


_SIGNIFICANT_RATIO = 1.25
"""Chosen: measured throughputs of equal GPUs differ by less, since prompts differ; mixed GPUs differ by more."""

WorkerQueues = Mapping[str, WorkerQueue[Any]]


class AssignTime(Enum):
    """When a policy assigns a request to a worker.

    Attributes:
        ON_ARRIVAL: When the request arrives.
        WHEN_FREE: When a worker has free capacity.
    """

    ON_ARRIVAL = auto()
    """When the request arrives, among all workers. It waits in that worker's queue, and the policy reads its prompt."""
    WHEN_FREE = auto()
    """When the request is first in the central queue, among the workers that have free capacity."""


class RoutingDecision(NamedTuple):
    """The worker that a policy has chosen for a request.

    Attributes:
        worker: Name of the chosen worker.
        reason: Short phrase that says why the policy chose the worker, for logs.
        other: Name of the other candidate, to which the request can be moved while it waits; empty if there is none.
        is_hot: Whether both candidates would miss the TTFT target, so that the requests that wait at either should be moved
            to their own other candidates where these start them sooner.
        uncached: Number of tokens of the prompt to compute on `worker`, if the policy has calculated it; None leaves the
            calculation to the caller.
        other_uncached: Number of tokens of the prompt to compute on `other`; None if the policy has not calculated it.
    """

    worker: str
    reason: str
    other: str = ""
    is_hot: bool = False
    uncached: int | None = None
    other_uncached: int | None = None


class RoutingPolicy(Protocol):
    """Chooses a worker for each request.

    A class with parameters also has a class method ``from_config``, which receives the graph's router section and its
    ``spec.slo``. The optional attribute ``bottleneck_s`` is the number of simulated seconds without a computed prompt after
    which the requests that wait for a worker may be moved to another one; ``reads_usage`` says whether the policy compares
    the KV usage of the workers.

    Attributes:
        assigns: When `route` is called for a request: at arrival, or when a worker has free capacity.
    """

    assigns: AssignTime

    def worker_joined(self, name: str) -> None:
        """Record that a new worker ``name`` can be chosen from now on."""

    def worker_left(self, name: str) -> None:
        """Record that the worker ``name`` can no longer be chosen."""

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the worker that the policy chooses for a request, the reason, and possibly a second candidate.

        Args:
            arrival: The request.
            workers: Workers to choose from, by name; not empty.
            estimates: Estimated durations, at the time of the decision.
        """


def bottleneck_s(policy: RoutingPolicy) -> float:
    """Return the simulated seconds without a computed prompt after which a busy worker's waiting requests may be moved away.

    The prefills of such a worker are held up by the decodes on the same worker. The result is the attribute
    ``bottleneck_s`` of ``policy``. It is inf if ``policy`` has no such attribute; inf never moves requests.
    """
    return float(getattr(policy, "bottleneck_s", inf))


def reads_usage(policy: RoutingPolicy) -> bool:
    """Return whether a policy compares the KV usage of prefill (or aggregated) workers; True without an attribute ``reads_usage``."""
    return bool(getattr(policy, "reads_usage", True))


@runtime_checkable
class LearnsPrompts(Protocol):
    """A policy that remembers where prompts were sent, in addition to each worker's prefix index (assumed cache contents).

    It is told about the requests that other routers have sent to workers.
    """

    def prompt_queued(self, arrival: Arrival, worker: str, workers: WorkerQueues) -> None:
        """Record that another router has sent a request to a worker, which therefore has the prompt of the request in the cache.

        Args:
            arrival: The request.
            worker: Name of the worker.
            workers: All workers, by name.
        """


class Estimates:
    """Estimated durations and throughputs, in the same way for every policy.

    All times are in simulated seconds.

    Attributes:
        throughput: Prefill throughput of all workers together; used for workers that have computed little yet.
        now_s: Time of the decision, in simulated seconds.
        ttft_slo_s: TTFT target of the request to be routed, in simulated seconds; None if it has no target.
    """

    def __init__(self) -> None:
        self.throughput = PrefillThroughput()
        self.now_s = 0.0
        self.ttft_slo_s: float | None = None

    def seconds(self, worker: WorkerQueue[Any], tokens: int) -> float | None:
        """Return the time in which a worker computes ``tokens`` prompt tokens, in simulated seconds; None while no throughput is known."""
        tokens_per_s = self.tokens_per_s(worker)
        return None if tokens_per_s is None else tokens / tokens_per_s

    def tokens_per_s(self, worker: WorkerQueue[Any]) -> float | None:
        """Return a worker's estimated prefill throughput in tokens per simulated second; None while none was measured on any worker."""
        return worker.throughput.mixed(self.throughput.tokens_per_s, worker.idle_s(self.now_s))

    def computed_tokens(self, worker: WorkerQueue[Any]) -> int:
        """Return the number of tokens that a worker should have computed of the prompt that it computes now, >= 0.

        This is its throughput times the time since it started that prompt, at most the entire prompt: the prompts dispatched
        after it wait until its end is reported. Example: 10,000 tokens/s, 8,000 tokens to compute, started 0.3 s ago: 3,000.
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
        """Return the uncached tokens that a worker has to compute before a request that arrives now.

        With ``arrival`` (that request), requests of lower tiers are left out, because ``arrival`` overtakes them; None
        counts the requests of all tiers. What the worker should have computed already of its present prompt is subtracted.
        """
        pending = worker.pending_tokens if arrival is None else worker.pending_for(arrival)
        return pending - self.computed_tokens(worker) if worker.running else pending

    def relative_slowdown(self, worker: WorkerQueue[Any]) -> float:
        """Return a worker's prefill time per token, divided by that of all workers together (2 is half as fast).

        Returns 1 if the two differ by at most 25%, or if little was measured on the worker.
        """
        if worker.relative_slowdown == 1.0 or worker.running:
            return worker.relative_slowdown
        return self.measured_slowdown(worker)

    def measured_slowdown(self, worker: WorkerQueue[Any]) -> float:
        """Return a worker's prefill time per token, divided by that of all workers together, calculated from the latest measurements.

        2 means half as fast. Returns 1 if the two differ by at most 25%, or if little was measured on the worker. Policies use
        `relative_slowdown`, which for a worker with prompts to compute is the value at its last measured prefill.
        """
        fleet, own = self.throughput.tokens_per_s, self.tokens_per_s(worker)
        if fleet is None or own is None or not worker.throughput.is_own(worker.idle_s(self.now_s)):
            return 1.0
        ratio = fleet / own
        return 1.0 if 1 / _SIGNIFICANT_RATIO <= ratio <= _SIGNIFICANT_RATIO else ratio

    def ttft_s(self, worker: WorkerQueue[Any], uncached: int) -> float | None:
        """Return the estimated TTFT of a request that arrives now, in simulated seconds; None while no throughput is known.

        It is the tokens that the worker has to compute before, plus the request's ``uncached`` tokens, divided by the
        worker's throughput.
        """
        return self.seconds(worker, self.pending_tokens(worker) + uncached)


def eligible(workers: WorkerQueues, avoid: Collection[str]) -> list[WorkerQueue[Any]]:
    """Return the workers that are not named in ``avoid``, or all workers if that leaves none."""
    if not avoid:
        return list(workers.values())
    rest = [each for name, each in workers.items() if name not in avoid]
    return rest or list(workers.values())
