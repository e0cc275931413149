"""Other ways to divide a pool, as allocators of the simulator: each sets targets, and lends and takes back by draining as the product does."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gpu_pool.allocator import Allocator, Grant, GraphBid, PoolState, PoolTerms, Share, granted

Targets = Mapping[str, int]


def _shares(graphs: Mapping[str, GraphBid], state: PoolState) -> PoolState:
    return {name: state.get(name) or Share(bid.held, bid.serial, bid.held) for name, bid in graphs.items()}


def _whole(bid: GraphBid, gpus: int) -> int:
    """Return the GPUs of the first replicas of a bid that fit together."""
    total = 0
    for size in bid.replicas:
        if total + size > min(gpus, bid.most):
            break
        total += size
    return total


def separate(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
) -> tuple[Mapping[str, Grant], PoolState]:
    """A budget for each graph, its guarantee: what one does not use, no other can."""
    targets = {name: _whole(bid, bid.guaranteed) for name, bid in graphs.items()}
    return granted(pool, graphs, _shares(graphs, state), targets, now_s)


def first_come(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
) -> tuple[Mapping[str, Grant], PoolState]:
    """One total, as of NVIDIA Dynamo's GlobalPlanner: whoever asks first gets what is free, and gives it back when its planner does."""
    shares = _shares(graphs, state)
    targets = {name: _whole(bid, shares[name].gpus) for name, bid in graphs.items()}
    free = pool.gpus - sum(max(targets[name], shares[name].exposed) for name in graphs)
    for name, bid in graphs.items():
        more = _whole(bid, targets[name] + max(0, free)) - targets[name]
        targets[name] += more
        free -= more
    return granted(pool, graphs, shares, targets, now_s)


def by_demand(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
) -> tuple[Mapping[str, Grant], PoolState]:
    """As llm-d's rescale describes it: floors first, the rest by priority x demand, capped at demand; recomputed each time."""
    targets = {name: _whole(bid, bid.guaranteed) for name, bid in graphs.items()}
    wanted = {name: _whole(bid, pool.gpus) for name, bid in graphs.items()}
    rest = pool.gpus - sum(targets.values())
    weights = {name: (1 + bid.priority) * (wanted[name] - targets[name]) for name, bid in graphs.items()}
    total = sum(weights.values())
    if total:
        shares = {name: min(rest * weights[name] / total, wanted[name] - targets[name]) for name in graphs}
        left = rest
        for name, bid in graphs.items():
            given = _whole(bid, targets[name] + int(shares[name])) - targets[name]
            targets[name] += given
            left -= given
        for name in sorted(
            graphs, key=lambda each: int(shares[each]) - shares[each]
        ):  # the largest remainder first
            more = _whole(graphs[name], targets[name] + min(left, 1)) - targets[name]
            targets[name] += more
            left -= more
    return granted(pool, graphs, _shares(graphs, state), targets, now_s)


RIVALS: Mapping[str, Allocator] = {
    "separate budgets": separate,
    "first come": first_come,
    "priority x demand": by_demand,
}
