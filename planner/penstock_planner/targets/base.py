"""The port between the planner and the backend that starts and stops workers.

A backend (local processes, a cluster) implements `Target`; the loop calls nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.api import Role
from penstock_planner.decide.observation import PoolCounts


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One ready worker's address.

    Attributes:
        name: Worker name, unique within the graph; the router uses the same.
    """

    name: str
    role: Role
    url: str


@dataclass(frozen=True, slots=True)
class TargetState:
    """One consistent snapshot of the backend; an event of the planner's core.

    Attributes:
        pools: By role; only the roles that the graph has, the router's excluded.
        is_adjusting: A requested replica is not ready yet (first start) or one is draining. A worker that
            restarts after a crash is not an adjustment.
        endpoints: Ready workers only.
        edited: Roles whose number of replicas another client has set since the last snapshot.
        writers: Who set each role's number of replicas last, where that is known.
        failures: The newest reason of a replica that was given up, by role; it holds no GPU and is not a replica.
        grant: GPUs that a pool lets the graph hold; None: it is in no pool.
        guaranteed: GPUs that the pool lets it hold whenever it wants them; None: it is in no pool.
        grant_note: Which pool, who holds what the graph lacks there, and when it comes.
        never_ready: Roles with a replica that counts as starting and will never become ready, and why.
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


class Target(Protocol):
    """What a backend does for the planner."""

    async def observe(self) -> TargetState:
        """Return the pools as they are now.

        Raises:
            ClusterError: the backend cannot be read.
        """
        ...

    async def scale(self, role: Role, replicas: int, *, decision_id: str) -> None:
        """Ask for ``replicas`` of ``role``; returns when the desired number is recorded, not when it is fulfilled.

        Idempotent and level-triggered: asking twice for the same number changes nothing more.

        Raises:
            ConflictError: another writer changed the backend first; observe and decide again.
            ClusterError: the backend refused or failed.
        """
        ...

    async def switch(
        self, giver: Role, taker: Role, *, replicas: Mapping[Role, int], decision_id: str
    ) -> None:
        """Ask for workers of ``giver`` to become workers of ``taker``; both roles then have their ``replicas``.

        Returns when it is recorded. From then on the workers count as starting in ``taker``, as `PoolCounts.switching`, and the
        backend ends every switch: one that cannot be made becomes a start. Idempotent as `scale`.

        Raises:
            ConflictError: another writer changed the backend first; observe and decide again.
            ClusterError: the backend refused or failed, and changed nothing.
        """
        ...
