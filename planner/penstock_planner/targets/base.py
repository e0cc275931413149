"""The interface between the planner and the backend that starts and stops workers.

A backend (local processes, a Kubernetes cluster) implements `Target`. The planner's loop calls nothing else of the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.api import Role
from penstock_planner.decide.demand.observation import PoolCounts


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one ready worker.

    Attributes:
        name: Name of the worker, unique within the graph; the router uses the same name.
        role: Role of the worker.
        url: Base URL of the worker, without a trailing slash.
    """

    name: str
    role: Role
    url: str


@dataclass(frozen=True, slots=True)
class TargetState:
    """Snapshot of the backend at one time, which the planner's core receives at each tick (metrics scrape).

    Attributes:
        pools: Replica counts by role, for the worker roles that the graph has.
        is_adjusting: Whether a requested replica has not been ready yet, or a replica is draining. A worker that
            restarts after a crash is not an adjustment.
        endpoints: Addresses of the ready workers.
        edited: Roles whose number of replicas another client than the planner has set since the last snapshot.
        writers: Name of the client that set the number of replicas last, by role; a role for which the client is
            unknown is absent.
        failures: Newest reason for which a replica of a role counts as failed, by role. A failed replica holds no GPU
            and is not counted in ``pools``.
        never_ready: Reason for which a replica that counts as starting will never become ready, for each role with such
            a replica.
        grant: GPUs that a GPU pool grants to the graph; None if it is in no pool.
        grant_note: Name of the pool, the graphs holding GPUs that this one lacks, and the expected time of their
            return; empty without a pool.
        guaranteed: GPUs that the pool guarantees to the graph; None if it is in no pool or the guarantee is unknown.
        watched: Replica counts by role of the real fleet, which something else than the planner scales, in shadow mode;
            ``pools`` are then those that the planner would have. None in other modes.
    """

    pools: Mapping[Role, PoolCounts]
    is_adjusting: bool
    endpoints: tuple[Endpoint, ...] = ()
    edited: frozenset[Role] = frozenset()
    writers: Mapping[Role, str] = field(default_factory=dict)
    failures: Mapping[Role, str] = field(default_factory=dict)
    never_ready: Mapping[Role, str] = field(default_factory=dict)
    grant: int | None = None
    grant_note: str = ""
    guaranteed: int | None = None
    watched: Mapping[Role, PoolCounts] | None = None


class Target(Protocol):
    """Interface of a backend (Kubernetes or local processes): reads and scales a graph's replicas, and changes workers' roles."""

    async def observe(self) -> TargetState:
        """Return a snapshot of the graph's workers: replica counts, addresses, failures, and the GPUs that a GPU pool grants.

        Raises:
            ClusterError: the backend cannot be read.
        """
        ...

    async def scale(self, role: Role, replicas: int, *, decision_id: str) -> None:
        """Set the desired number of replicas of ``role``.

        Returns when the number is recorded, before the replicas are ready or removed. Repeated calls with the same
        number do nothing.

        Args:
            role: Role to scale.
            replicas: Desired number of replicas.
            decision_id: Id of the planner's decision, for logs and events.

        Raises:
            ConflictError: another client changed the number of replicas first; the caller must observe and decide
                again.
            ClusterError: the backend refused or failed.
        """
        ...

    async def switch(
        self, giver: Role, taker: Role, *, replicas: Mapping[Role, int], decision_id: str
    ) -> None:
        """Move workers from the role ``giver`` to the role ``taker``, so that both roles have their desired ``replicas``.

        Returns when the switch is recorded. From then on the workers count as starting replicas of ``taker`` that need
        no start-up (field ``switching`` of the counts). The backend completes every switch; a switch that is impossible
        becomes a start of a new replica. Repeated calls do nothing.

        Args:
            giver: Role that loses workers.
            taker: Role that gains the workers.
            replicas: Desired number of replicas of both roles, by role.
            decision_id: Id of the planner's decision, for logs and events.

        Raises:
            ConflictError: another client changed the number of replicas first; the caller must observe and decide
                again.
            ClusterError: the backend refused or failed, and changed nothing.
        """
        ...
