"""Divides the GPUs of a pool between its graphs.

Pure: the drivers (operator, local backend, simulator) count the GPUs in use, store the state and deliver the grants. A graph is
allowed to hold its *grant*. `allocate` first computes the *target* of each graph. GPUs go first to guarantees, as far as the planners
want them; then to the graphs whose grant was raised less than one start-up time ago; then to all others in the pool's reclaim order.
By default that is by priority, and among graphs of equal priority the next replica goes to the graph that borrows least. Each graph
receives whole replicas in the order of its bid.

**Ceiling.** A grant above its target is lowered immediately, and the graph drains the excess. A grant below its target is raised only
by GPUs that no other graph can hold. A lowered grant counts with its old size until its graph has acknowledged it, and after that with
the GPUs that the graph still holds. A lost message, an outdated view or a crash between two steps can therefore delay a grant, but the
pool is never exceeded.

**Hysteresis.** For one start-up time a graph whose grant was raised loses nothing, and a graph whose grant was lowered gains nothing
that another graph wants. Exceptions are guarantees, a pool that shrinks, and a smaller bid of the graph itself. The next replica goes
to the graph that borrows least. Unlike division by largest remainders, this never takes a replica from a graph when the pool grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from penstock.api import ReclaimBy


@dataclass(frozen=True, slots=True)
class GraphBid:
    """Limits, request and current use of one graph. All sizes are GPUs.

    Attributes:
        guaranteed: GPUs that the graph receives whenever it wants them, >= 0.
        priority: Rank for borrowing GPUs above the guarantees; the highest borrows first.
        max_gpus: Maximum GPUs that the graph may hold.
        replicas: GPU count of each replica that its planner wants, the most urgent first, each >= 1. If the planner does not answer, the
            GPU count of each existing replica.
        held: GPUs of its existing workers, starting and draining ones included.
        serial: Serial number of the newest grant that the graph had received when ``held`` was counted; the number never decreases.
    """

    guaranteed: int
    priority: int
    max_gpus: int
    replicas: tuple[int, ...]
    held: int
    serial: int


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """Size of a pool and the rules for dividing it.

    Attributes:
        gpus: GPUs that the graphs of the pool can hold together now; GPUs of lost nodes, and of pods that belong to no graph, do not count.
        startup_s: Seconds that a replica takes to become ready; for this long after its grant was raised, a graph loses GPUs only to the
            guarantees of other graphs. The clock is that of the caller of `allocate`.
        order: Criteria, the first most important, by which graphs give GPUs back. If `ReclaimBy.PRIORITY` is missing, it is added as the
            last criterion.
    """

    gpus: int
    startup_s: float
    order: tuple[ReclaimBy, ...] = tuple(ReclaimBy)


@dataclass(frozen=True, slots=True)
class Share:
    """State of one graph that `allocate` returns and that the caller stores for the next call.

    Times are seconds of the clock that the caller of `allocate` uses.

    Attributes:
        gpus: Its grant: maximum GPUs that the graph is allowed to hold.
        serial: Serial number of the grant; it increases with each change.
        max_held: Maximum GPUs that the graph can hold, under earlier grants too, until it acknowledges that serial number.
        gained_s: Time at which the grant was raised last; None if it was never raised.
        lost_s: Time at which the grant was last lowered below the GPUs that the graph wanted; None if that never happened.
    """

    gpus: int = 0
    serial: int = 0
    max_held: int = 0
    gained_s: float | None = None
    lost_s: float | None = None


PoolState = Mapping[str, Share]
"""Stored state (grant, its serial number, times of the last changes) of each graph by name.

