"""How and when a service's changed pod template rolls.

Pure. Two rules keep the ratio of prefill to decode while a graph changes:

- a rollout surges (one replica more, none missing) where the budget has room for that replica even when
  every wanted replica exists, and otherwise replaces one at a time (none more, one missing alongside those for
  which the budget has no room);
- at most one worker service rolls at a time, so at most one replica is away.

Room is measured by *wanted* replicas, not by existing ones: a rollout's own surge pod must not take away the
room that it was allowed to use. A rollout that has begun to surge continues so although more replicas are wanted
meanwhile, unless the budget keeps its new pod from starting: a strategy that flips ends the old pod at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import Role

_ORDER: Final = (Role.DECODE, Role.PREFILL, Role.AGGREGATED)
"""Which role rolls first when several changed: decode, as the planner's precedence has it."""

_DEADLINE: Final = "ProgressDeadlineExceeded"
"""Reason that the Deployment controller gives a rollout without progress for progressDeadlineSeconds."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """Where a service's workload stands.

    Attributes:
        updated: Replicas of the newest revision.
        rolling: Whether a rollout has begun and not ended.
        surges: Whether its strategy starts one more than wanted first.
        stuck: Whether it has made no progress for the Deployment's progress deadline.
        message: The controller's own words about a stuck rollout.
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
    """Return how many replicas a rollout may take away at once; 0: it starts one more than wanted first.

    Args:
        role: Service's role; routers hold no GPUs.
        gpus_per_replica: GPUs of one replica.
        wanted_gpus: GPUs of all wanted replicas of the graph's worker services.
        budget: Most GPUs; None: no ceiling.
        blocked: Replicas of the service that the budget keeps from running. They are away for good, and a
            rollout that may have one away would wait for them for ever.
        view: Where its workload stands; None: there is none.
    """
    if view is not None and view.rolling and view.surges and not blocked:
        return 0
    if not role.is_worker or budget is None or wanted_gpus + gpus_per_replica <= budget:
        return 0
    beyond = math.ceil(max(0, wanted_gpus - budget) / gpus_per_replica) if gpus_per_replica else 0
    return 1 + min(beyond, blocked)


def rollout_view(
    service: str, role: Role, workload: Mapping[str, Any], *, template_generation: int | None = None
) -> RolloutView:
    """Return where ``workload``, a Deployment or LeaderWorkerSet, stands.

    It rolls while replicas of an older revision exist, or while its controller has not seen its newest pod template.
    Replicas that merely start, or merely are one too many, are not a rollout, nor is a number that it has not seen.

    Args:
        service: Its service.
        role: The service's role.
        workload: The live object.
        template_generation: Generation that brought the newest pod template; None, unknown: the newest one.
    """
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    updated, existing = int(status.get("updatedReplicas", 0)), int(status.get("replicas", 0))
    generation = int((workload.get("metadata") or {}).get("generation", 0))
    newest = generation if template_generation is None else template_generation
    behind = newest > int(status.get("observedGeneration", newest))
    strategy = (spec.get("strategy") or {}).get("rollingUpdate") or (spec.get("rolloutStrategy") or {}).get(
        "rollingUpdateConfiguration", {}
    )
    conditions: list[dict[str, Any]] = status.get("conditions") or []
    words = [each.get("message", "") for each in conditions if each.get("reason") == _DEADLINE]
    stuck = bool(words) and not behind
    return RolloutView(
        service=service,
        role=role,
        ready=int(status.get("readyReplicas", 0)),
        updated=updated,
        rolling=behind or existing > updated,
        surges=bool(strategy.get("maxSurge")),
        stuck=stuck,
        message=str(words[0]) if stuck else "",
    )


def held_rollouts(changed: Collection[str], views: Iterable[RolloutView]) -> dict[str, str]:
    """Return which of the ``changed`` services may not get their new pod template yet, and why.

    Routers always may. A worker service may if no other one rolls, or if it rolls itself (a correction of
    its own rollout), or if some worker service has no ready replica: then nothing is served and there is no
    ratio to keep. Of several, decode goes first.
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
