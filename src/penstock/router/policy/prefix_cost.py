"""Prefix cost: recomputing a token weighs more than waiting for one; measured best behind a single router.

What a request computes again delays not only itself but everybody behind it, and pushes another prefix out of a
cache. A policy that minimises its own TTFT counts such a token once, leaves caches too early under load, and so
makes the load that it flees from. bench/dualmap measures it. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from math import inf
from typing import Any, Final

from penstock.router.policy.routing_policy import (
    Arrival,
    AssignTime,
    Estimates,
    RoutingDecision,
    WorkerQueues,
    eligible,
)
from penstock.router.policy.worker_queue import WorkerQueue

HIT_WEIGHT: Final = 4
"""Waiting tokens that one recomputed token is worth: one for its own time, which is longer on a slower worker, and three for
what it does to caches, which costs as much on any. Chosen: of 1, 1.5, 2, 3, 4, 6, 10 and 20 the smallest
behind which capacity no longer grows clearly, on all of bench/dualmap's workloads; 1 is min-TTFT."""


DECODE_WEIGHT: Final = 0.1
"""Waiting tokens that a prompt token is worth whose answer is being decoded, where workers do both. Chosen: on 8
simulated A100s at 4 Conversation requests/s, 0.05 to 0.25 bring P99 of the time per output token from 97 to 56-62 ms
and of complete requests from 35 to 24 s, with TTFT unchanged; 1 costs TTFT a third."""


def prefix_cost(worker: WorkerQueue[Any], arrival: Arrival, uncached: int, estimates: Estimates) -> float:
    """Return what a request costs at a worker, in waiting tokens: 4 x its own uncached tokens and what is before it.

    At a worker that takes s times as long for a token: (3 + s) x its own uncached tokens and s x what is before it.

    Args:
        worker: Where it would go.
        arrival: The request.
        uncached: Its tokens to compute there.
        estimates: Estimates.
    """
    before = worker.pending_for(arrival) + uncached
    if worker.running:
        before -= estimates.computed_tokens(worker)
    slowdown = worker.relative_slowdown
    if slowdown != 1.0:
        slowdown = estimates.relative_slowdown(worker)
    prefill = before * slowdown + (HIT_WEIGHT - 1) * uncached
    return prefill + DECODE_WEIGHT * worker.decoding_tokens


ALL_UP_TO: Final = 64
"""Chosen: up to this many workers all are compared, in some 30 us; sampling would save little."""
_IDLEST: Final = 16
_IN_TURN: Final = 8
"""Chosen: the entire fleet of 1,024 is seen once in 128 requests, within a second where such a fleet is busy."""
_HOLDERS: Final = 4
"""Chosen: workers remembered of each beginning; the fifth to hold a prefix is found by its load."""
_PREFIXES: Final = 1 << 16
"""Chosen: beginnings remembered, least recently used forgotten; 20 MB at most."""


