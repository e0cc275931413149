"""The one protocol of routing policies: workers with their queues and a request go in, a decision with its reason comes out.

A policy that reads prompts assigns each request when it arrives (`AssignTime.ON_ARRIVAL`), so every worker has a queue.
One that only compares loads assigns when a worker is free (`AssignTime.WHEN_FREE`), so requests wait in one central
queue. To write a policy, give a class the three methods and the attribute, and register it; see docs/routing.md. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from math import inf
from typing import Any, NamedTuple, Protocol, runtime_checkable

from penstock.router.policy.arrival import Arrival
from penstock.router.policy.worker_queue import PrefillThroughput, WorkerQueue

__all__ = [
    "Arrival",
    "AssignTime",
    "Estimates",
    "LearnsPrompts",
    "RoutingDecision",
    "RoutingPolicy",
    "WorkerQueues",
    "bottleneck_s",
    "eligible",
    "reads_usage",
]

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
        worker: The worker's name.
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

    A class that has parameters has a class method ``from_config`` besides, which takes the graph's router section. It may
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
        throughput: Of all workers together; stands in for one that has computed little yet.
        now_s: Time of the decision, simulated seconds.
    """

    __slots__ = ("now_s", "throughput")

    def __init__(self, tokens_per_s: float | None = None) -> None:
        """Start with a prefill throughput, tokens/s, or without one."""
        self.throughput = PrefillThroughput(tokens_per_s)
        self.now_s = 0.0

    def seconds(self, worker: WorkerQueue[Any], tokens: int) -> float | None:
        """Return how long a worker computes ``tokens``; None while no throughput is known."""
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
