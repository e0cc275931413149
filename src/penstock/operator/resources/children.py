"""All objects of a graph, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.api import GraphDeployment
from penstock.operator.resources.config_map import config_map
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.deployment import deployment
from penstock.operator.resources.inference_pool import inference_pool
from penstock.operator.resources.leader_worker_set import leader_worker_set
from penstock.operator.resources.metadata import ROUTER_SUFFIX, WORKER_SUFFIX
from penstock.operator.resources.network_policy import router_policy, worker_policy
from penstock.operator.resources.pod import processes
from penstock.operator.resources.pod_disruption_budget import pod_disruption_budget
from penstock.operator.resources.role import role
from penstock.operator.resources.role_binding import role_binding
from penstock.operator.resources.scaling_adapter import scaling_adapter
from penstock.operator.resources.service import service
from penstock.operator.resources.service_account import service_account
from penstock.runtimes import ProcessSpec

__all__ = ["BuildContext", "adapter", "children"]


def children(
    graph: GraphDeployment,
    context: BuildContext,
    *,
    replicas: Mapping[str, int],
    unavailable: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return a graph's objects except its ScalingAdapters: accounts first, routers' pods last.

    The same arguments give the same objects, down to the order of keys. A service over several nodes has
    no workload while the cluster knows no LeaderWorkerSet.

    Args:
        graph: A valid graph.
        context: Of the build.
        replicas: Number to write for a service; the graph's own where it is missing.
        unavailable: Replicas of a service that its rollout may take away at once; 0 where it is missing.

    Raises:
        InvalidSpecError: a podTemplate cannot be laid over its pod template.
    """
    found = [
        service_account(graph, ROUTER_SUFFIX, context),
        service_account(graph, WORKER_SUFFIX, context),
        role(graph, context),
        role_binding(graph, context),
    ]
    if graph.spec.traits.frontend is None:  # a runtime's own is configured by flags
        found.append(config_map(graph, context))
    found += [worker_policy(graph, context), router_policy(graph, context)]
    if graph.spec.router.gateway.enabled and context.has_inference_pool:
        found.append(inference_pool(graph, context))
    specs = processes(graph, context)
    workers_first = sorted(specs, key=lambda name: (not graph.spec.services[name].role.is_worker, name))
    for name in workers_first:
        found += [service(graph, name, context), pod_disruption_budget(graph, name, context)]
    for name in workers_first:
        number = replicas.get(name, graph.spec.services[name].replicas)
        found += _workload(graph, specs[name], context, replicas=number, unavailable=unavailable.get(name, 0))
    return found


def adapter(
    graph: GraphDeployment, service_name: str, context: BuildContext, *, replicas: int | None
) -> dict[str, Any]:
    """Return the ScalingAdapter of a service that scales; see `scaling_adapter`."""
    return scaling_adapter(graph, service_name, context, replicas=replicas)


def _workload(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, unavailable: int
) -> list[dict[str, Any]]:
    if spec.nodes == 1:
        return [deployment(graph, spec, context, replicas=replicas, unavailable=unavailable)]
    if context.has_leader_worker_set:
        return [leader_worker_set(graph, spec, context, replicas=replicas, unavailable=unavailable)]
    return []