class Shortlist:
    """Names the workers to ask.

    A prompt's first 1, 2, 4, 8, ... blocks and the complete prompt are remembered: another prompt that shares n blocks
    with it is found to share more than n/2 of them, and the worker's own index then says how many.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._idlest: list[str] = []
        self._names: list[str] = []
        self._turn = 0

    def worker_joined(self, name: str) -> None:
        """Take a worker into the turn, and among the idlest until its load is known."""
        self._names.append(name)
        self._idlest.append(name)

    def worker_left(self, name: str) -> None:
        """Leave a worker out."""
        self._names.remove(name)
        if name in self._idlest:
            self._idlest.remove(name)

    def candidates(
        self, beginnings: Iterable[int], workers: WorkerQueues, estimates: Estimates
    ) -> list[WorkerQueue[Any]]:
        """Return the workers to ask, each once.

        Args:
            beginnings: The request's, from `beginnings_of`.
            workers: All workers.
            estimates: Estimates.
        """
        idlest = [
            workers[name] for name in dict.fromkeys((*self._idlest, *self._in_turn())) if name in workers
        ]
        # Of so few, sorting all is quicker than a heap.
        pending = estimates.pending_tokens
        idlest.sort(key=lambda each: (pending(each), each.index.count))
        del idlest[_IDLEST:]
        self._idlest = [each.name for each in idlest]
        known = self._holders
        holders = chain.from_iterable([known[key] for key in beginnings if key in known])
        return [workers[name] for name in dict.fromkeys((*holders, *self._idlest)) if name in workers]

    def chosen(self, beginnings: Iterable[int], name: str) -> None:
        """Remember that a worker will hold a prompt."""
        holders = self._holders
        for key in beginnings:
            known = holders.get(key, ())
            if known[:1] != (name,):
                holders[key] = (name, *(each for each in known if each != name))[:_HOLDERS]
            holders.move_to_end(key)
        while len(holders) > _PREFIXES:
            holders.popitem(last=False)

    def _in_turn(self) -> Iterable[str]:
        names, first = self._names, self._turn
        self._turn = (first + _IN_TURN) % max(1, len(names))
        return names[first : first + _IN_TURN]


def beginnings_of(keys: tuple[int, ...]) -> list[int]:
    """Return the keys of a prompt's first 1, 2, 4, ... blocks, and of the complete prompt."""
    found, blocks = [], 1
    while blocks < len(keys):
        found.append(keys[blocks - 1])
        blocks *= 2
    return [*found, *keys[-1:]]


_NOISE = 0.02
"""Chosen: a last block that another prompt's does not share, and no more."""


def cheapest(
    pool: Sequence[WorkerQueue[Any]], arrival: Arrival, estimates: Estimates
) -> tuple[WorkerQueue[Any], int]:
    """Return the worker to take, of nearly equals the one that remembers least, and its tokens to compute there.

    Costs are computed of those alone that may be among the cheapest: nothing costs less than `HIT_WEIGHT` - 1 times its
    own tokens, so that a hit rules out whatever holds nothing.
    """
    uncached = [each.uncached(arrival) for each in pool]
    as_good, costs = inf, list[tuple[float, int]]()
    for at in sorted(range(len(pool)), key=uncached.__getitem__):
        own = uncached[at]
        if (HIT_WEIGHT - 1) * own > as_good:
            break
        cost = prefix_cost(pool[at], arrival, own, estimates)
        if cost <= as_good:
            costs.append((cost, at))
            as_good = min(as_good, cost * (1 + _NOISE))
    _, at = min((pool[at].index.count, at) for cost, at in costs if cost <= as_good)
    return pool[at], uncached[at]


class PrefixCost:
    """The worker with the smallest pending + 4 x uncached tokens, more on a slower one; of a large fleet's shortlist.

    Where it decodes too, what it decodes counts as well. Among nearly equals the one that remembers least is taken,
    so that idle caches fill evenly.
    """

    assigns = AssignTime.ON_ARRIVAL
    reads_usage = False

    def __init__(self) -> None:
        self._shortlist = Shortlist()

    def worker_joined(self, name: str) -> None:
        """Take a worker in."""
        self._shortlist.worker_joined(name)

    def worker_left(self, name: str) -> None:
        """Leave a worker out."""
        self._shortlist.worker_left(name)

    def route(self, arrival: Arrival, workers: WorkerQueues, estimates: Estimates) -> RoutingDecision:
        """Return the cheapest worker."""
        if len(workers) <= ALL_UP_TO:
            worker, uncached = cheapest(eligible(workers, arrival.avoid), arrival, estimates)
        else:
            beginnings = beginnings_of(arrival.chain)
            pool = self._shortlist.candidates(beginnings, workers, estimates)
            if arrival.avoid:
                pool = [each for each in pool if each.name not in arrival.avoid]
            worker, uncached = cheapest(pool or eligible(workers, arrival.avoid), arrival, estimates)
            self._shortlist.chosen(beginnings, worker.name)
        return RoutingDecision(worker.name, "lowest prefix cost", uncached=uncached)

    def prompt_queued(self, arrival: Arrival, worker: str, workers: WorkerQueues) -> None:
        """Remember of a large fleet which worker another router's prompt went to."""
        if len(workers) > ALL_UP_TO:
            self._shortlist.chosen(beginnings_of(arrival.chain), worker)
