"""Prefix cost: recomputing a token weighs more than waiting for one; measured best behind a single router.

What a request computes again delays not only itself but everybody behind it, and pushes another prefix out of a
cache. A policy that minimises its own TTFT counts such a token once, leaves caches too early under load, and so
makes the load that it flees from. bench/dualmap measures it. Pure.
"""

from __future__ import annotations

from penstock.router.policy.cost import prefix_cost
from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    RoutingDecision,
    WorkerQueues,
    eligible,
)
from penstock.router.policy.shortlist import ALL_UP_TO, Shortlist

_NOISE = 0.02
"""Chosen: a last block that another prompt's does not share, and no more."""


class PrefixCost:
    """The worker with the smallest pending + 4 x uncached tokens, more on a slower one; of a large fleet's shortlist.

    Where it decodes too, what it decodes counts as well. Among nearly equals the one that remembers least is taken,
    so that idle caches fill evenly.
    """

    __slots__ = ("_shortlist",)
    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self) -> None:
        """Begin without workers."""
        self._shortlist = Shortlist()

    def worker_joined(self, name: str) -> None:
        """Take a worker in."""
        self._shortlist.worker_joined(name)

    def worker_left(self, name: str) -> None:
        """Leave a worker out."""
        self._shortlist.worker_left(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the cheapest worker."""
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
