"""Which graph of a GPU pool may hold how many GPUs now.

Pure; the drivers (operator, local backend, simulator) count what exists, keep the state and deliver the grants. A graph may
hold its *grant*. `allocate` first finds the *target* of each graph: its guarantee as far as its planner wants it, then what
graphs that have gained within a start-up hold, then the rest by the pool's order of who gives back: by priority, and within a
priority evenly (the next replica to the graph that borrows least) unless the pool says otherwise. Every graph is given whole
replicas, in the order of its bid.

**Ceiling.** A grant above its target is lowered at once, and the graph drains. One below its target is raised only by GPUs
that no graph can hold any more: a lowered grant counts in full until the graph has acknowledged it, and then as what still
exists. A lost message, a stale view or a kill between two steps can so delay a grant and never exceed the pool.

**Hysteresis.** A graph that gained loses nothing for one start-up, and one that lost gains nothing for one that another graph
wants, except for guarantees, a pool that shrinks, and its own bid. Giving the next replica to the least borrower, and not dividing by largest
remainders, keeps a larger pool from taking a replica from any graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from penstock.api import ReclaimBy


@dataclass(frozen=True, slots=True)
class GraphBid:
    """What one graph may draw, wants and holds.

    Attributes:
        guaranteed: GPUs that it gets whenever it wants them, >= 0.
        priority: Who borrows first: the highest.
        most: Most GPUs that it may hold.
        replicas: GPUs of each replica that its planner wants, in the order in which it needs them, each >= 1; of those that
            exist where its planner does not answer.
        held: GPUs of its existing workers, those that start and drain included.
        serial: Of the grant that it acted under when ``held`` was counted; a graph never returns to an older grant.
    """

    guaranteed: int
    priority: int
    most: int
    replicas: tuple[int, ...]
    held: int
    serial: int


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """The pool.

    Attributes:
        gpus: That its graphs may hold together now, those of lost nodes and of foreign pods left out.
        startup_s: How long a replica takes until it serves, seconds: for this long a graph that gained loses nothing.
        order: Who gives back first; without `ReclaimBy.PRIORITY` that is the last.
    """

    gpus: int
    startup_s: float
    order: tuple[ReclaimBy, ...] = tuple(ReclaimBy)


@dataclass(frozen=True, slots=True)
class Share:
    """What is remembered of one graph.

    Attributes:
        gpus: Its grant.
        serial: The grant's number, which rises with each change.
        exposed: Most GPUs that it may hold until it acknowledges that serial.
        gained_s, lost_s: When the grant was raised, and when it was lowered below what it wanted, last; None: never.
    """

    gpus: int = 0
    serial: int = 0
    exposed: int = 0
    gained_s: float | None = None
    lost_s: float | None = None


PoolState = Mapping[str, Share]
"""By graph. To be kept before grants are delivered, so that a successor delivers the same ones."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What one graph may do.

    Attributes:
        gpus: It may hold this many, draining ones included, and drains what it holds above.
        serial: To be acknowledged.
        target: What it is to have once others have given back.
        wanted: What it bids for, in GPUs, within its most.
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
    """Return every graph's grant, and the state for the next time.

    Args:
        pool: What there is.
        graphs: By name, in any order; one that is missing and in ``state`` keeps its share. One that is gone for good is
            removed from ``state`` by the caller once none of its workers exists.
        state: What the last allocation left; empty at first. A graph that is not in it counts with what it holds.
        now_s: Seconds of any clock. After a step back, a change that is in the future counts as old.
    """
    shares = {name: state.get(name) or Share(bid.held, bid.serial, bid.held) for name, bid in graphs.items()}
    kept = {**state, **shares}
    away = sum(share.exposed for name, share in state.items() if name not in graphs)
    targets = _targets(replace(pool, gpus=pool.gpus - away), graphs, shares, now_s)
    return granted(pool, graphs, kept, targets, now_s)


def granted(
    pool: PoolTerms,
    graphs: Mapping[str, GraphBid],
    state: PoolState,
    targets: Mapping[str, int],
    now_s: float,
) -> tuple[Mapping[str, Grant], PoolState]:
    """Return grants on the way to the targets: lowered at once, raised by whole replicas as far as GPUs are free.

    Args:
        pool: What there is.
        graphs: By name.
        state: With a share of every graph.
        targets: GPUs of each graph, together within the pool.
        now_s: As in `allocate`.
    """
    after = {name: _lowered(state[name], bid, targets[name], now_s) for name, bid in graphs.items()}
    free = pool.gpus - sum(share.exposed for share in {**state, **after}.values())
    for name in sorted(graphs, key=lambda each: _turn(graphs[each], after[each], each)):
        share = after[name]
        # Above its grant a graph may still hold what it was lent before: that room is its own already.
        gpus = _within(graphs[name].replicas, min(targets[name], share.exposed + max(0, free)))
        if gpus > share.gpus:
            free -= max(0, gpus - share.exposed)
            after[name] = Share(gpus, share.serial + 1, max(share.exposed, gpus), now_s, share.lost_s)
    grants = {
        name: Grant(after[name].gpus, after[name].serial, targets[name], wanted_gpus(bid))
        for name, bid in graphs.items()
    }
    return grants, {**state, **after}


