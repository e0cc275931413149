"""What one look at a pool finds: its graphs with what they hold, want and act under, its nodes and quotas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api import GraphDeployment, PoolEntry, PoolObject
from penstock.core.stamps import seconds
from penstock.gpu_pool.allocator import Share
from penstock.gpu_pool.waiting import DrainTimes
from penstock_operator.plan.pods import PodView
from penstock_operator.pools.capacity import PoolNodes

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One graph of a pool.

    Attributes:
        entry: Its first entry in the pool; None: none matches any more, or the graph is gone, so it gives all back.
        graph: With its labels, as it is carried out; None: unknown, and it keeps its share.
        bid: GPUs of each replica wanted, in order of need; None: unknown likewise.
        held: GPUs of its existing workers.
        leaving: Of those, of workers that drain or end.
        serial: Of the grant that it acts under; None: unknown.
        arrived_with: GPUs that it may hold while it has no share yet; None: it does not act under the pool yet.
        drains: Of its workers.
        created: When the graph was made, RFC 3339; empty: unknown.
    """

    entry: PoolEntry | None
    graph: GraphDeployment | None = None
    bid: tuple[int, ...] | None = None
    held: int = 0
    leaving: int = 0
    serial: int | None = None
    arrived_with: int | None = None
    drains: DrainTimes = field(default_factory=DrainTimes)
    created: str = ""


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """All that a pool is shared out by.

    Attributes:
        pool: The pool.
        members: Its graphs, and those with a share of which workers are left, by their names in the pool.
        now_s: Seconds since the epoch.
        status: The pool's status as it was written last, which holds the allocator's state; None: none yet.
        generation: Of the pool.
        elsewhere: Graphs that an older pool has already, with its kind and name.
        unbounded: Graphs without a planner, which have no budget that the pool could set.
        nodes: What its nodes offer; None: it selects none.
        quotas: ResourceQuotas of the namespaces of its graphs.
    """

    pool: PoolObject
    members: Mapping[str, PoolMember]
    now_s: float
    status: Status | None = None
    generation: int = 0
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    unbounded: Sequence[str] = ()
    nodes: PoolNodes | None = None
    quotas: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, Share]:
        """What the last allocation left."""
        return shares_of(self.status)

    @property
    def counted(self) -> int | None:
        """GPUs that the nodes offered when they were counted last; None: never yet."""
        counted: int | None = ((self.status or {}).get("gpus") or {}).get("counted")
        return counted


def shares_of(status: Status | None) -> dict[str, Share]:
    """Return the allocator's state from a pool's status."""
    return {
        name: Share(
            row["granted"],
            row["serial"],
            row["exposed"],
            seconds(row.get("gainedTime")),
            seconds(row.get("lostTime")),
        )
        for name, row in rows_of(status).items()
    }


def rows_of(status: Status | None) -> dict[str, Status]:
    """Return the rows of a pool's status by graph."""
    return {row["name"]: row for row in (status or {}).get("graphs") or ()}


def gpus_of(status: Status | None) -> int | None:
    """Return a pool's GPUs by its status, also those that its nodes do not offer now; None: it has none yet."""
    gpus = (status or {}).get("gpus")
    return None if gpus is None else gpus["total"] + gpus["unavailable"]


def entry_of(pool: PoolObject, name: str, labels: Mapping[str, str], namespace: str) -> PoolEntry | None:
    """Return the first entry that matches a graph."""
    return next((each for each in pool.spec.graphs if each.match.covers(name, labels, namespace)), None)


def has_planner(raw: Mapping[str, Any]) -> bool:
    """Return whether a graph has a planner, and so a budget that a pool can set."""
    planner = raw["spec"].get("planner") or {}
    return bool(planner.get("enabled", True))


def leaving_gpus(pods: Iterable[PodView]) -> int:
    """Return the GPUs of workers that are marked to leave or end."""
    return sum(each.gpus for each in _leaving(pods))


def drains_after(before: DrainTimes | None, row: Status, pods: Iterable[PodView], now_s: float) -> DrainTimes:
    """Return how long a graph's workers take to drain.

    Args:
        before: What is known; None: nothing but ``row``, as after a restart.
        row: Of the graph, of the pool's status.
        pods: The graph's workers.
        now_s: Seconds since the epoch.
    """
    known = DrainTimes(took_s=row.get("drainSeconds")) if before is None else before
    begun = {each.uid: each.drain_since_s for each in _leaving(pods)}
    return known.after({uid: at_s for uid, at_s in begun.items() if at_s is not None}, now_s)


def _leaving(pods: Iterable[PodView]) -> Iterable[PodView]:
    present = (each for each in pods if not each.gated and not each.finished)
    return (each for each in present if each.terminating or each.drain_since_s is not None)
