"""Kinds of others that a graph needs, and what to say where the cluster does not know them.

Pure. Penstock installs neither: an operator of LeaderWorkerSet or of Dynamo brings its own definition, and two owners
of one would undo each other's.
"""

from __future__ import annotations

from typing import Final

from penstock.api import GraphSpec, Runtime
from penstock.operator.plan.conditions import Failure

REASON: Final = "MissingCRD"


def needs_leader_worker_set(spec: GraphSpec) -> bool:
    """Return whether a replica spans several nodes."""
    return bool(_over_nodes(spec))


def needs_dynamo_discovery(spec: GraphSpec) -> bool:
    """Return whether the graph's processes find each other by objects of Dynamo's kind."""
    return spec.runtime is Runtime.DYNAMO


def missing_definition(
    spec: GraphSpec, *, has_leader_worker_set: bool, has_dynamo_discovery: bool
) -> Failure | None:
    """Return which kind is missing and where it comes from; None if the cluster knows all that the graph needs.

    Args:
        spec: Of the graph.
        has_leader_worker_set: Whether the cluster knows LeaderWorkerSet.
        has_dynamo_discovery: Whether the cluster knows DynamoWorkerMetadata.
    """
    if needs_dynamo_discovery(spec) and not has_dynamo_discovery:
        message = (
            "runtime dynamo needs the kind DynamoWorkerMetadata of nvidia.com, in which workers register, and this "
            "cluster does not know it; install Dynamo's CustomResourceDefinitions, or create "
            "manifests/dynamo-discovery.yaml"
        )
        return Failure(REASON, message)
    if needs_leader_worker_set(spec) and not has_leader_worker_set:
        message = (
            f"{', '.join(_over_nodes(spec))}: nodesPerReplica above 1 needs the kind LeaderWorkerSet, which this "
            "cluster does not know; install https://lws.sigs.k8s.io, or set nodesPerReplica to 1"
        )
        return Failure(REASON, message)
    return None


def _over_nodes(spec: GraphSpec) -> list[str]:
    return sorted(name for name, each in spec.services.items() if each.nodes_per_replica > 1)
