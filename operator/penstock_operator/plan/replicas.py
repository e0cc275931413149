"""Plan of one reconcile for every service of a graph: replicas, next scaling step, and limits of a rollout.

Pure. `scaling` creates the plan once per reconcile, before the first write, and every later stage reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api import ServiceSpec
from penstock_operator.plan.diagnose import Diagnosis
from penstock_operator.plan.drain import LimitedReplicas, ScalePlan
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replacement import Replacement
from penstock_operator.plan.rollout import RolloutView, unavailable


@dataclass(frozen=True, slots=True)
class ServiceState:
    """Observed state of one service in a reconcile, and the actions planned for it.

    Attributes:
        spec: The service's specification.
        bounds: Its desired number of replicas, limited to the allowed range, with the reason if the limit changed it.
        running: Current ``spec.replicas`` of its workload; the desired number if there is no workload.
        rollout: State of its rollout; None if there is no workload.
        refused: Problem that says why the API server rejects its pods; None if it rejects none.
        plan: Its next scaling step; None for routers, which are scaled without draining.
        hold_reason: Reason why its new pod template is not written yet; empty if it does not have to wait.
        replacement: Replacement that starts, or has no room, because its replicas are on cordoned nodes; None if it
            needs none.
    """

    spec: ServiceSpec
    bounds: LimitedReplicas
    running: int
    rollout: RolloutView | None = None
    refused: Diagnosis | None = None
    plan: ScalePlan | None = None
    hold_reason: str = ""
    replacement: Replacement | None = None

    @property
    def number(self) -> int:
        """Number of replicas that the service's workload should have now; while replicas drain, it can be above the desired number."""
        return self.bounds.replicas if self.plan is None else self.plan.spec_replicas


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """A drained worker that changes its role instead of being deleted.

    Attributes:
        worker: The drained worker.
        replaced: Pod of the other role that waits at its scheduling gate. The worker takes over this pod's labels, so that
            the workload of the other role adopts the worker and deletes this pod as surplus.
    """

    worker: PodView
    replaced: PodView


@dataclass(frozen=True, slots=True)
class ReplicasPlan:
    """Replica plan of a graph's services.

    Attributes:
        services: State and next step of each service, by its name.
        first_replicas: Initial replicas of ScalingAdapters that do not exist yet, by the adapter's name.
        blocked: Number of replicas by service that cannot run because the GPU budget is used up.
        switches: Drained workers that change their role.
        kept_gated: UIDs of pods whose scheduling gate must stay, because a draining worker will switch its role and take
            their place.
        bid: What the graph requests from its GPU pool, before the pool's grant limits it: the GPU count of each desired
            worker replica, the most needed first. Replicas within a service's minimum come first; each further one is
            of the service that has the lowest fraction of its desired replicas so far; replacements for replicas on
            cordoned nodes come last.
    """

    services: Mapping[str, ServiceState]
    first_replicas: Mapping[str, int]
    blocked: Mapping[str, int]
    switches: tuple[RoleSwitch, ...] = ()
    kept_gated: frozenset[str] = frozenset()
    bid: tuple[int, ...] = ()

    @property
    def is_draining(self) -> bool:
        """Whether workers of any service are finishing their requests before the service shrinks."""
        plans = (each.plan for each in self.services.values())
        return any(each is not None and each.draining and not each.hold_reason for each in plans)

    def unavailable(self, budget: int | None) -> dict[str, int]:
        """Return, by service, how many replicas a rollout of the service can take away at once (maxUnavailable).

        With 0, a new replica starts before an old one ends, which needs room in the GPU budget.

        Args:
            budget: Maximum number of GPUs of the graph; None means no limit.
        """
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
