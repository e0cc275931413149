"""What a node pool gives a service's pods: nodes, GPUs and the model cache, among their other volumes.

The model cache is a folder of the node (``nodePools.<pool>.cacheMount``) or a PersistentVolumeClaim
(``cacheClaim``). A node's folder is the fastest and shared by all pods there, but every pod security
standard except *privileged* forbids it, and it must exist and be writable for user 1000. A claim passes the
restricted standard; with several nodes it needs access mode ReadWriteMany or ReadOnlyMany.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from penstock.api import GraphDeployment, NodePool, Role
from penstock.kube.objects.names import (
    API_KEYS_FOLDER,
    GRAPH_FILE,
    GRAPH_LABEL,
    ROLE_LABEL,
    TIER_KEYS_FOLDER,
    child_name,
)
from penstock.operator.resources.metadata import ROUTER_SUFFIX, selector

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
    pool, so that they run on a cluster without GPUs and yet can be set to hold real ones.
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


TEMPORARY = "/tmp"  # noqa: S108 - a volume of the pod's own
HOME = "/home/penstock"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's own path

Mounted = tuple[dict[str, Any], dict[str, Any]]
"""A volume and its mount."""


def is_penstock_image(graph: GraphDeployment, service: str) -> bool:
    """Whether the service runs Penstock's own program: it writes below /tmp alone and finishes its requests."""
    return graph.spec.runs_penstock(graph.spec.services[service])


def home_of(graph: GraphDeployment, service: str) -> str:
    """Return the home folder of a service's processes."""
    return TEMPORARY if is_penstock_image(graph, service) else HOME


def cache_of(graph: GraphDeployment, service: str) -> tuple[str, NodePool] | None:
    """Return where a service mounts its model cache, and its pool; None without one.

    Penstock's own programs load no model, so they mount none.
    """
    pool = graph.spec.node_pools.get(graph.spec.services[service].node_pool or "")
    if pool is None or pool.cache_mount is None or is_penstock_image(graph, service):
        return None
    return pool.cache_mount, pool


def volumes(graph: GraphDeployment, service: str) -> list[Mounted]:
    """Return every volume of a service's pods with its mount."""
    found = [empty_volume("tmp", TEMPORARY)]
    is_router = graph.spec.services[service].role is Role.ROUTER
    if not is_penstock_image(graph, service):
        found.append(empty_volume("home", HOME))
        if not is_router:
            # Named as the importer names it, so that an overlay's own size replaces this one.
            found.append(empty_volume("shared-memory", SHARED_MEMORY, medium="Memory"))
    elif is_router:
        found += _router_files(graph)
    cache = cache_of(graph, service)
    if cache is not None:
        found.append(cache_volume(*cache))
    return found


def empty_volume(name: str, path: str, **settings: str) -> Mounted:
    """Return an emptyDir mounted at ``path``."""
    return {"name": name, "emptyDir": settings}, {"name": name, "mountPath": path}


def _router_files(graph: GraphDeployment) -> list[Mounted]:
    folder = str(PurePosixPath(GRAPH_FILE).parent)
    config = {"name": "graph", "configMap": {"name": child_name(graph.name, ROUTER_SUFFIX)}}
    found: list[Mounted] = [(config, {"name": "graph", "mountPath": folder, "readOnly": True})]
    secret = graph.spec.router.auth.api_keys_secret
    if secret is not None:
        keys = {"name": "api-keys", "secret": {"secretName": secret}}
        found.append((keys, {"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True}))
    tiers = graph.spec.router.tiers
    if tiers.enabled and tiers.keys_secret is not None:
        keys = {"name": "tier-keys", "secret": {"secretName": tiers.keys_secret}}
        found.append((keys, {"name": "tier-keys", "mountPath": TIER_KEYS_FOLDER, "readOnly": True}))
    return found


def cache_volume(path: str, pool: NodePool) -> Mounted:
    """Return a pool's model cache mounted at ``path``: its claim, or the node's folder."""
    name = "model-cache"
    if pool.cache_claim is not None:
        volume = {"name": name, "persistentVolumeClaim": {"claimName": pool.cache_claim}}
    else:
        # Not DirectoryOrCreate: that makes a folder that only root may write, and the model load fails later.
        volume = {"name": name, "hostPath": {"path": path, "type": "Directory"}}
    return volume, {"name": name, "mountPath": path}
