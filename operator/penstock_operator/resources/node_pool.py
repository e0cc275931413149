"""Pod settings that a node pool determines: nodes, GPUs, the model cache, and the pods' other volumes.

The model cache is a folder on the node (``nodePools.<pool>.cacheMount``) or a PersistentVolumeClaim (``cacheClaim``).
A folder on the node is the fastest and is shared by all pods on the node, but every pod security standard except
*privileged* forbids it, and it must exist and be writable for user 1000. A claim is allowed by the restricted
standard; with several nodes it needs access mode ReadWriteMany or ReadOnlyMany.
"""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment, NodePool, Role
from penstock.kube.objects.names import GRAPH_LABEL, ROLE_LABEL
from penstock_operator.resources.metadata import selector

_ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"

TEMPORARY = "/tmp"  # noqa: S108 - a volume of the pod
HOME = "/home/penstock"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's own path

_USER = "penstock"
"""Value of the variable USER. No image's password file contains user 1000, but PyTorch asks for the user's name."""

Mounted = tuple[dict[str, Any], dict[str, Any]]
"""A volume and its volume mount."""


def pool_of(graph: GraphDeployment, service: str) -> NodePool | None:
    """Return the graph's node pool (node selector, tolerations and model cache) that a service names, and on whose nodes it runs.

    Returns None if the service names none, so that its pods can run on any node.
    """
    name = graph.spec.services[service].node_pool
    return None if name is None else graph.spec.node_pools[name]


def gpus_per_pod(graph: GraphDeployment, service: str) -> int:
    """Return the number of GPUs that one pod of a graph's service counts against the graph's GPU budget."""
    spec = graph.spec.services[service]
    return spec.gpus // spec.nodes_per_replica


def gpu_request(graph: GraphDeployment, service: str) -> tuple[str, int] | None:
    """Return the extended resource that one pod of a graph's service requests, such as ``nvidia.com/gpu``, and its amount.

    Returns None if the pod requests none.
    """
    resource = graph.spec.gpu_resource_of(service)
    return None if resource is None else (resource, gpus_per_pod(graph, service))


def placement(graph: GraphDeployment, service: str) -> dict[str, Any]:
    """Return the fields of a pod specification that choose the nodes of a service's pods; fields without a value are left out.

    They are node selector, tolerations, affinity and topology spread.
    """
    spec = on_nodes(pool_of(graph, service))
    role = graph.spec.services[service].role
    if role is Role.ROUTER:
        spec["topologySpreadConstraints"] = [_spread_over_nodes(graph, service)]
        spec["affinity"] = _apart_in_zones(graph, service)
    elif role is not Role.AGGREGATED:
        spec["affinity"] = _same_zone(graph)
    return spec


def on_nodes(pool: NodePool | None) -> dict[str, Any]:
    """Return the fields of a pod specification (node selector, tolerations) that put pods on the nodes of a node pool.

    Fields without a value are left out; without a pool, the result is empty and pods run on any node.
    """
    pool = pool or NodePool()
    spec = {
        "nodeSelector": dict(sorted(pool.node_selector.items())),
        "tolerations": [each.to_manifest() for each in pool.tolerations],
    }
    return {key: value for key, value in spec.items() if value}


def _spread_over_nodes(graph: GraphDeployment, service: str) -> dict[str, Any]:
    """Return a preference, not a requirement, to spread routers: a single remaining node must be able to run all of them.

    It spreads only over nodes, not over zones: the scheduler gives no score to a node that lacks the label of any
    constraint, so a second constraint would stop the spreading on nodes without zones.
    """
    return {
        "maxSkew": 1,
        "topologyKey": _HOST,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(graph, service)},
    }


def _apart_in_zones(graph: GraphDeployment, service: str) -> dict[str, Any]:
    """Return a preference to spread routers over zones, so that a lost zone leaves some; without zones it has no effect."""
    term = {"labelSelector": {"matchLabels": selector(graph, service)}, "topologyKey": _ZONE}
    preference = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def _same_zone(graph: GraphDeployment) -> dict[str, Any]:
    """Return a preference to run prefill and decode in one zone: KV transfers between zones take longer and often cost money."""
    workers = {"key": ROLE_LABEL, "operator": "In", "values": [Role.PREFILL.value, Role.DECODE.value]}
    term = {
        "labelSelector": {"matchLabels": {GRAPH_LABEL: graph.name}, "matchExpressions": [workers]},
        "topologyKey": _ZONE,
    }
    preference = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}


def home_variables(pool: NodePool | None, *, is_own: bool) -> dict[str, str]:
    """Return the environment variables, as values by name, for a pod's home folder, its model cache (HF_HOME) and its user.

    Args:
        pool: Node pool of the service; None if it has none.
        is_own: Whether the pod runs Penstock's own program, which writes only below /tmp and loads no model.
    """
    if is_own:
        return {"HOME": TEMPORARY}
    cache = {} if pool is None or pool.cache_mount is None else {"HF_HOME": pool.cache_mount}
    return {"HOME": HOME, **cache, "USER": _USER}


def folders(pool: NodePool | None, *, is_own: bool, is_worker: bool = True) -> list[Mounted]:
    """Return the volumes that a pod's programs write to, and the node pool's model cache, as pairs of a volume and its mount.

    Args:
        pool: Node pool of the service; None if it has none.
        is_own: Whether the pod runs Penstock's own program, which needs only /tmp.
        is_worker: Whether the pod is a worker, which needs shared memory.
    """
    found = [_empty("tmp", TEMPORARY)]
    if is_own:
        return found
    found.append(_empty("home", HOME))
    if is_worker:
        # The name equals the importer's, so that an overlay with a size replaces this volume.
        found.append(_empty("shared-memory", SHARED_MEMORY, medium="Memory"))
    if pool is not None and pool.cache_mount is not None:
        found.append(_cache(pool.cache_mount, pool.cache_claim))
    return found


def _empty(name: str, path: str, **settings: str) -> Mounted:
    return {"name": name, "emptyDir": settings}, {"name": name, "mountPath": path}


def read_only(name: str, path: str, **source: Any) -> Mounted:
    """Return a pair: a volume with files, for example from a ConfigMap, and its read-only mount.

    Args:
        name: Name of the volume.
        path: Mount path.
        **source: Source of the volume, such as ``configMap``.
    """
    return {"name": name, **source}, {"name": name, "mountPath": path, "readOnly": True}


def _cache(path: str, claim: str | None) -> Mounted:
    name = "model-cache"
    # DirectoryOrCreate would create a folder that only root can write, and loading the model would fail later.
    host = {"hostPath": {"path": path, "type": "Directory"}}
    source = host if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    return {"name": name, **source}, {"name": name, "mountPath": path}
