"""NetworkPolicies: clients reach routers, and workers only those who have business with them.

A worker asks for no key and serves whoever reaches it, so that going round the router would go round keys,
tiers and limits.
"""

from __future__ import annotations

from typing import Any

from penstock.api import WORKER_ROLES, GraphDeployment, Role
from penstock.kube.objects.names import (
    EXT_PROC_PORT,
    GATEWAY_ACCESS,
    GATEWAY_ACCESS_LABEL,
    GRAPH_LABEL,
    HTTP_PORT,
    METRICS_ACCESS,
    METRICS_ACCESS_LABEL,
    ROLE_LABEL,
    SCOPE_LABEL,
)
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import graph_labels
from penstock.operator.resources.metadata import ROUTER_SUFFIX, WORKER_SUFFIX, metadata
from penstock.runtimes.engine_flags import kv_replay_port

_NAMESPACE_NAME = "kubernetes.io/metadata.name"


def router_policy(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the routers' policy: anybody may reach their HTTP port, and a Gateway theirs for it."""
    ingress: list[dict[str, Any]] = [{"ports": _http()}]
    if graph.spec.router.gateway.enabled:
        ingress[0]["ports"].append({"port": EXT_PROC_PORT, "protocol": "TCP"})
    if graph.spec.traits.frontend is not None:
        # Dynamo's workers stream their answers back on ports that its frontend chooses.
        ingress.append({"from": [{"podSelector": _roles(graph, WORKER_ROLES)}]})
    return _policy(graph, context, ROUTER_SUFFIX, (Role.ROUTER,), ingress)


def worker_policy(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the workers' policy: routers, each other, a Gateway, and those who read metrics.

    Workers reach each other on every port, because KV transfers and collectives choose theirs at run time.
    """
    routers: dict[str, Any] = {"from": [{"podSelector": _roles(graph, (Role.ROUTER,))}]}
    if graph.spec.traits.frontend is None:
        routers["ports"] = _http() + _kv_events(graph)
    readers = [
        {
            "namespaceSelector": _namespace(context.operator_namespace or context.namespace),
            "podSelector": {"matchExpressions": [{"key": SCOPE_LABEL, "operator": "Exists"}]},
        },
        {"namespaceSelector": {"matchLabels": {METRICS_ACCESS_LABEL: METRICS_ACCESS}}},
    ]
    if graph.spec.router.gateway.enabled:
        readers.append({"namespaceSelector": {"matchLabels": {GATEWAY_ACCESS_LABEL: GATEWAY_ACCESS}}})
    ingress = [
        routers,
        {"from": [{"podSelector": _roles(graph, WORKER_ROLES)}]},
        {"from": readers, "ports": _http()},
    ]
    return _policy(graph, context, WORKER_SUFFIX, WORKER_ROLES, ingress)


def _policy(
    graph: GraphDeployment,
    context: BuildContext,
    suffix: str,
    roles: tuple[Role, ...],
    ingress: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(graph, context, suffix, graph_labels(graph)),
        "spec": {"podSelector": _roles(graph, roles), "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _roles(graph: GraphDeployment, roles: tuple[Role, ...]) -> dict[str, Any]:
    values = [role.value for role in roles]
    return {
        "matchLabels": {GRAPH_LABEL: graph.name},
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": values}],
    }


def _http() -> list[dict[str, Any]]:
    return [{"port": HTTP_PORT, "protocol": "TCP"}]


def _kv_events(graph: GraphDeployment) -> list[dict[str, Any]]:
    port = graph.spec.router.kv_events_port
    if port is None:
        return []
    return [{"port": each, "protocol": "TCP"} for each in (port, kv_replay_port(port))]


def _namespace(name: str) -> dict[str, Any]:
    return {"matchLabels": {_NAMESPACE_NAME: name}}
