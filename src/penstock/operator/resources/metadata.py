"""Metadata of children: name, namespace, labels and the owner whose deletion takes them along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.api import API_VERSION, GraphDeployment
from penstock.kube.objects.names import ROLE_LABEL, child_name
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import recommended_labels, release_label

ROUTER_SUFFIX = "router"
"""Of the ConfigMap, ServiceAccount, Role, RoleBinding and NetworkPolicy that all routers of a graph share."""

POOL_SUFFIX = "pool"
"""Of the InferencePool."""

WORKER_SUFFIX = "worker"
"""Of the ServiceAccount and NetworkPolicy that all workers of a graph share."""


def metadata(
    graph: GraphDeployment, context: BuildContext, suffix: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the metadata of the child ``GRAPH-SUFFIX``; ``labels`` are those that Penstock reads."""
    described = {**recommended_labels(graph.name, labels.get(ROLE_LABEL, suffix)), **release_label()}
    found: dict[str, Any] = {
        "name": child_name(graph.name, suffix),
        "namespace": context.namespace,
        "labels": {**context.labels, **described, **labels},
    }
    if context.annotations:
        found["annotations"] = dict(context.annotations)
    if context.owner_uid:
        found["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": graph.kind,
                "name": graph.name,
                "uid": context.owner_uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return found