It must be stored before grants are delivered, so that a successor process delivers the same ones.
"""


@dataclass(frozen=True, slots=True)
class Grant:
    """Number of GPUs that a pool grants to one of its graphs, with what the graph wants and will get later.

    Attributes:
        gpus: Maximum GPUs that the graph is allowed to hold, draining workers included; the graph drains workers until it holds no more.
        serial: Serial number, which the graph must acknowledge.
        target: GPUs that the graph will be granted when other graphs have returned theirs.
        wanted: GPUs of the replicas that the graph's planner wants, limited to the graph's maximum.
    """

    gpus: int
    serial: int
    target: int
    wanted: int


Allocator = Callable[
    [PoolTerms, Mapping[str, GraphBid], PoolState, float], tuple[Mapping[str, Grant], PoolState]
]


def allocate(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState, now_s: float
) -> tuple[Mapping[str, Grant], PoolState]:
    """Divide a pool's GPUs between its graphs: return every graph's grant (maximum GPUs) by name, and the state for the next call.

    Args:
        pool: Size of the pool and the rules for dividing it.
        graphs: Limits, wanted replicas and held GPUs of each graph, by its name, in any order. A graph that is missing here but is in
            ``state`` keeps its grant. If a graph was deleted, the caller removes it from ``state`` when none of its workers exists any
            more.
        state: State returned by the last call; empty at first. A graph that is not in it starts with the GPUs that it holds.
        now_s: Current time, seconds of any clock. If the clock was set back, stored times that lie after ``now_s`` count as long ago.
    """
    shares = {name: state.get(name) or Share(bid.held, bid.serial, bid.held) for name, bid in graphs.items()}
    complete = {**state, **shares}
    absent_gpus = sum(share.max_held for name, share in state.items() if name not in graphs)
    targets = _targets(replace(pool, gpus=pool.gpus - absent_gpus), graphs, shares, now_s)
    return adjusted_grants(pool, graphs, complete, targets, now_s)


def adjusted_grants(
    pool: PoolTerms,
    graphs: Mapping[str, GraphBid],
    state: PoolState,
    targets: Mapping[str, int],
    now_s: float,
) -> tuple[Mapping[str, Grant], PoolState]:
    """Return every graph's grant (maximum GPUs) by name, as near to its target as is possible now, and the state for the next call.

    A grant above its target is lowered immediately. A grant below its target is raised by whole replicas, as far as the other graphs leave
    GPUs of the pool unused.

    Args:
        pool: Size of the pool.
        graphs: Limits, wanted replicas and held GPUs of each graph, by its name.
        state: State with an entry for every graph.
        targets: Target GPUs of each graph; their sum must be within the pool.
        now_s: Current time, as in `allocate`.
    """
    after = {name: _acknowledged(state[name], bid, targets[name], now_s) for name, bid in graphs.items()}
    free = pool.gpus - sum(share.max_held for share in {**state, **after}.values())
    for name in sorted(graphs, key=lambda each: _growth_order(graphs[each], after[each], each)):
        share = after[name]
        # A graph can still hold GPUs above its grant from an earlier grant; these are already reserved for it.
        gpus = _fitting_gpus(graphs[name].replicas, min(targets[name], share.max_held + max(0, free)))
        if gpus > share.gpus:
            free -= max(0, gpus - share.max_held)
            after[name] = Share(gpus, share.serial + 1, max(share.max_held, gpus), now_s, share.lost_s)
    grants = {
        name: Grant(after[name].gpus, after[name].serial, targets[name], wanted_gpus(bid))
        for name, bid in graphs.items()
    }
    return grants, {**state, **after}


def wanted_gpus(bid: GraphBid) -> int:
    """Return the GPUs of the most urgent replicas that a graph wants: of as many whole replicas as fit into its ``max_gpus``."""
    return _fitting_gpus(bid.replicas, bid.max_gpus)


def _acknowledged(share: Share, bid: GraphBid, target: int, now_s: float) -> Share:
    """Return the graph's state after its acknowledgement, with a grant no larger than the target."""
    is_acknowledged = bid.serial == share.serial
    max_held = max(bid.held, share.gpus, 0 if is_acknowledged else share.max_held)
    if target >= share.gpus:
        return replace(share, max_held=max_held)
    is_reclaimed = target < min(share.gpus, wanted_gpus(bid))
    return Share(target, share.serial + 1, max_held, share.gained_s, now_s if is_reclaimed else share.lost_s)


