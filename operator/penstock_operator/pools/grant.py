"""Computes the GPUs that a graph in a pool requests (its bid), and the replicas of each service that fit into its grant. Pure.

The graph's planner writes into the graph's status how many replicas it would have without the limit of the grant. Its
ScalingAdapters request no more than the grant, unless another writer sets them. The bid is the larger of these two
numbers, so that an outdated status shrinks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.api import GraphDeployment, Role
from penstock.core.stamps import seconds
from penstock.gpu_pool.bid import WANTS_VALID_S, RoleBid, replicas_within
from penstock.gpu_pool.waiting import PoolRow
from penstock_operator.plan.drain import LimitedReplicas, limited_replicas


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """GPUs that a GPU pool grants to a graph.

    Attributes:
        kind: Kind of the pool: GpuPool or ClusterGpuPool.
        pool: Name of the pool.
        gpus: Maximum number of GPUs that the graph's existing workers can occupy.
        max_gpus: Maximum number of GPUs of a graph without a budget of its own: all GPUs of the pool.
        message: Which graphs occupy GPUs that this graph lacks, or why its grant cannot change; empty if neither
            applies.
        reclaim_s: Maximum drain time in seconds of a worker whose GPUs the pool reclaims; None means the worker's own
            grace period.
        is_bid_expired: Whether the replicas that the graph's planner last requested from the pool are too old to
            count.
        guaranteed: Number of GPUs that the pool gives to the graph whenever the graph requests them.
        uid: UID of the pool; empty if the pool was deleted and the graph keeps its last grant.
        serial: Serial number of the grant, which increases with each change and which the graph acknowledges when it
            has reconciled under the grant; 0 if the graph has no grant yet.
        pool_gpus: Number of GPUs of the entire pool; None if unknown.
        pool_held_gpus: Number of GPUs that all graphs of the pool hold; None if unknown.
        graphs: The largest graphs of the pool with the GPUs of each, which the live page ``/ui`` of this graph's
            router shows.
    """

    kind: str
    pool: str
    gpus: int
    max_gpus: int
    message: str = ""
    reclaim_s: float | None = None
    is_bid_expired: bool = False
    guaranteed: int = 0
    uid: str = ""
    serial: int = 0
    pool_gpus: int | None = None
    pool_held_gpus: int | None = None
    graphs: tuple[PoolRow, ...] = ()

    @property
    def title(self) -> str:
        """The pool's kind and name as messages show them, such as ``GpuPool team-a``."""
        return f"{self.kind} {self.pool}"

    @property
    def status(self) -> dict[str, Any]:
        """Value of ``status.pool`` in the graph's status.

        It names the pool and its GPUs, the GPUs granted and guaranteed to the graph, the message, and the graphs of
        the pool.
        """
        gpus = {"grantedGpus": self.gpus, "guaranteedGpus": self.guaranteed}
        known = {"poolGpus": self.pool_gpus, "poolHeldGpus": self.pool_held_gpus}
        return {
            "kind": self.kind,
            "name": self.pool,
            **gpus,
            "message": self.message,
            **{key: number for key, number in known.items() if number is not None},
            "graphs": [_shown(each) for each in self.graphs],
        }


def _shown(row: PoolRow) -> dict[str, Any]:
    return {
        "name": row.graph,
        "guaranteed": row.guaranteed,
        "held": row.held,
        "granted": row.grant,
        "wanted": row.wanted,
        "waitsFor": list(row.waits_for),
    }


@dataclass(frozen=True, slots=True)
class EffectiveBudget:
    """GPU limits of a graph that result from its manifest and its pool's grant together.

    Attributes:
        ceiling: Maximum number of GPUs that the graph's workers can request; None means no limit.
        gpus: Maximum number of GPUs that the graph's existing workers can occupy now; None means no limit.
    """

    ceiling: int | None
    gpus: int | None


