"""Builds all objects of a graph, in the order in which they are applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.api import WORKER_ROLES, GraphDeployment, Role
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.core.ports import SIDE_CHANNEL_PORT, WORKER_PORT
from penstock.kube.kinds import (
    DEPLOYMENT,
    INFERENCE_POOL,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    ROLE,
    ROLE_BINDING,
    SCALING_ADAPTER,
    SERVICE,
    SERVICE_ACCOUNT,
)
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
    SERVING,
    SERVING_LABEL,
    child_name,
)
from penstock.runtimes import ProcessSpec, runtime_of
from penstock.runtimes.engine_flags import LEADER_RANK, kv_replay_port
from penstock_operator.resources.metadata import (
    POOL_SUFFIX,
    ROUTER_SUFFIX,
    WORKER_SUFFIX,
    BuildContext,
    graph_child,
    selector,
    service_child,
)
from penstock_operator.resources.pod import pod_template, processes
from penstock_operator.resources.router_config import config_map

__all__ = ["BuildContext", "adapter", "children"]

_SLACK_S: Final = 60
"""Seconds of a rollout's progress deadline for scheduling and image pulls, in addition to draining and model loading.
Chosen."""


def children(
    graph: GraphDeployment,
    context: BuildContext,
    *,
    replicas: Mapping[str, int],
    unavailable: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return a graph's desired objects except its ScalingAdapters, in the order of writing: ServiceAccounts first, routers' workloads last.

    Equal arguments give equal objects, including the order of keys. A multi-node service has no workload if the cluster
    does not serve LeaderWorkerSet.

    Args:
        graph: A valid graph.
        context: Settings from which the objects are built.
        replicas: Number of replicas to write into each service's workload, by service; services that are not listed get
            the number in the graph.
        unavailable: Number of replicas, by service, that a rollout of the service can take away at once
            (maxUnavailable). 0, also for services that are not listed, starts a new pod before an old one ends, which
            needs room in the budget.

    Raises:
        InvalidSpecError: podTemplates cannot be merged into the pod templates, or use privileges that are not allowed.
            It lists every problem.
    """
    # The accounts do not mount a token; a pod that calls the API server requests one itself.
    found = [
        graph_child(SERVICE_ACCOUNT, graph, context, suffix, automountServiceAccountToken=False)
        for suffix in (ROUTER_SUFFIX, WORKER_SUFFIX)
    ]
    found += _rights(graph, context)
    if graph.spec.traits.frontend is None:  # a runtime's own frontend is configured by flags
        found.append(config_map(graph, context))
    found += _network_policies(graph, context)
    if graph.spec.router.gateway.enabled and INFERENCE_POOL in context.kinds:
        found.append(_inference_pool(graph, context))
    specs = processes(graph, context)
    workers_first = sorted(specs, key=lambda name: (not graph.spec.services[name].role.is_worker, name))
    for name in workers_first:
        found += [_service(graph, name, context), _disruption_budget(graph, name, context)]
    problems: list[ManifestProblem] = []
    for name in workers_first:
        number = replicas.get(name, graph.spec.services[name].first_replicas)
        max_unavailable = unavailable.get(name, 0)
        try:
            found += _workload(graph, specs[name], context, replicas=number, unavailable=max_unavailable)
        except InvalidSpecError as exc:
            problems += exc.problems
    if problems:
        raise InvalidSpecError(problems)
    return found


def adapter(
    graph: GraphDeployment, service: str, context: BuildContext, *, replicas: int | None
) -> dict[str, Any]:
    """Return a service's ScalingAdapter, the object with its desired number of replicas.

    Args:
        graph: The graph.
        service: Name of the service.
        context: Settings from which the objects are built.
        replicas: Value of ``spec.replicas``; None leaves the field out, so that the field manager that wrote it last
            keeps it.
    """
    number = {} if replicas is None else {"replicas": replicas}
    spec = {"graph": graph.name, "service": service, **number}
    return service_child(SCALING_ADAPTER, graph, service, context, spec=spec)


