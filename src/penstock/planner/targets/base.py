"""The port between the planner and the backend that starts and stops workers.

A backend (local processes, a cluster) implements `Target`; the loop calls nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.api import Role


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One ready worker's address.

    Attributes:
        name: Worker name, unique within the graph; the router uses the same.
        role: prefill, decode or aggregated.
        url: Base URL without a trailing slash; ``/metrics`` is below it.
    """

    name: str
    role: Role
    url: str


@dataclass(frozen=True, slots=True)
class PoolState:
    """Replicas of one role as they are now.

    Attributes:
        role: prefill, decode or aggregated.
        ready: Passing their health check; a crashed worker that restarts is not among them.
        starting: Asked for or restarting, not ready yet; they hold their GPUs.
        draining: Asked to leave, still finishing; they hold their GPUs and no longer count as replicas.
        gpus_per_replica: GPUs that one replica holds, >= 0.
        failed: One reason per replica that was given up; those hold no GPU and are no replicas.
    """

    role: Role
    ready: int
    starting: int
    draining: int
    gpus_per_replica: int
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TargetState:
    """One consistent snapshot of the backend.

    Attributes:
        pools: By role; only the roles that the graph has, the router's excluded.
        adjusting: A requested replica is not ready yet (first start) or one is draining. A worker that
            restarts after a crash is no adjustment.
        endpoints: Ready workers only.
        edited: Roles whose number of replicas somebody else has set since the last snapshot.
        writers: Who set each role's number of replicas last, where that is known.
    """

    pools: Mapping[Role, PoolState]
    adjusting: bool
    endpoints: tuple[Endpoint, ...]
    edited: frozenset[Role] = frozenset()
    writers: Mapping[Role, str] = field(default_factory=dict)


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

        Args:
            role: A role that `observe` listed.
            replicas: Wanted ready + starting replicas, >= 0; draining ones do not count.
            decision_id: The ledger's id of the decision, for logs and events.

        Raises:
            ConflictError: somebody else changed the backend first; observe and decide again.
            ClusterError: the backend refused or failed.
        """
        ...
