"""Where pods go: the node pool's labels and taints, its GPUs, and who is preferred as a neighbour."""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment, NodePool, Role
from penstock.kube.objects.names import GRAPH_LABEL, ROLE_LABEL
from penstock.operator.resources.labels import selector

_ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"
_ANY_POOL = NodePool()


def gpus_per_pod(graph: GraphDeployment, service: str) -> int:
    """Return the GPUs that one pod of a service counts against the budget."""
    spec = graph.spec.services[service]
    return spec.gpus // spec.nodes_per_replica


def gpu_request(graph: GraphDeployment, service: str) -> tuple[str, int] | None:
    """Return name and number of the extended resource that one pod asks for; None if it asks for none.

    Workers that model a GPU (simulated ones and Dynamo's mocker) ask only if their service names a node
    pool, so that they run on a cluster without GPUs and yet can be told to hold real ones.
    """
    spec = graph.spec.services[service]
    if spec.gpus == 0 or (graph.spec.models_gpus and spec.node_pool is None):
        return None
    return _pool(graph, service).gpu_resource_name, gpus_per_pod(graph, service)


def placement(graph: GraphDeployment, service: str) -> dict[str, Any]:
    """Return node selector, tolerations, affinity and spread of a service's pods; only what is not empty."""
    pool = _pool(graph, service)
    spec: dict[str, Any] = {
        "nodeSelector": dict(sorted(pool.node_selector.items())),
        "tolerations": [each.to_manifest() for each in pool.tolerations],
    }
    role = graph.spec.services[service].role
    if role is Role.ROUTER:
        spec["topologySpreadConstraints"] = [_spread(graph, service, topology) for topology in (_HOST, _ZONE)]
    elif role is not Role.AGGREGATED:
        spec["affinity"] = _same_zone(graph)
    return {key: value for key, value in spec.items() if value}


def _pool(graph: GraphDeployment, service: str) -> NodePool:
    name = graph.spec.services[service].node_pool
    return _ANY_POOL if name is None else graph.spec.node_pools[name]


def _spread(graph: GraphDeployment, service: str, topology: str) -> dict[str, Any]:
    """A preference, no demand: one node that is left must be able to run all routers."""
    return {
        "maxSkew": 1,
        "topologyKey": topology,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(graph, service)},
    }


def _same_zone(graph: GraphDeployment) -> dict[str, Any]:
    """KV blocks travel between prefill and decode: a zone's border costs time and often money."""
    workers = {"key": ROLE_LABEL, "operator": "In", "values": [Role.PREFILL.value, Role.DECODE.value]}
    term = {
        "labelSelector": {"matchLabels": {GRAPH_LABEL: graph.name}, "matchExpressions": [workers]},
        "topologyKey": _ZONE,
    }
    preference = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
