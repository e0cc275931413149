"""Other ways to divide a pool, as allocators of the simulator: each sets targets, and lends and takes back by draining as the product does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_pool.allocator import (
    Allocator,
    Grant,
    GraphBid,
    PoolState,
    PoolTerms,
    Share,
    adjusted_grants,
    wanted_gpus,
)

FLOORS = 2
"""Replicas that no graph goes below: one to prefill and one to decode."""


def _shares(graphs: Mapping[str, GraphBid], state: PoolState) -> PoolState:
    return {name: state.get(name) or Share(bid.held, bid.serial, bid.held) for name, bid in graphs.items()}


def _whole(bid: GraphBid, gpus: int) -> int:
    """Return the GPUs of the first replicas of a bid that fit together."""
    total = 0
    for size in bid.replicas:
        if total + size > min(gpus, bid.max_gpus):
            break
        total += size
    return total


def _one_more(bid: GraphBid, had: int, gpus: int) -> int:
    """Return the GPUs of the next replica; 0: there is none, or it does not fit into this many."""
    return next((more for size in range(1, gpus + 1) if (more := _whole(bid, had + size) - had)), 0)


def separate(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
) -> tuple[Mapping[str, Grant], PoolState]:
    """A budget for each graph, its guarantee: what one does not use, no other can."""
    targets = {name: _whole(bid, bid.guaranteed) for name, bid in graphs.items()}
    return adjusted_grants(pool, graphs, _shares(graphs, state), targets, now_s)


def first_come(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
) -> tuple[Mapping[str, Grant], PoolState]:
    """One total, as of NVIDIA Dynamo's GlobalPlanner: whoever asks first gets what is free, and gives it back when its planner does."""
    shares = _shares(graphs, state)
    targets = {name: _whole(bid, shares[name].gpus) for name, bid in graphs.items()}
    free = pool.gpus - sum(max(targets[name], shares[name].max_held) for name in graphs)
    for name, bid in graphs.items():
        more = _whole(bid, targets[name] + max(0, free)) - targets[name]
        targets[name] += more
        free -= more
    return adjusted_grants(pool, graphs, shares, targets, now_s)


def by_demand(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
) -> tuple[Mapping[str, Grant], PoolState]:
    """As llm-d's rescale describes it: floors first, the rest by priority x demand, capped at demand; recomputed each time.

    A high priority weighs three times a low one. What rounding to whole replicas leaves goes by the largest remainder.
    """
    targets = {name: _whole(bid, bid.guaranteed) for name, bid in graphs.items()}
    lacks = {name: wanted_gpus(bid) - targets[name] for name, bid in graphs.items()}
    rest = pool.gpus - sum(targets.values())
    weights = {name: (3 + bid.priority) * lacks[name] for name, bid in graphs.items()}
    exact = {name: min(rest * weights[name] / (sum(weights.values()) or 1), lacks[name]) for name in graphs}
    due = {name: targets[name] + exact[name] for name in graphs}
    for name, bid in graphs.items():
        given = _whole(bid, int(due[name])) - targets[name]
        targets[name] += given
        rest -= given
    while True:
        able = {name: more for name, bid in graphs.items() if (more := _one_more(bid, targets[name], rest))}
        if not able:
            break
        name = max(able, key=lambda each: due[each] - targets[each])
        targets[name] += able[name]
        rest -= able[name]
    return adjusted_grants(pool, graphs, _shares(graphs, state), targets, now_s)


def clairvoyant(
    wants: Mapping[str, Sequence[int]], requests: Mapping[str, NDArray[np.int64]], *, is_bound: bool
) -> Allocator:
    """Return the division of an oracle: GPUs go where they serve most requests of the next start-up.

    Args:
        wants: GPUs that each graph wants without a limit, by second.
        requests: That arrive, by second.
        is_bound: It keeps guarantees and lends by priority first, as the product does.
    """

    def allocate(
        pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
    ) -> tuple[Mapping[str, Grant], PoolState]:
        begin, end = int(now_s), int(now_s + pool.startup_s) + 1
        needs = {name: max([wanted_gpus(bid), *wants[name][begin:end]]) for name, bid in graphs.items()}
        floors = {
            name: bid.guaranteed if is_bound else sum(bid.replicas[:FLOORS]) for name, bid in graphs.items()
        }
        targets = {name: _whole(bid, floors[name]) for name, bid in graphs.items()}
        left = pool.gpus - sum(targets.values())
        worth = {name: float(requests[name][begin:end].sum()) / max(1, needs[name]) for name in graphs}
        ranks = {name: bid.priority if is_bound else 0 for name, bid in graphs.items()}
        for name in sorted(graphs, key=lambda each: (-ranks[each], -worth[each])):
            more = max(0, min(left, needs[name] - targets[name]))
            # Above its bid of now, a graph is kept what it will want.
            if targets[name] + more < wanted_gpus(graphs[name]):
                more = _whole(graphs[name], targets[name] + more) - targets[name]
            targets[name] += more
            left -= more
        return adjusted_grants(pool, graphs, _shares(graphs, state), targets, now_s)

    return allocate


RIVALS: Mapping[str, Allocator] = {
    "separate budgets": separate,
    "first come": first_come,
    "priority x demand": by_demand,
}
