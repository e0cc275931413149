"""What every service of a graph is to have: its number of replicas, the step towards it, and how its rollout may go.

Pure. Made once in a reconcile, before its first write; `scaling` makes it, and every later stage reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api import ServiceSpec
from penstock_operator.plan.diagnose import Diagnosis
from penstock_operator.plan.drain import Bounded, ScalePlan
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.rollout import RolloutView, unavailable


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What one reconcile found of a service, and what it does with it.

    Attributes:
        bounds: Its desired replicas, clamped to its bounds.
        running: Number that its workload has now; the bounded one while there is no workload.
        rollout: None while there is no workload.
        refused: Why the API server refuses its pods; None: it refuses none.
        plan: None for routers.
        held: Why its new pod template waits.
    """

    spec: ServiceSpec
    bounds: Bounded
    running: int
    rollout: RolloutView | None = None
    refused: Diagnosis | None = None
    plan: ScalePlan | None = None
    held: str = ""

    @property
    def number(self) -> int:
        """Replicas that its workload is to have."""
        return self.bounds.replicas if self.plan is None else self.plan.spec_replicas


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """A drained ``worker`` that becomes what ``place``, which has not started, was to be."""

    worker: PodView
    place: PodView


@dataclass(frozen=True, slots=True)
class ReplicasPlan:
    """What the services of a graph are to have.

    Attributes:
        switches: Drained workers that change their role.
        kept: Uids of pods that stay at the budget's gate.
        first_replicas: Numbers that ScalingAdapters yet to be made are created with, by their names.
        blocked: Replicas of a service that the budget keeps from running.
        bid: GPUs of each replica of a worker that is wanted, in order of need, whatever a GPU pool grants.
    """

    services: Mapping[str, ServiceState]
    first_replicas: Mapping[str, int]
    blocked: Mapping[str, int]
    switches: tuple[RoleSwitch, ...] = ()
    kept: frozenset[str] = frozenset()
    bid: tuple[int, ...] = ()

    @property
    def is_draining(self) -> bool:
        """Whether workers finish their requests before a service shrinks."""
        plans = (each.plan for each in self.services.values())
        return any(each is not None and each.draining and not each.held for each in plans)

    def unavailable(self, budget: int | None) -> dict[str, int]:
        """Return how many replicas of each service a rollout may take away at once, within a budget in GPUs."""
        workers = [each for each in self.services.values() if each.spec.role.is_worker]
        wanted_gpus = sum(each.bounds.replicas * each.spec.gpus for each in workers)
        return {
            name: unavailable(
                role=each.spec.role,
                gpus_per_replica=each.spec.gpus,
                wanted_gpus=wanted_gpus,
                budget=budget,
                blocked=self.blocked.get(name, 0),
                view=each.rollout,
            )
            for name, each in self.services.items()
        }