def wanted_gpus(bid: GraphBid) -> int:
    """Return the GPUs that a graph bids for, in whole replicas within its most."""
    return _within(bid.replicas, bid.most)


def _lowered(share: Share, bid: GraphBid, target: int, now_s: float) -> Share:
    """Return the share with what the graph has acknowledged, and a grant no larger than the target."""
    is_acknowledged = bid.serial == share.serial
    exposed = max(bid.held, share.gpus, 0 if is_acknowledged else share.exposed)
    if target >= share.gpus:
        return replace(share, exposed=exposed)
    is_taken = target < min(share.gpus, wanted_gpus(bid))
    return Share(target, share.serial + 1, exposed, share.gained_s, now_s if is_taken else share.lost_s)


def _turn(bid: GraphBid, share: Share, name: str) -> tuple[bool, int, str]:
    """Return who grows first where GPUs become free: who lacks of its guarantee, then by priority."""
    has_guarantee = share.gpus >= _within(bid.replicas, _floor(bid))
    return (has_guarantee, -bid.priority, name)


def _floor(bid: GraphBid) -> int:
    return min(bid.guaranteed, bid.most)


def _within(replicas: Sequence[int], gpus: int) -> int:
    """Return the GPUs of the first replicas that fit together."""
    total = 0
    for size in replicas:
        if total + size > gpus:
            break
        total += size
    return total


def _targets(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], shares: Mapping[str, Share], now_s: float
) -> dict[str, int]:
    """Return what each graph is to have: guarantees, what is not taken back yet, the rest, and what no other graph wants."""

    def is_recent(at_s: float | None) -> bool:
        return at_s is not None and 0.0 <= now_s - at_s < pool.startup_s

    filling = _Filling(pool, graphs, shares)
    floors = {name: _floor(bid) for name, bid in graphs.items()}
    filling.fill(floors)
    filling.fill(
        {
            name: min(share.gpus, graphs[name].most)
            for name, share in shares.items()
            if is_recent(share.gained_s)
        }
    )
    filling.fill(
        {
            name: min(bid.most, max(floors[name], shares[name].gpus))
            if is_recent(shares[name].lost_s)
            else bid.most
            for name, bid in graphs.items()
        }
    )
    filling.fill({name: bid.most for name, bid in graphs.items()})
    return filling.given


class _Filling:
    """Hands out a pool's GPUs, a replica at a time."""

    def __init__(self, pool: PoolTerms, graphs: Mapping[str, GraphBid], shares: Mapping[str, Share]) -> None:
        self._left = pool.gpus
        self._order = tuple(dict.fromkeys((*pool.order, ReclaimBy.PRIORITY)))
        self._graphs = graphs
        self._shares = shares
        self.given = dict.fromkeys(graphs, 0)
        self._coming: dict[str, Iterator[int]] = {name: iter(bid.replicas) for name, bid in graphs.items()}
        self._next = {name: next(coming, None) for name, coming in self._coming.items()}

    def fill(self, caps: Mapping[str, int]) -> None:
        """Give every graph replicas up to its cap, the next one always to who would give it back last."""
        waiting = [self._turn_to_keep(name, size) for name in caps if (size := self._next[name]) is not None]
        heapify(waiting)
        while waiting:
            name = heappop(waiting)[-1]
            size = self._next[name]
            if size is None or size > self._left or self.given[name] + size > caps[name]:
                continue  # nor will it fit later
            self.given[name] += size
            self._left -= size
            self._next[name] = size = next(self._coming[name], None)
            if size is not None:
                heappush(waiting, self._turn_to_keep(name, size))

    def _turn_to_keep(self, name: str, size: int) -> tuple[list[tuple[float, ...]], bool, str]:
        """Return the order of those who want a replica, of ``size``: the pool's, then who has it already."""
        bid, share = self._graphs[name], self._shares[name]
        after = self.given[name] + size
        is_new = after > share.gpus
        granted_s = -math.inf if share.gained_s is None else share.gained_s
        ranks: dict[ReclaimBy, tuple[float, ...]] = {
            ReclaimBy.PRIORITY: (-bid.priority, after - bid.guaranteed),
            ReclaimBy.IDLE: (after > bid.held,),
            ReclaimBy.NEWEST: (math.inf if is_new else granted_s,),
        }
        return ([ranks[each] for each in self._order], is_new, name)
