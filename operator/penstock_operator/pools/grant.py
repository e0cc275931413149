"""What a graph in a GPU pool bids for, what the pool grants it, and how many replicas of each service fit into that. Pure.

Its planner writes into the graph's status what it would have without the grant. Its ScalingAdapters request no more than the
grant, unless another writer sets them; the bid is the larger of both, so that a stale status shrinks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.api import GraphDeployment, Role
from penstock.core.stamps import seconds
from penstock.gpu_pool.bid import WANTS_VALID_S, RoleBid, granted
from penstock_operator.plan.drain import Bounded, bounded


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """What a graph's pool lets it hold.

    Attributes:
        kind: Of the pool.
        pool: Its name.
        gpus: Most GPUs of its existing workers.
        most: GPUs of the entire pool; the budget of a graph that states none.
        reclaim_s: Longest drain of a worker of which the pool takes the GPU back; None: the worker's own.
        guaranteed: GPUs that the graph gets as soon as it wants them.
        is_planner_silent: What its planner last wanted of the pool counts no more.
        message: Who holds what the graph lacks, or what keeps its grant from changing; empty: nothing.
        uid: Of the pool; empty: it is gone, and the graph keeps what it had.
        serial: Of the grant, to be acknowledged; 0: the graph has no share yet.
    """

    kind: str
    pool: str
    gpus: int
    most: int
    message: str = ""
    reclaim_s: float | None = None
    is_planner_silent: bool = False
    guaranteed: int = 0
    uid: str = ""
    serial: int = 0

    @property
    def title(self) -> str:
        """The pool's kind and name, as sentences have them."""
        return f"{self.kind} {self.pool}"

    @property
    def status(self) -> dict[str, Any]:
        """As a graph's status has it."""
        gpus = {"grantedGpus": self.gpus, "guaranteedGpus": self.guaranteed}
        return {"kind": self.kind, "name": self.pool, **gpus, "message": self.message}


@dataclass(frozen=True, slots=True)
class EffectiveBudget:
    """The GPUs that are in force for a graph, by its manifest and its pool's grant together.

    Attributes:
        ceiling: Most GPUs that its workers may want; None: no ceiling.
        gpus: Most GPUs that its existing workers may hold now; None: no ceiling.
    """

    ceiling: int | None
    gpus: int | None


def effective_budget(graph: GraphDeployment, grant: PoolGrant | None) -> EffectiveBudget:
    """Return the budget of a graph; in a pool the default of maxGpuBudget is the pool's GPUs.

    Args:
        graph: As the user wrote it.
        grant: What its pool lets it hold; None: it is in none.
    """
    planner = graph.spec.planner
    if grant is None:
        ceiling = planner.max_gpu_budget if planner.enabled else None
        return EffectiveBudget(ceiling, ceiling)
    own = planner.own_gpu_budget
    ceiling = (grant.most if own is None else own) if planner.enabled else None
    return EffectiveBudget(ceiling, grant.gpus if ceiling is None else min(ceiling, grant.gpus))


def bids_of(graph: GraphDeployment, wanted: Mapping[str, Bounded]) -> dict[str, RoleBid]:
    """Return what each worker service bids for, of the replicas that it is to have."""
    return {
        name: RoleBid(
            wanted[name].replicas,
            min(wanted[name].replicas, service.replica_bounds[0]),
            service.gpus,
            is_prefill=service.role is Role.PREFILL,
        )
        for name, service in graph.spec.workers.items()
    }


def is_silent(planner: Mapping[str, Any], now_s: float) -> bool:
    """Return whether a graph's planner has stopped to say what it wants, so that its graph wants what it asks for already.

    Args:
        planner: ``status.planner`` of the graph.
        now_s: Seconds since the epoch.
    """
    said_s = seconds(planner.get("wantsTime"))
    return said_s is not None and now_s - said_s > WANTS_VALID_S


def with_wants(
    graph: GraphDeployment,
    wanted: Mapping[str, Bounded],
    wants: Mapping[str, int],
    *,
    max_gpu_budget: int | None,
) -> dict[str, Bounded]:
    """Return what each service bids for: what its adapter asks for, or what the planner wants where that is more.

    Args:
        graph: The graph.
        wanted: What the adapters ask for, by service.
        wants: Of the planner, by role; it may be dead for long, so that what it says counts within today's bounds.
        max_gpu_budget: As of `bounded`.
    """
    found = dict(wanted)
    for name, service in graph.spec.workers.items():
        if service.role in wants:
            asked = bounded(wants[service.role], service, max_gpu_budget=max_gpu_budget)
            found[name] = max(wanted[name], asked, key=lambda each: each.replicas)
    return found


def within_grant(
    wanted: Mapping[str, Bounded], bids: Mapping[str, RoleBid], *, gpus: int, pool: str
) -> dict[str, Bounded]:
    """Return what each service is to have of what it wants: what the grant is for, and never less than its floor.

    A floor that the grant has no room for stays wanted, so that its pods wait at their gates and none that serves goes.

    Args:
        wanted: By service.
        bids: Of the worker services.
        gpus: That the pool grants.
        pool: Its kind and name.
    """
    fits = granted(bids, gpus)
    found = dict(wanted)
    for name, bid in bids.items():
        number = max(fits[name], bid.floor)
        if number < bid.replicas:
            text = f"{bid.replicas} replicas are wanted; {pool} grants the graph {gpus} GPUs, so {number} are kept"
            found[name] = replace(wanted[name], replicas=number, reason="OverGrant", message=text)
    return found
