"""What one graph's planner is set to, read from the GraphDeployment and what the process was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from penstock.api import Environment, GraphDeployment, Role
from penstock.core.errors import InvalidSpecError, Problem
from penstock.performance.profile import PerformanceProfile
from penstock.planner.decide.config import DecideConfig
from penstock.planner.options import PlannerOptions, join
from penstock.planner.targets.kubernetes import ScaledService, services_of


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Everything that a loop depends on: two equal plans need no restart.

    Attributes:
        options: Of this graph; namespace, environment and log folder do not count here.
        config: Of the decision.
        services: Worker services by role.
        disabled: Why there is no planner; empty if there is one.
    """

    options: PlannerOptions
    config: DecideConfig
    services: Mapping[Role, ScaledService]
    disabled: str = ""


def parse(obj: Mapping[str, Any]) -> GraphDeployment:
    """Return a watched graph as the model.

    Raises:
        InvalidSpecError: this version does not understand it.
    """
    fields = {key: obj[key] for key in ("apiVersion", "kind", "metadata", "spec")}
    try:
        return GraphDeployment.model_validate(fields)
    except ValidationError as exc:
        problems = [
            Problem(".".join(map(str, error["loc"])), error["msg"], "graph")
            for error in exc.errors(include_url=False)
        ]
        raise InvalidSpecError(problems) from exc


def plan_of(
    graph: GraphDeployment, overrides: Mapping[str, Any], performance: PerformanceProfile | None = None
) -> GraphPlan:
    """Return a graph's plan.

    Args:
        graph: As watched.
        overrides: Options given to the process, by kebab-case name; they win over every graph's own.
        performance: What mode sla plans by; None in every other mode.

    Raises:
        ConfigError: the graph's planner cannot run so.
    """
    disabled = why_disabled(graph)
    options = join(given={} if disabled else overrides, graph=None if disabled else graph)
    return GraphPlan(options, options.decide_config(graph, performance), services_of(graph), disabled)


def why_disabled(graph: GraphDeployment) -> str:
    """Return why a graph has no planner; empty if it has one."""
    planner = graph.spec.planner
    if not planner.enabled:
        return "spec.planner.enabled is false"
    if planner.environment is Environment.LOCAL:
        return "spec.planner.environment is local"
    if not any(service.scaling for service in graph.spec.workers.values()):
        return "no worker service has spec.services.*.scaling"
    return ""
