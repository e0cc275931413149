"""Decides how and when a service's changed pod template is rolled out.

Pure functions. Two rules preserve the ratio of prefill to decode while a graph changes:

- A rollout surges (one additional replica, none missing) if the budget has room for that replica even when every
desired replica exists. Otherwise it replaces one replica at a time (none additional, one missing in addition to those
that the budget has no room for).
- At most one worker service rolls out at a time, so at most one replica is missing.

Room is computed from *desired* replicas, not from existing ones: a rollout's own surge pod must not take away the
room that it was allowed to use. A rollout that has begun to surge continues to do so even if the number of desired
replicas grows meanwhile, unless the budget keeps its new pod from starting: a change of strategy would terminate the
old pod at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import Role

_ORDER: Final = (Role.DECODE, Role.PREFILL, Role.AGGREGATED)
"""Order in which roles roll out if several changed: decode first, as in the planner's precedence."""

_DEADLINE: Final = "ProgressDeadlineExceeded"
"""Reason that the Deployment controller sets if a rollout makes no progress for progressDeadlineSeconds."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """Rollout state of a service's workload (Deployment or LeaderWorkerSet).

    Attributes:
        service: Name of the service.
        role: Role of the service.
        ready: Number of ready replicas.
        updated: Number of replicas of the newest revision.
        rolling: Whether a rollout has begun and not ended.
        surges: Whether its strategy first starts one replica more than desired.
        stuck: Whether it has made no progress for the Deployment's progress deadline.
        message: The controller's message about a stuck rollout; else empty.
    """

    service: str
    role: Role
    ready: int = 0
    updated: int = 0
    rolling: bool = False
    surges: bool = False
    stuck: bool = False
    message: str = ""


def unavailable(
    *,
    role: Role,
    gpus_per_replica: int,
    wanted_gpus: int,
    budget: int | None,
    blocked: int,
    view: RolloutView | None = None,
) -> int:
    """Return how many replicas a rollout of a service can take away at once (maxUnavailable).

    The result is 0 (a new replica starts before an old one ends) for routers, if the budget has room for one more
    replica, and while a rollout that began with 0 is in progress. Otherwise it is 1, plus the replicas that the budget
    keeps from running.

    Args:
        role: The service's role; routers have no GPUs.
        gpus_per_replica: GPUs of one replica.
        wanted_gpus: GPUs of all desired replicas of the graph's worker services.
        budget: Maximum number of GPUs; None means no limit.
        blocked: Number of the service's replicas that the budget keeps from running. They remain missing during the
            rollout; with maxUnavailable 1 it would wait for these replicas forever.
        view: Rollout state of the service's workload; None if there is no workload.
    """
    if view is not None and view.rolling and view.surges and not blocked:
        return 0
    if not role.is_worker or budget is None or wanted_gpus + gpus_per_replica <= budget:
        return 0
    excess = math.ceil(max(0, wanted_gpus - budget) / gpus_per_replica) if gpus_per_replica else 0
    return 1 + min(excess, blocked)


def rollout_view(
    service: str, role: Role, workload: Mapping[str, Any], *, template_generation: int | None = None
) -> RolloutView:
    """Return the rollout state of a Deployment or LeaderWorkerSet.

    The workload is rolling out if replicas of an older revision exist, or if its controller has not seen the newest pod
    template. Replicas that are only starting, or that are only surplus, are not a rollout, and neither is a new number
    of replicas that the controller has not seen.

    Args:
        service: Name of the service.
        role: The service's role.
        workload: The Deployment or LeaderWorkerSet in the cluster.
        template_generation: Generation of the workload that introduced its newest pod template; None if unknown, which
            means the current generation.
    """
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    updated, existing = int(status.get("updatedReplicas", 0)), int(status.get("replicas", 0))
    generation = int((workload.get("metadata") or {}).get("generation", 0))
    newest = generation if template_generation is None else template_generation
    is_unobserved = newest > int(status.get("observedGeneration", newest))
    strategy = (spec.get("strategy") or {}).get("rollingUpdate") or (spec.get("rolloutStrategy") or {}).get(
        "rollingUpdateConfiguration", {}
    )
    conditions: list[dict[str, Any]] = status.get("conditions") or []
    messages = [each.get("message", "") for each in conditions if each.get("reason") == _DEADLINE]
    stuck = bool(messages) and not is_unobserved
    return RolloutView(
        service=service,
        role=role,
        ready=int(status.get("readyReplicas", 0)),
        updated=updated,
        rolling=is_unobserved or existing > updated,
        surges=bool(strategy.get("maxSurge")),
        stuck=stuck,
        message=str(messages[0]) if stuck else "",
    )


def waiting_rollouts(changed: Collection[str], views: Iterable[RolloutView]) -> dict[str, str]:
    """Return which of the ``changed`` services must not get their new pod template yet, each with the reason; empty if all can.

    Routers never wait. A worker service can roll out if no other worker service is rolling, or if it is rolling itself
    (the change then corrects its own rollout), or if some worker service has no ready replica, since then nothing is
    served and there is no ratio of prefill to decode replicas to preserve. If several services changed, decode is
    first.

    Args:
        changed: Names of services whose pod template is about to change.
        views: Rollout state of the workload of every service.
    """
    workers = [view for view in views if view.role.is_worker]
    asking = sorted(
        (view for view in workers if view.service in changed),
        key=lambda view: (not view.rolling, _ORDER.index(view.role), view.service),
    )
    if not asking or any(view.ready == 0 for view in workers):
        return {}
    rolling = sorted((view for view in workers if view.rolling), key=lambda view: view.service)
    first = (rolling or asking)[0]
    allowed = [view for view in asking if view.rolling] if rolling else [first]
    stuck = f", which is stuck: {first.message}" if first.rolling and first.stuck else ""
    reason = f"waits for the rollout of {first.service}{stuck}"
    return {
        view.service: reason for view in sorted(asking, key=lambda each: each.service) if view not in allowed
    }