def effective_budget(graph: GraphDeployment, grant: PoolGrant | None) -> EffectiveBudget:
    """Return the GPU limits of a graph from its manifest and its pool; in a pool, maxGpuBudget is the pool's number of GPUs by default.

    Args:
        graph: The graph as the user wrote it.
        grant: GPUs that its pool grants it; None if it is in no pool.
    """
    planner = graph.spec.planner
    if grant is None:
        ceiling = planner.max_gpu_budget if planner.enabled else None
        return EffectiveBudget(ceiling, ceiling)
    own = planner.own_gpu_budget
    ceiling = (grant.max_gpus if own is None else own) if planner.enabled else None
    return EffectiveBudget(ceiling, grant.gpus if ceiling is None else min(ceiling, grant.gpus))


def bids_of(graph: GraphDeployment, wanted: Mapping[str, LimitedReplicas]) -> dict[str, RoleBid]:
    """Return what each worker service requests from the pool (its bid): desired replicas, minimum, and GPUs per replica.

    Args:
        graph: The graph.
        wanted: Desired replicas of each service, limited to the allowed range.
    """
    return {
        name: RoleBid(
            wanted[name].replicas,
            min(wanted[name].replicas, service.replica_bounds[0]),
            service.gpus,
            is_prefill=service.role is Role.PREFILL,
        )
        for name, service in graph.spec.workers.items()
    }


def is_bid_expired(planner: Mapping[str, Any], now_s: float) -> bool:
    """Return whether a graph's planner last requested replicas from the pool too long ago, so that only the ScalingAdapters count.

    Returns False if the planner has never requested any.

    Args:
        planner: ``status.planner`` of the graph.
        now_s: Current Unix time in seconds.
    """
    bid_s = seconds(planner.get("wantsTime"))
    return bid_s is not None and now_s - bid_s > WANTS_VALID_S


def with_wants(
    graph: GraphDeployment,
    wanted: Mapping[str, LimitedReplicas],
    wants: Mapping[str, int],
    *,
    max_gpu_budget: int | None,
) -> dict[str, LimitedReplicas]:
    """Return, by service, for how many replicas the graph requests GPUs of its pool.

    This is the number of the service's ScalingAdapter or, if that is larger, the number that the planner requests.

    Args:
        graph: The graph.
        wanted: Replicas according to the ScalingAdapters, by service.
        wants: Replicas that the planner requests, by role. They may be outdated, so they are limited to the current
            bounds.
        max_gpu_budget: Maximum number of GPUs of the graph, which limits the planner's numbers like the services'
            bounds do; None means no limit.
    """
    found = dict(wanted)
    for name, service in graph.spec.workers.items():
        if service.role in wants:
            requested = limited_replicas(wants[service.role], service, max_gpu_budget=max_gpu_budget)
            found[name] = max(wanted[name], requested, key=lambda each: each.replicas)
    return found


def within_grant(
    wanted: Mapping[str, LimitedReplicas], bids: Mapping[str, RoleBid], *, gpus: int, pool: str
) -> dict[str, LimitedReplicas]:
    """Return the replicas of each service that fit into the GPUs that the pool grants, but never less than the service's minimum.

    A minimum that does not fit remains desired: its pods wait at their scheduling gates, and no serving pod is removed.

    Args:
        wanted: Desired replicas by service.
        bids: Desired replicas, minimum and GPUs per replica of each worker service, from `bids_of`; other services are
            returned unchanged.
        gpus: Number of GPUs that the pool grants.
        pool: Kind and name of the pool, for messages.
    """
    fits = replicas_within(bids, gpus)
    found = dict(wanted)
    for name, bid in bids.items():
        number = max(fits[name], bid.floor)
        if number < bid.replicas:
            text = f"{bid.replicas} replicas are requested; {pool} grants the graph {gpus} GPUs, so the service gets {number}"
            found[name] = replace(wanted[name], replicas=number, reason="OverGrant", message=text)
    return found
