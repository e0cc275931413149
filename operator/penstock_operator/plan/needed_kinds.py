"""Which kinds of others' definitions a graph needs, and which of them a cluster lacks. Pure."""

from __future__ import annotations

from collections.abc import Collection

from penstock.api import GraphSpec
from penstock.kube.kinds import INFERENCE_POOL, LEADER_WORKER_SET, Kind
from penstock.runtimes import runtime_of
from penstock_operator.plan.status_input import Failure


def needed_kinds(spec: GraphSpec) -> dict[Kind, str]:
    """Return the kinds of others' definitions that a graph needs, each with what to say where the cluster lacks it."""
    found: dict[Kind, str] = {}
    cluster = runtime_of(spec.runtime).cluster
    if cluster.kind is not None:
        kind = f"{cluster.kind.kind} of {cluster.kind.group}"
        found[cluster.kind] = f"runtime {spec.runtime} needs the kind {kind}, {cluster.kind_source}"
    over_nodes = sorted(name for name, each in spec.services.items() if each.nodes_per_replica > 1)
    if over_nodes:
        found[LEADER_WORKER_SET] = (
            f"{', '.join(over_nodes)}: nodesPerReplica above 1 needs the kind LeaderWorkerSet, which this "
            "cluster does not know; install https://lws.sigs.k8s.io, or set nodesPerReplica to 1"
        )
    if spec.router.gateway.enabled:
        found[INFERENCE_POOL] = (
            "spec.router.gateway.enabled needs the kind InferencePool of inference.networking.k8s.io, which this cluster "
            "does not know; install https://gateway-api-inference-extension.sigs.k8s.io, or set it to false"
        )
    return found


def missing_definition(spec: GraphSpec, served: Collection[Kind]) -> Failure | None:
    """Return the first needed kind that the cluster does not serve, and its source; None if it serves all."""
    missing = (message for kind, message in needed_kinds(spec).items() if kind not in served)
    return next((Failure("MissingCRD", message) for message in missing), None)