def _rights(graph: GraphDeployment, context: BuildContext) -> list[dict[str, Any]]:
    """Return the Role and RoleBinding with which routers discover workers and read their graph; some runtimes' workers get them too."""
    own = runtime_of(graph.spec.runtime).cluster.verbs
    verbs = {("discovery.k8s.io", "endpointslices"): ("get", "list", "watch"), **own}
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": list(each)}
        for (group, resource), each in verbs.items()
    ]
    # A router's live page shows the graph's status from planner and operator.
    own_graph = {"apiGroups": ["penstock.dev"], "resources": ["graphdeployments"], "verbs": ["get"]}
    rules.append({**own_graph, "resourceNames": [graph.name]})
    accounts = [
        {"kind": "ServiceAccount", "name": child_name(graph.name, suffix), "namespace": context.namespace}
        for suffix in ((ROUTER_SUFFIX, WORKER_SUFFIX) if own else (ROUTER_SUFFIX,))
    ]
    role = {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": child_name(graph.name, ROUTER_SUFFIX)}
    return [
        graph_child(ROLE, graph, context, ROUTER_SUFFIX, rules=rules),
        graph_child(ROLE_BINDING, graph, context, ROUTER_SUFFIX, roleRef=role, subjects=accounts),
    ]


def _network_policies(graph: GraphDeployment, context: BuildContext) -> list[dict[str, Any]]:
    """Return the NetworkPolicies: clients reach only routers; workers accept routers, a Gateway, each other and metrics scrapers.

    A worker does not check API keys, so bypassing the router would bypass keys, tiers and limits. Workers reach each
    other on every port, because KV transfers and collectives choose their ports at run time.
    """
    http = [{"port": HTTP_PORT, "protocol": "TCP"}]
    workers_of, routers_of = _roles(graph, WORKER_ROLES), _roles(graph, (Role.ROUTER,))
    workers = {"from": [{"podSelector": workers_of}]}
    from_routers: dict[str, Any] = {"from": [{"podSelector": routers_of}]}
    to_routers: list[dict[str, Any]] = [{"ports": http}]
    if graph.spec.traits.frontend is None:
        port = graph.spec.router.kv_events_port
        further = [] if port is None else [port, kv_replay_port(port)]
        if runtime_of(graph.spec.runtime).kv_transfer_of(graph.spec).introduction_path is not None:
            further.append(SIDE_CHANNEL_PORT)
        from_routers["ports"] = [*http, *({"port": each, "protocol": "TCP"} for each in further)]
    else:  # Dynamo's workers stream responses back on ports that its frontend chooses
        to_routers.append(workers)
    if graph.spec.router.gateway.enabled:
        to_routers[0] = {"ports": [*http, {"port": EXT_PROC_PORT, "protocol": "TCP"}]}
    operators = {"kubernetes.io/metadata.name": context.operator_namespace or context.namespace}
    readers = [
        {
            "namespaceSelector": {"matchLabels": operators},
            "podSelector": {"matchExpressions": [{"key": SCOPE_LABEL, "operator": "Exists"}]},
        },
        {"namespaceSelector": {"matchLabels": {METRICS_ACCESS_LABEL: METRICS_ACCESS}}},
    ]
    if graph.spec.router.gateway.enabled:
        readers.append({"namespaceSelector": {"matchLabels": {GATEWAY_ACCESS_LABEL: GATEWAY_ACCESS}}})
    to_workers = [from_routers, workers, {"from": readers, "ports": http}]
    found = []
    for suffix, selected, ingress in (
        (WORKER_SUFFIX, workers_of, to_workers),
        (ROUTER_SUFFIX, routers_of, to_routers),
    ):
        spec = {"podSelector": selected, "policyTypes": ["Ingress"], "ingress": ingress}
        found.append(graph_child(NETWORK_POLICY, graph, context, suffix, spec=spec))
    return found


def _roles(graph: GraphDeployment, roles: Sequence[Role]) -> dict[str, Any]:
    values = [role.value for role in roles]
    return {
        "matchLabels": {GRAPH_LABEL: graph.name},
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": values}],
    }


def _service(graph: GraphDeployment, name: str, context: BuildContext) -> dict[str, Any]:
    """Return the Kubernetes Service of a service; Kubernetes copies its labels to its EndpointSlices.

    A router's Service has one address for clients. A worker's is headless and excludes draining pods: no client uses
    it, but routers find the workers in its EndpointSlices.
    """
    is_worker = graph.spec.services[name].role.is_worker
    spec: dict[str, Any] = {
        "type": "ClusterIP",  # explicit, so that a change to NodePort by someone else is detected
        "selector": selector(graph, name) | ({SERVING_LABEL: SERVING} if is_worker else {}),
        "ports": [{"name": HTTP_PORT, "port": WORKER_PORT, "targetPort": HTTP_PORT, "protocol": "TCP"}],
    }
    if context.ip_family_policy:
        spec["ipFamilyPolicy"] = context.ip_family_policy
    if is_worker:
        spec["clusterIP"] = "None"
    elif graph.spec.router.gateway.enabled:
        port = {"name": EXT_PROC_PORT, "port": graph.spec.router.gateway.port, "targetPort": EXT_PROC_PORT}
        spec["ports"].append({**port, "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"})
    labels = runtime_of(graph.spec.runtime).cluster.service_labels
    return service_child(SERVICE, graph, name, context, more_labels=labels, spec=spec)


def _inference_pool(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the InferencePool with which a Gateway finds a graph's workers and asks the graph's router to pick one.

    It contains only the workers that generate responses; the router calls prefill workers itself.
    """
    gateway, services = graph.spec.router.gateway, graph.spec.services
    role = Role.DECODE if graph.spec.is_disaggregated else Role.AGGREGATED
    router = min(name for name, each in services.items() if each.role is Role.ROUTER)
    spec = {
        "selector": {
            "matchLabels": {GRAPH_LABEL: graph.name, ROLE_LABEL: role.value, SERVING_LABEL: SERVING}
        },
        "targetPorts": [{"number": WORKER_PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": SERVICE.kind,
            "name": child_name(graph.name, router),
            "port": {"number": gateway.port},
            "failureMode": gateway.failure_mode.value,
        },
    }
    return graph_child(INFERENCE_POOL, graph, context, POOL_SUFFIX, spec=spec)


def _disruption_budget(graph: GraphDeployment, name: str, context: BuildContext) -> dict[str, Any]:
    """Return the PodDisruptionBudget of a service: evictions take one replica at a time.

    It does not use ``minAvailable: 1``: with one replica that would block every node drain forever, and an evicted
    pod finishes its requests first anyway.
    """
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector(graph, name)},
        # A pod that never became ready serves no client; it must not block a node drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return service_child(POD_DISRUPTION_BUDGET, graph, name, context, spec=spec)


def _workload(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, unavailable: int
) -> list[dict[str, Any]]:
    """Return a service's Deployment, or its LeaderWorkerSet if replicas span nodes; nothing if the cluster does not serve that kind."""
    # One replica at a time preserves the ratio of prefill to decode.
    rollout = {"maxSurge": 0 if unavailable else 1, "maxUnavailable": unavailable}
    if spec.nodes > 1:
        if LEADER_WORKER_SET not in context.kinds:
            return []
        body = {
            "replicas": replicas,
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rollout},
            **_groups(graph, spec, context),
        }
        return [service_child(LEADER_WORKER_SET, graph, spec.service, context, spec=body)]
    body = {
        "replicas": replicas,
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": math.ceil(spec.grace_s + spec.startup_s) + _SLACK_S,
        "selector": {"matchLabels": selector(graph, spec.service)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": rollout},
        "template": pod_template(graph, spec, context),
    }
    return [service_child(DEPLOYMENT, graph, spec.service, context, spec=body)]


def _groups(graph: GraphDeployment, spec: ProcessSpec, context: BuildContext) -> dict[str, Any]:
    """Return the part of a LeaderWorkerSet that creates a replica, one pod per node.

    The leader answers requests and its followers compute with it; `Runtime.node_args` has the arguments with which
    they join. LeaderWorkerSet sets ``LWS_LEADER_ADDRESS`` and ``LWS_WORKER_INDEX`` in each container. A worker that
    does not support several nodes, such as a simulated one, serves the entire replica from its leader, and its
    followers only occupy their GPUs.

    Source: lws.sigs.k8s.io, API v1. The objects follow that API; this project has not run multi-node vLLM.
    """
    runtime = runtime_of(graph.spec.runtime)
    leader, follower = (
        runtime.node_args(graph.spec, spec.nodes, rank) for rank in (LEADER_RANK, "$(LWS_WORKER_INDEX)")
    )
    return {
        # The policy Shared would use a Service with the set's name, which is the one for routers. That Service
        # excludes pods that are not ready, but followers must find their leader before it is ready.
        "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
        # LeaderReady would deadlock: the leader becomes ready only after its followers have joined.
        "startupPolicy": "LeaderCreated",
        "leaderWorkerTemplate": {
            "size": spec.nodes,
            # A rank that restarts cannot rejoin the others.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": pod_template(graph, spec, context, more_args=leader),
            "workerTemplate": pod_template(graph, spec, context, follows=True, more_args=follower),
        },
    }
