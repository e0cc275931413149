"""Kinds of others that a graph needs, and what to say where the cluster does not know them.

Pure. Penstock installs none of them: an operator of LeaderWorkerSet or of a runtime brings its own definition, and two
owners of one would undo each other's.
"""

from __future__ import annotations

from typing import Final

from penstock.api import GraphSpec
from penstock.kube.kinds import Kind
from penstock.operator.plan.conditions import Failure
from penstock.operator.resources.context import BuildContext
from penstock.runtimes import runtime_of

REASON: Final = "MissingCRD"


def needs_leader_worker_set(spec: GraphSpec) -> bool:
    """Return whether a replica spans several nodes."""
    return bool(_over_nodes(spec))


def kind_of_runtime(spec: GraphSpec) -> Kind | None:
    """Return the kind of another's that the graph's runtime needs, if any."""
    return runtime_of(spec.runtime).cluster.kind


def missing_definition(
    spec: GraphSpec, context: BuildContext, *, has_kind_of_runtime: bool
) -> Failure | None:
    """Return which kind is missing and where it comes from; None if the cluster knows all that the graph needs.

    Args:
        spec: Of the graph.
        context: What kinds the cluster knows.
        has_kind_of_runtime: Whether the cluster knows `kind_of_runtime`.
    """
    kind = kind_of_runtime(spec)
    if kind is not None and not has_kind_of_runtime:
        group = kind.api_version.partition("/")[0]
        source = runtime_of(spec.runtime).cluster.kind_source
        return Failure(REASON, f"runtime {spec.runtime} needs the kind {kind.kind} of {group}, {source}")
    if needs_leader_worker_set(spec) and not context.has_leader_worker_set:
        message = (
            f"{', '.join(_over_nodes(spec))}: nodesPerReplica above 1 needs the kind LeaderWorkerSet, which this "
            "cluster does not know; install https://lws.sigs.k8s.io, or set nodesPerReplica to 1"
        )
        return Failure(REASON, message)
    if spec.router.gateway.enabled and not context.has_inference_pool:
        message = (
            "spec.router.gateway.enabled needs the kind InferencePool of inference.networking.k8s.io, which this cluster "
            "does not know; install https://gateway-api-inference-extension.sigs.k8s.io, or set it to false"
        )
        return Failure(REASON, message)
    return None


def _over_nodes(spec: GraphSpec) -> list[str]:
    return sorted(name for name, each in spec.services.items() if each.nodes_per_replica > 1)
