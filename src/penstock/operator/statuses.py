"""What one reconcile found becomes the statuses of a graph and its adapters, written only if they say something new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.api import GraphDeployment, Role
from penstock.core.stamps import stamp
from penstock.kube.objects.names import WORKER_PORT, child_name
from penstock.operator.apply import Applier
from penstock.operator.plan.bounds import Bounded
from penstock.operator.plan.budget import Waiting
from penstock.operator.plan.conditions import ConditionFacts, Failure, ServiceFacts, count
from penstock.operator.plan.diagnose import Diagnosis, diagnose
from penstock.operator.plan.drain import ScalePlan
from penstock.operator.plan.pods import PodView
from penstock.operator.plan.rollout import RolloutView
from penstock.operator.plan.status import adapter_status, graph_status, is_current
from penstock.operator.resources.metadata import selector
from penstock.operator.resources.pod import gpu_ceiling
from penstock.operator.trim import Object

_SLOW_AFTER_STARTUP: float = 0.5
"""Part of a service's startup timeout after which its start is reported as slow. Chosen."""


@dataclass(slots=True)
class ReconcileState:
    """What one reconcile found, service by service.

    Attributes:
        bounds: Every service's desired replicas, clamped to its bounds.
        plans: Scale plans of worker services.
        rollouts: Of the services whose workload exists.
        desired: Number that each workload has now.
        held: Why a service's new pod template waits.
        refused: Of the services whose pods the API server refuses.
        waiting: Pods that the budget holds back.
        blocked: Replicas of a service that the budget keeps from running.
        failure: Why the graph cannot be brought about; None if it can.
        paused: What keeps the graph's children as they are; empty: nothing.
    """

    bounds: dict[str, Bounded] = field(default_factory=dict)
    plans: dict[str, ScalePlan] = field(default_factory=dict)
    rollouts: dict[str, RolloutView] = field(default_factory=dict)
    desired: dict[str, int] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    refused: dict[str, Diagnosis] = field(default_factory=dict)
    waiting: Sequence[Waiting] = ()
    blocked: Mapping[str, int] = field(default_factory=dict)
    failure: Failure | None = None
    paused: str = ""


def graph_facts(
    graph: GraphDeployment, generation: int, pods: Iterable[PodView], seen: ReconcileState, *, now_s: float
) -> ConditionFacts:
    """Return the facts of a valid graph.

    Args:
        graph: The graph.
        generation: Of its specification.
        pods: All its pods.
        seen: What this reconcile found.
        now_s: Seconds since the epoch.
    """
    by_service: dict[str, list[PodView]] = {name: [] for name in graph.spec.services}
    for pod in pods:
        by_service.setdefault(pod.service, []).append(pod)
    reasons = {each.uid: each.reason for each in seen.waiting}
    diagnoses = [each for _, each in sorted(seen.refused.items())]
    for service, views in by_service.items():
        spec = graph.spec.services.get(service)
        slow_s = 300.0 if spec is None else max(30.0, spec.startup_timeout_seconds * _SLOW_AFTER_STARTUP)
        for view in views:
            reason = reasons.get(view.uid, "")
            found = diagnose(view, now_s=now_s, budget_reason=reason, slow_start_s=slow_s)
            if found is not None:
                diagnoses.append(found)
    return ConditionFacts(
        generation=generation,
        services={name: _service(graph, name, by_service[name], seen) for name in graph.spec.services},
        budget=gpu_ceiling(graph),
        waiting=seen.waiting,
        diagnoses=diagnoses,
        failure=seen.failure,
        is_woken=graph.spec.planner.enabled and graph.spec.planner.scale_to_zero_after_seconds is not None,
        paused=seen.paused,
        url=_url(graph),
        served_model=graph.spec.served_name,
    )


def _url(graph: GraphDeployment) -> str:
    """Return where clients within the cluster reach the graph; empty: it has no router."""
    router = graph.spec.service(Role.ROUTER)
    if router is None:
        return ""
    return f"http://{child_name(graph.name, router[0])}.{graph.metadata.namespace}.svc:{WORKER_PORT}"


def _service(
    graph: GraphDeployment, name: str, pods: Sequence[PodView], seen: ReconcileState
) -> ServiceFacts:
    rollout = seen.rollouts.get(name)
    bounds, plan = seen.bounds[name], seen.plans.get(name)
    return ServiceFacts(
        role=graph.spec.services[name].role,
        replicas=count(pods),
        desired=seen.desired.get(name, 0),
        target=bounds.replicas,
        updated=0 if rollout is None else rollout.updated,
        selector=",".join(f"{key}={value}" for key, value in sorted(selector(graph, name).items())),
        rolling=rollout is not None and rollout.rolling,
        held=seen.held.get(name) or (plan.held if plan is not None else ""),
        refused=seen.refused.get(name),
        bounds=graph.spec.services[name].replica_bounds,
    )


class Statuses:
    """Says what `plan.status` decides."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier

    async def graph(self, raw: Object, facts: ConditionFacts, *, now_s: float) -> bool:
        """Write a graph's status; return whether it said something new."""
        old = raw.get("status") or None
        status = graph_status(facts, old=old, now=stamp(now_s))
        if not status["services"]:
            del status["services"]  # an empty map in place of a full one is stored as null, which is refused
        return await self._write(raw, status, old)

    async def adapter(self, live: Object, facts: ServiceFacts, bounds: Bounded, *, now_s: float) -> bool:
        """Write an adapter's status; return whether it said something new."""
        old = live.get("status")
        generation = live["metadata"].get("generation", 0)
        status = adapter_status(facts, bounds, generation=generation, old=old, now=stamp(now_s))
        return await self._write(live, status, old)

    async def _write(self, obj: Object, status: dict[str, Any], old: dict[str, Any] | None) -> bool:
        if is_current(status, old):
            return False
        metadata = {key: obj["metadata"][key] for key in ("name", "namespace", "uid")}
        kind = {"apiVersion": obj["apiVersion"], "kind": obj["kind"]}
        await self._applier.status({**kind, "metadata": metadata, "status": status})
        return True
