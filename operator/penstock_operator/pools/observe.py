"""Observed state of a pool: its graphs with the GPUs that they occupy and request, its nodes and quotas. Pure."""

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
        entry: First entry in the pool's specification that matches the graph; None if no entry matches any more or the
            graph was deleted, so that it returns all its GPUs.
        graph: The specification that the operator applies, with the graph's labels; None if unknown, in which case the
            graph keeps the grant of the last allocation.
        bid: Number of GPUs of each desired worker replica, the most needed first; None if unknown, in which case the
            graph keeps the grant of the last allocation.
        held: Number of GPUs of the graph's existing workers.
        draining: How many of the GPUs in ``held`` belong to workers that are draining or terminating.
        serial: Serial number of the grant that the graph's reconciles use, which acknowledges the grant; None if
            unknown.
        initial_gpus: Number of GPUs that the graph can occupy until the pool's first allocation to it; None if the
            graph has not been reconciled in this pool yet.
        drains: When the graph's draining workers began to drain, and how long a drain takes on average; the pool's
            status shows when they are expected to end.
        created: Creation time of the graph, RFC 3339; empty if unknown.
    """

    entry: PoolEntry | None
    graph: GraphDeployment | None = None
    bid: tuple[int, ...] | None = None
    held: int = 0
    draining: int = 0
    serial: int | None = None
    initial_gpus: int | None = None
    drains: DrainTimes = field(default_factory=DrainTimes)
    created: str = ""


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """Everything on which the allocation of a pool's GPUs depends.

    Attributes:
        pool: The validated pool.
        members: The pool's graphs, and deleted graphs that still have workers, by their names in the pool.
        now_s: Current Unix time in seconds.
        status: The pool's last written status, which stores the allocator's state; None if there is none yet.
        generation: ``metadata.generation`` of the pool.
        in_other_pool: Kind and name of an older pool, by the name of each graph that matches this pool but belongs to the
            older one.
        without_planner: Matching graphs without a planner, which have no budget that the pool could set.
        nodes: GPUs of the pool's nodes that its graphs can use; None if the pool does not select nodes.
        quotas: ResourceQuotas by namespace, for the namespaces of its graphs.
    """

    pool: PoolObject
    members: Mapping[str, PoolMember]
    now_s: float
    status: Status | None = None
    generation: int = 0
    in_other_pool: Mapping[str, str] = field(default_factory=dict)
    without_planner: Sequence[str] = ()
    nodes: PoolNodes | None = None
    quotas: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, Share]:
        """State of each graph after the last allocation, by its name: its grant, the grant's serial number, and times of the last changes."""
        return shares_of(self.status)

    @property
    def last_count(self) -> int | None:
        """Number of GPUs that graphs could use on the pool's nodes at the last successful count; None if no count has succeeded."""
        last_count: int | None = ((self.status or {}).get("gpus") or {}).get("counted")
        return last_count


def shares_of(status: Status | None) -> dict[str, Share]:
    """Return the allocator's state of each graph by name (grant, serial number, times) from a pool's status; empty if that is None."""
    return {
        name: Share(
            row["granted"],
            row["serial"],
            row["maxHeld"],
            seconds(row.get("gainedTime")),
            seconds(row.get("lostTime")),
        )
        for name, row in rows_of(status).items()
    }


def rows_of(status: Status | None) -> dict[str, Status]:
    """Return the entries that a pool's status has about its graphs, by graph name; empty if ``status`` is None."""
    return {row["name"]: row for row in (status or {}).get("graphs") or ()}


def gpus_of(status: Status | None) -> int | None:
    """Return a pool's number of GPUs from its status, including those on nodes that are missing or not ready; None if the status has none."""
    gpus = (status or {}).get("gpus")
    return None if gpus is None else gpus["total"] + gpus["unavailable"]


def entry_of(pool: PoolObject, name: str, labels: Mapping[str, str], namespace: str) -> PoolEntry | None:
    """Return the first entry in a pool's specification (guarantee, priority, matching graphs) that matches a graph; None if none does.

    Args:
        pool: The pool.
        name: Name of the graph.
        labels: Labels of the graph.
        namespace: Namespace of the graph.
    """
    return next((each for each in pool.spec.graphs if each.match.covers(name, labels, namespace)), None)


def has_planner(raw: Mapping[str, Any]) -> bool:
    """Return whether a graph has an enabled planner, and so a GPU budget that a pool can set."""
    planner = raw["spec"].get("planner") or {}
    return bool(planner.get("enabled", True))


def draining_gpus(pods: Iterable[PodView]) -> int:
    """Return the number of GPUs of workers that have no scheduling gate any more and are draining or terminating."""
    return sum(each.gpus for each in _draining_pods(pods))


def updated_drain_times(
    before: DrainTimes | None, row: Status, pods: Iterable[PodView], now_s: float
) -> DrainTimes:
    """Return when each draining worker of a graph began to drain, and how long the graph's drains take on average.

    The pool's status shows from these when the graph is expected to return GPUs.

    Args:
        before: Previous result; None if unknown, as after a restart, in which case the duration is read from ``row``.
        row: The graph's entry in the pool's status, from `rows_of`.
        pods: The graph's workers.
        now_s: Current Unix time in seconds.
    """
    known = DrainTimes(duration_s=row.get("drainSeconds")) if before is None else before
    started_s = {each.uid: each.drain_since_s for each in _draining_pods(pods)}
    return known.updated({uid: at_s for uid, at_s in started_s.items() if at_s is not None}, now_s)


def _draining_pods(pods: Iterable[PodView]) -> Iterable[PodView]:
    present = (each for each in pods if not each.gated and not each.finished)
    return (each for each in present if each.terminating or each.drain_since_s is not None)
