"""Metadata of children: name, namespace, labels and the owner whose deletion takes them along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.api import API_VERSION, GraphDeployment
from penstock.kube.objects.names import child_name
from penstock.operator.resources.context import BuildContext

ROUTER_SUFFIX = "router"
"""Of the ConfigMap, ServiceAccount, Role, RoleBinding and NetworkPolicy that all routers of a graph share."""

WORKER_SUFFIX = "worker"
"""Of the ServiceAccount and NetworkPolicy that all workers of a graph share."""


def metadata(
    graph: GraphDeployment, context: BuildContext, suffix: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the metadata of the child ``GRAPH-SUFFIX``."""
    found: dict[str, Any] = {
        "name": child_name(graph.name, suffix),
        "namespace": context.namespace,
        "labels": dict(labels),
    }
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
