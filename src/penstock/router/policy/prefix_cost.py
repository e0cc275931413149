"""Prefix cost: recomputing a token weighs more than waiting for one; measured best behind a single router.

What a request computes again delays not only itself but everybody behind it, and pushes another prefix out of a
cache. A policy that minimises its own TTFT counts such a token once, leaves caches too early under load, and so
makes the load that it flees from. bench/dualmap measures it. Pure.
"""

from __future__ import annotations

from typing import Any

from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    RoutingDecision,
    RoutingPolicy,
    WorkerQueues,
    eligible,
)
from penstock.router.policy.shortlist import ALL_UP_TO, Shortlist
from penstock.router.policy.worker_queue import WorkerQueue

HIT_WEIGHT = 4
"""Waiting tokens that one recomputed token is worth: one for its own time, which is longer on a slower worker, and three for
what it does to caches, which costs as much on any. Chosen: of 1, 1.5, 2, 3, 4, 6, 10 and 20 the smallest
behind which capacity no longer grows clearly, on all of bench/dualmap's workloads; 1 is min-TTFT."""


DECODE_WEIGHT = 0.1
"""Waiting tokens that a prompt token is worth whose answer is being decoded, where workers do both. Chosen: on 8
simulated A100s at 4 Conversation requests/s, 0.05 to 0.25 bring P99 of the time per output token from 97 to 56-62 ms
and of whole requests from 35 to 24 s, with TTFT unchanged; 1 costs TTFT a third."""

_NOISE = 0.02
"""Chosen: a last block that another prompt's does not share, and no more."""


def prefix_cost(worker: WorkerQueue[Any], arrival: Arrival, uncached: int, estimates: Estimates) -> float:
    """Return what a request costs at a worker, in waiting tokens: 4 x its own uncached tokens and what is before it.

    At a worker that takes s times as long for a token: (3 + s) x its own uncached tokens and s x what is before it.

    Args:
        worker: Where it would go.
        arrival: The request.
        uncached: Its tokens to compute there.
        estimates: Estimates.
    """
    before = estimates.pending_tokens(worker, arrival) + uncached
    prefill = before * estimates.relative_slowdown(worker) + (HIT_WEIGHT - 1) * uncached
    return prefill + DECODE_WEIGHT * worker.decoding_tokens


class PrefixCost:
    """The worker with the smallest pending + 4 x uncached tokens, more on a slower one; of a large fleet's shortlist.

    Where it decodes too, what it decodes counts as well. Among nearly equals the one that remembers least is taken,
    so that idle caches fill evenly. Where requests of a prefix are scattered over routers, whatever this one believes
    of a cache is true of the prefix's two candidates at best, so it chooses between those.
    """

    __slots__ = ("_pair", "_shortlist")
    assigns = AssignTime.ON_ARRIVAL

    def __init__(self, pair: RoutingPolicy | None = None) -> None:
        """Take what chooses where requests of a prefix are scattered; None: the same cost, over all."""
        self._pair = pair
        self._shortlist = Shortlist()

    def worker_joined(self, name: str) -> None:
        """Take a worker in."""
        self._shortlist.worker_joined(name)
        if self._pair is not None:
            self._pair.worker_joined(name)

    def worker_left(self, name: str) -> None:
        """Leave a worker out."""
        self._shortlist.worker_left(name)
        if self._pair is not None:
            self._pair.worker_left(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the cheapest worker."""
        if estimates.is_scattered and self._pair is not None:
            return self._pair.route(arrival, workers, estimates)
        is_large = len(workers) > ALL_UP_TO
        pool = self._shortlist.candidates(arrival, workers, estimates) if is_large else []
        pool = pool or eligible(workers, arrival.avoid)
        uncached = [each.uncached(arrival) for each in pool]
        costs = [prefix_cost(each, arrival, own, estimates) for each, own in zip(pool, uncached, strict=True)]
        as_good = min(costs) * (1 + _NOISE)
        _, at = min((pool[at].index.count, at) for at, cost in enumerate(costs) if cost <= as_good)
        if is_large:
            self._shortlist.chosen(arrival, pool[at].name)
        return RoutingDecision(pool[at].name, "lowest prefix cost", uncached=uncached[at])

    def prompt_queued(self, arrival: Arrival, worker: str, workers: WorkerQueues) -> None:
        """Remember of a large fleet which worker another router's prompt went to."""
        if len(workers) > ALL_UP_TO:
            self._shortlist.chosen(arrival, worker)
