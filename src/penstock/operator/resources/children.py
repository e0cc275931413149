"""All objects of a graph, in the order in which they are applied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.api import API_VERSION, WORKER_ROLES, GraphDeployment, Role
from penstock.kube.objects.names import (
    GRAPH_LABEL,
    HTTP_PORT,
    METRICS_ACCESS,
    METRICS_ACCESS_LABEL,
    ROLE_LABEL,
    SCOPE_LABEL,
    WORKER_PORT,
    child_name,
)
from penstock.operator.resources.metadata import (
    ROUTER_SUFFIX,
    WORKER_SUFFIX,
    BuildContext,
    endpoint_selector,
    graph_labels,
    metadata,
    selector,
    service_labels,
    slice_labels,
)
from penstock.operator.resources.pod import pod_template, processes
from penstock.operator.resources.router_config import config_map
from penstock.runtimes import ProcessSpec, runtime_of
from penstock.runtimes.engine_flags import LEADER_RANK, kv_replay_port

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


def service_account(graph: GraphDeployment, suffix: str, context: BuildContext) -> dict[str, Any]:
    """Return the ServiceAccount ``GRAPH-SUFFIX``."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(graph, context, suffix, graph_labels(graph)),
        "automountServiceAccountToken": False,
    }


def role(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the Role; an operator may only grant what it holds itself."""
    rules = [_rule("discovery.k8s.io", "endpointslices", "get", "list", "watch")]
    own = runtime_of(graph.spec.runtime).cluster.verbs
    rules += [_rule(group, resource, *verbs) for (group, resource), verbs in own.items()]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(graph, context, ROUTER_SUFFIX, graph_labels(graph)),
        "rules": rules,
    }


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


_GROUP = "rbac.authorization.k8s.io"


def role_binding(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the RoleBinding."""
    has_own_verbs = bool(runtime_of(graph.spec.runtime).cluster.verbs)
    accounts = (ROUTER_SUFFIX, WORKER_SUFFIX) if has_own_verbs else (ROUTER_SUFFIX,)
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(graph, context, ROUTER_SUFFIX, graph_labels(graph)),
        "roleRef": {"apiGroup": _GROUP, "kind": "Role", "name": child_name(graph.name, ROUTER_SUFFIX)},
        "subjects": [
            {
                "kind": "ServiceAccount",
                "name": child_name(graph.name, suffix),
                "namespace": context.namespace,
            }
            for suffix in accounts
        ],
    }


_NAMESPACE_NAME = "kubernetes.io/metadata.name"


def router_policy(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the routers' policy: anybody may reach their HTTP port."""
    ingress: list[dict[str, Any]] = [{"ports": _http()}]
    if graph.spec.traits.frontend is not None:
        # Dynamo's workers stream their answers back on ports that its frontend chooses.
        ingress.append({"from": [{"podSelector": _roles(graph, WORKER_ROLES)}]})
    return _policy(graph, context, ROUTER_SUFFIX, (Role.ROUTER,), ingress)


def worker_policy(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the workers' policy: routers, each other, and those who read metrics.

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


def service(graph: GraphDeployment, name: str, context: BuildContext) -> dict[str, Any]:
    """Return the Service of the graph's service ``name``."""
    spec: dict[str, Any] = {
        "selector": endpoint_selector(graph, name),
        "ports": [{"name": HTTP_PORT, "port": WORKER_PORT, "targetPort": HTTP_PORT, "protocol": "TCP"}],
    }
    if graph.spec.services[name].role.is_worker:
        spec["clusterIP"] = "None"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(graph, context, name, slice_labels(graph, name)),
        "spec": spec,
    }


def pod_disruption_budget(graph: GraphDeployment, service: str, context: BuildContext) -> dict[str, Any]:
    """Return the PodDisruptionBudget of one service."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(graph, context, service, service_labels(graph, service)),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(graph, service)},
            # A pod that never became ready serves nobody; it must not hold up a node's drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def scaling_adapter(
    graph: GraphDeployment, service: str, context: BuildContext, *, replicas: int | None
) -> dict[str, Any]:
    """Return a service's ScalingAdapter.

    Args:
        graph: The graph.
        service: Service's name.
        context: Of the build.
        replicas: Number to start with; None leaves the number to whoever owns it.
    """
    spec: dict[str, Any] = {"graph": graph.name, "service": service}
    if replicas is not None:
        spec["replicas"] = replicas
    return {
        "apiVersion": API_VERSION,
        "kind": "ScalingAdapter",
        "metadata": metadata(graph, context, service, service_labels(graph, service)),
        "spec": spec,
    }


_SLACK_S = 60
"""Beyond leaving and loading, for the scheduler and the image; chosen."""


def deployment(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, unavailable: int
) -> dict[str, Any]:
    """Return a service's Deployment.

    Args:
        graph: The graph.
        spec: The service's process.
        context: Of the build.
        replicas: Number to write.
        unavailable: Replicas that a rollout may take away at once; 0: it starts a new pod before it ends an old
            one, which needs room in the budget.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(graph, context, spec.service, service_labels(graph, spec.service)),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": math.ceil(spec.grace_s + spec.startup_s) + _SLACK_S,
            "selector": {"matchLabels": selector(graph, spec.service)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rollout(unavailable)},
            "template": pod_template(graph, spec, context),
        },
    }


def rollout(unavailable: int) -> dict[str, int]:
    """Return how many replicas a rollout may add and take; one at a time keeps the pools' proportions."""
    return {"maxSurge": 0 if unavailable else 1, "maxUnavailable": unavailable}


def leader_worker_set(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, unavailable: int
) -> dict[str, Any]:
    """Return a service's LeaderWorkerSet; the arguments are `deployment`'s."""
    runtime = runtime_of(graph.spec.runtime)
    leader, follower = (
        runtime.node_args(graph.spec, spec.nodes, rank) for rank in (LEADER_RANK, "$(LWS_WORKER_INDEX)")
    )
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(graph, context, spec.service, service_labels(graph, spec.service)),
        "spec": {
            "replicas": replicas,
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rollout(unavailable)},
            # Shared would need a Service of the set's own name, which is the one that routers use: it leaves out
            # pods that are not ready, and followers must find their leader before that.
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            # Not LeaderReady: the leader becomes ready only with its followers.
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": spec.nodes,
                # A rank that restarts cannot rejoin the others.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": pod_template(graph, spec, context, more_args=leader),
                "workerTemplate": pod_template(graph, spec, context, follows=True, more_args=follower),
            },
        },
    }
