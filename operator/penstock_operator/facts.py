"""What the status is made of: the facts of one look at a graph, gathered from what was seen and planned. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_graph.models import GraphDeployment
from penstock_operator.build.labels import selector
from penstock_operator.build.pod import gpu_ceiling
from penstock_operator.plan.bounds import Bounded
from penstock_operator.plan.budget import Waiting
from penstock_operator.plan.conditions import Failure, GraphFacts, ServiceFacts
from penstock_operator.plan.diagnose import Diagnosis, diagnose
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.replicas import count
from penstock_operator.plan.rollout import RolloutView
from penstock_operator.plan.scale import ScalePlan

_SLOW_AFTER_STARTUP: float = 0.5
"""Part of a service's startup timeout after which its start is reported as slow. Chosen."""


@dataclass(slots=True)
class Seen:
    """What one look found, service by service.

    Attributes:
        bounds: Every service's wish within its bounds.
        plans: Scale plans of worker services.
        rollouts: Of the services whose workload exists.
        desired: Number that each workload has now.
        held: Why a service's new pod template waits.
        waiting: Pods that the budget holds back.
        failure: Why the graph cannot be brought about; None if it can.
    """

    bounds: dict[str, Bounded] = field(default_factory=dict)
    plans: dict[str, ScalePlan] = field(default_factory=dict)
    rollouts: dict[str, RolloutView] = field(default_factory=dict)
    desired: dict[str, int] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    waiting: Sequence[Waiting] = ()
    failure: Failure | None = None


def graph_facts(
    graph: GraphDeployment, generation: int, pods: Iterable[PodView], seen: Seen, *, now_s: float
) -> GraphFacts:
    """Return the facts of a valid graph.

    Args:
        graph: The graph.
        generation: Of its specification.
        pods: All its pods.
        seen: What this look found.
        now_s: Seconds since the epoch.
    """
    by_service: dict[str, list[PodView]] = {name: [] for name in graph.spec.services}
    for pod in pods:
        by_service.setdefault(pod.service, []).append(pod)
    reasons = {each.uid: each.reason for each in seen.waiting}
    diagnoses: list[Diagnosis] = []
    for service, views in by_service.items():
        spec = graph.spec.services.get(service)
        slow_s = 300.0 if spec is None else max(30.0, spec.startup_timeout_seconds * _SLOW_AFTER_STARTUP)
        for view in views:
            reason = reasons.get(view.uid, "")
            found = diagnose(view, now_s=now_s, budget_reason=reason, slow_start_s=slow_s)
            if found is not None:
                diagnoses.append(found)
    return GraphFacts(
        generation=generation,
        services={name: _service(graph, name, by_service[name], seen) for name in graph.spec.services},
        budget=gpu_ceiling(graph),
        waiting=seen.waiting,
        diagnoses=diagnoses,
        failure=seen.failure,
    )


def _service(graph: GraphDeployment, name: str, pods: Sequence[PodView], seen: Seen) -> ServiceFacts:
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
    )