def _growth_order(bid: GraphBid, share: Share, name: str) -> tuple[bool, int, str]:
    """Return the sort key for growing when GPUs become free: graphs below their guarantee first, then by priority."""
    has_guarantee = share.gpus >= _fitting_gpus(bid.replicas, _floor(bid))
    return (has_guarantee, -bid.priority, name)


def _floor(bid: GraphBid) -> int:
    return min(bid.guaranteed, bid.max_gpus)


def _fitting_gpus(replicas: Sequence[int], gpus: int) -> int:
    """Return the total GPUs of as many of the first replicas as fit into ``gpus``."""
    total = 0
    for size in replicas:
        if total + size > gpus:
            break
        total += size
    return total


def _targets(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], shares: Mapping[str, Share], now_s: float
) -> dict[str, int]:
    """Return each graph's target, filled in this order: guarantees, recent gains, other bids, and GPUs that no other graph wants."""

    def is_recent(at_s: float | None) -> bool:
        return at_s is not None and 0.0 <= now_s - at_s < pool.startup_s

    assignment = _Assignment(pool, graphs, shares)
    floors = {name: _floor(bid) for name, bid in graphs.items()}
    assignment.fill(floors)
    assignment.fill(
        {
            name: min(share.gpus, graphs[name].max_gpus)
            for name, share in shares.items()
            if is_recent(share.gained_s)
        }
    )
    assignment.fill(
        {
            name: min(bid.max_gpus, max(floors[name], shares[name].gpus))
            if is_recent(shares[name].lost_s)
            else bid.max_gpus
            for name, bid in graphs.items()
        }
    )
    assignment.fill({name: bid.max_gpus for name, bid in graphs.items()})
    return assignment.assigned


class _Assignment:
    """Assigns a pool's GPUs to graphs, one replica at a time."""

    def __init__(self, pool: PoolTerms, graphs: Mapping[str, GraphBid], shares: Mapping[str, Share]) -> None:
        self._free = pool.gpus
        self._order = tuple(dict.fromkeys((*pool.order, ReclaimBy.PRIORITY)))
        self._graphs = graphs
        self._shares = shares
        self.assigned = dict.fromkeys(graphs, 0)
        self._further: dict[str, Iterator[int]] = {name: iter(bid.replicas) for name, bid in graphs.items()}
        self._next = {name: next(sizes, None) for name, sizes in self._further.items()}

    def fill(self, caps: Mapping[str, int]) -> None:
        """Assign replicas to the graphs, each up to its cap; the next one always goes to the graph that would return it last."""
        waiting = [
            self._assignment_order(name, size) for name in caps if (size := self._next[name]) is not None
        ]
        heapify(waiting)
        while waiting:
            name = heappop(waiting)[-1]
            size = self._next[name]
            if size is None or size > self._free or self.assigned[name] + size > caps[name]:
                continue  # nor will it fit later
            self.assigned[name] += size
            self._free -= size
            self._next[name] = size = next(self._further[name], None)
            if size is not None:
                heappush(waiting, self._assignment_order(name, size))

    def _assignment_order(self, name: str, size: int) -> tuple[list[tuple[float, ...]], bool, str]:
        """Return a graph's sort key for its next replica of ``size`` GPUs: the pool's criteria, then whether it has the replica already."""
        bid, share = self._graphs[name], self._shares[name]
        after = self.assigned[name] + size
        is_new = after > share.gpus
        granted_s = -math.inf if share.gained_s is None else share.gained_s
        ranks: dict[ReclaimBy, tuple[float, ...]] = {
            ReclaimBy.PRIORITY: (-bid.priority, after - bid.guaranteed),
            ReclaimBy.IDLE: (after > bid.held,),
            ReclaimBy.NEWEST: (math.inf if is_new else granted_s,),
        }
        return ([ranks[each] for each in self._order], is_new, name)
