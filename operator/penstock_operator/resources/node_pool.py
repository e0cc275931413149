"""What a node pool gives pods: nodes, GPUs and the model cache, among their other volumes.

The model cache is a folder of the node (``nodePools.<pool>.cacheMount``) or a PersistentVolumeClaim
(``cacheClaim``). A node's folder is the fastest and shared by all pods there, but every pod security
standard except *privileged* forbids it, and it must exist and be writable for user 1000. A claim passes the
restricted standard; with several nodes it needs access mode ReadWriteMany or ReadOnlyMany.
"""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment, NodePool, Role
from penstock.kube.objects.names import GRAPH_LABEL, ROLE_LABEL
from penstock_operator.resources.metadata import selector

_ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"

TEMPORARY = "/tmp"  # noqa: S108 - a volume of the pod's own
HOME = "/home/penstock"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's own path

_USER = "penstock"
"""User 1000 is in no image's password file; PyTorch asks for its name all the same."""

Mounted = tuple[dict[str, Any], dict[str, Any]]
"""A volume and its mount."""


def pool_of(graph: GraphDeployment, service: str) -> NodePool | None:
    """Return the node pool of a service; None: any node."""
    name = graph.spec.services[service].node_pool
    return None if name is None else graph.spec.node_pools[name]


def gpus_per_pod(graph: GraphDeployment, service: str) -> int:
    """Return the GPUs that one pod of a service counts against the budget."""
    spec = graph.spec.services[service]
    return spec.gpus // spec.nodes_per_replica


def gpu_request(graph: GraphDeployment, service: str) -> tuple[str, int] | None:
    """Return name and number of the extended resource that one pod asks for; None if it asks for none."""
    resource = graph.spec.gpu_resource_of(service)
    return None if resource is None else (resource, gpus_per_pod(graph, service))


def placement(graph: GraphDeployment, service: str) -> dict[str, Any]:
    """Return node selector, tolerations, affinity and spread of a service's pods; only what is not empty."""
    spec = on_nodes(pool_of(graph, service))
    role = graph.spec.services[service].role
    if role is Role.ROUTER:
        spec["topologySpreadConstraints"] = [_spread_over_nodes(graph, service)]
        spec["affinity"] = _apart_in_zones(graph, service)
    elif role is not Role.AGGREGATED:
        spec["affinity"] = _same_zone(graph)
    return spec


def on_nodes(pool: NodePool | None) -> dict[str, Any]:
    """Return node selector and tolerations of pods on a pool's nodes; only what is not empty."""
    pool = pool or NodePool()
    spec = {
        "nodeSelector": dict(sorted(pool.node_selector.items())),
        "tolerations": [each.to_manifest() for each in pool.tolerations],
    }
    return {key: value for key, value in spec.items() if value}


def _spread_over_nodes(graph: GraphDeployment, service: str) -> dict[str, Any]:
    """A preference, no demand: one node that is left must be able to run all routers.

    Over nodes alone: the scheduler gives no score to a node that lacks the label of any constraint, so on nodes without
    zones a second one would end the spreading.
    """
    return {
        "maxSkew": 1,
        "topologyKey": _HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(graph, service)},
    }


def _apart_in_zones(graph: GraphDeployment, service: str) -> dict[str, Any]:
    """A lost zone should leave routers; nodes without zones are all alike to this preference."""
    term = {"labelSelector": {"matchLabels": selector(graph, service)}, "topologyKey": _ZONE}
    preference = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def _same_zone(graph: GraphDeployment) -> dict[str, Any]:
    """KV blocks travel between prefill and decode: a zone's border costs time and often money."""
    workers = {"key": ROLE_LABEL, "operator": "In", "values": [Role.PREFILL.value, Role.DECODE.value]}
    term = {
        "labelSelector": {"matchLabels": {GRAPH_LABEL: graph.name}, "matchExpressions": [workers]},
        "topologyKey": _ZONE,
    }
    preference = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def home_variables(pool: NodePool | None, *, is_own: bool) -> dict[str, str]:
    """Return the variables that name a pod's folders; Penstock's own programs write below /tmp alone and load no model."""
    if is_own:
        return {"HOME": TEMPORARY}
    cache = {} if pool is None or pool.cache_mount is None else {"HF_HOME": pool.cache_mount}
    return {"HOME": HOME, **cache, "USER": _USER}


def folders(pool: NodePool | None, *, is_own: bool, is_worker: bool = True) -> list[Mounted]:
    """Return the volumes below which a pod's programs write, and its pool's model cache, with their mounts."""
    found = [_empty("tmp", TEMPORARY)]
    if is_own:
        return found
    found.append(_empty("home", HOME))
    if is_worker:
        # Named as the importer names it, so that an overlay's own size replaces this one.
        found.append(_empty("shared-memory", SHARED_MEMORY, medium="Memory"))
    if pool is not None and pool.cache_mount is not None:
        found.append(_cache(pool.cache_mount, pool.cache_claim))
    return found


def _empty(name: str, path: str, **settings: str) -> Mounted:
    return {"name": name, "emptyDir": settings}, {"name": name, "mountPath": path}


def read_only(name: str, path: str, **source: Any) -> Mounted:
    """Return a volume of files, such as a ConfigMap's, mounted at ``path``."""
    return {"name": name, **source}, {"name": name, "mountPath": path, "readOnly": True}


def _cache(path: str, claim: str | None) -> Mounted:
    name = "model-cache"
    # Not DirectoryOrCreate: that makes a folder that only root may write, and the model load fails later.
    host = {"hostPath": {"path": path, "type": "Directory"}}
    source = host if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    return {"name": name, **source}, {"name": name, "mountPath": path}
