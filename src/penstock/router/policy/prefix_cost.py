"""Prefix cost: recomputing a token weighs more than waiting for one; measured best behind a single router.

What a request computes again delays not only itself but everybody behind it, and pushes another prefix out of a
cache. A policy that minimises its own TTFT counts such a token once, leaves caches too early under load, and so
makes the load that it flees from. bench/dualmap measures it. Pure.
"""

from __future__ import annotations

from typing import Self

from penstock.api import RouterConfig
from penstock.router.policy.cost import prefix_cost
from penstock.router.policy.dualmap import PairCost
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

_NOISE = 0.02
"""Chosen: a last block that another prompt's does not share, and no more."""


class PrefixCost:
    """The worker with the smallest pending + 4 x uncached tokens, more on a slower one; of a large fleet's shortlist.

    Where it decodes too, what it decodes counts as well. Among nearly equals the one that remembers least is taken,
    so that idle caches fill evenly. Where requests of a prefix are scattered over routers, whatever this one believes
    of a cache is true of the prefix's two candidates at best, so it chooses between those.
    """

    __slots__ = ("_pair", "_shortlist")
    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self, pair: RoutingPolicy | None = None) -> None:
        """Take what chooses where requests of a prefix are scattered; None: the same cost, over all."""
        self._pair = pair
        self._shortlist = Shortlist()

    @classmethod
    def from_config(cls, config: RouterConfig) -> Self:
        """Return the policy that a graph's router section asks for."""
        return cls(PairCost.from_config(config))

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
