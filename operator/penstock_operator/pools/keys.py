"""Names of pools and of their graphs. Pure.

A key is namespace and name. A ClusterGpuPool is cluster-scoped, so its namespace is empty, and it names its graphs as
``namespace/name``; a GpuPool names them by name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.api import ClusterGpuPool, GpuPool
from penstock.kube.kinds import CLUSTER_GPU_POOL, GPU_POOL, Kind

Key = tuple[str, str]


def is_of_cluster(key: Key) -> bool:
    """Return whether the pool with this namespace and name is a ClusterGpuPool, which has no namespace."""
    return not key[0]


def kind_of_pool(key: Key) -> Kind:
    """Return the kind of the pool with this namespace and name: ClusterGpuPool if the namespace is empty, else GpuPool."""
    return CLUSTER_GPU_POOL if is_of_cluster(key) else GPU_POOL


def member_of(pool: Key, graph: Key) -> str:
    """Return the name under which a GPU pool's status lists a graph: ``namespace/name`` in a ClusterGpuPool, else its name alone.

    Args:
        pool: Namespace (empty for a ClusterGpuPool) and name of the pool.
        graph: Namespace and name of the graph.
    """
    return (ClusterGpuPool if is_of_cluster(pool) else GpuPool).member(*graph)


def graph_of(pool: Key, member: str) -> Key:
    """Return namespace and name of the graph that a GPU pool's status lists as ``member``; the inverse of `member_of`.

    ``pool`` is the pool's namespace (empty for a ClusterGpuPool) and name.
    """
    namespace, _, name = member.rpartition("/")
    return namespace or pool[0], name


def title_of(pool: Mapping[str, Any]) -> str:
    """Return a pool's kind and name as messages show them, such as ``GpuPool team-a``."""
    key = (pool["metadata"].get("namespace", ""), pool["metadata"]["name"])
    return f"{kind_of_pool(key).kind} {key[1]}"
