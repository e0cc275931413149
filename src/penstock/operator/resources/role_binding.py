"""The RoleBinding that gives a graph's Role to its routers, and to workers whose runtime asks the API server."""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment
from penstock.kube.objects.names import child_name
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import graph_labels
from penstock.operator.resources.metadata import ROUTER_SUFFIX, WORKER_SUFFIX, metadata
from penstock.runtimes import runtime_of

_GROUP = "rbac.authorization.k8s.io"


def role_binding(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the RoleBinding."""
    has_own_verbs = bool(runtime_of(graph.spec.runtime).cluster.verbs)
    accounts = (ROUTER_SUFFIX, WORKER_SUFFIX) if has_own_verbs else (ROUTER_SUFFIX,)
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(graph, context, ROUTER_SUFFIX, graph_labels(graph)),
        "roleRef": {"apiGroup": _GROUP, "kind": "Role", "name": child_name(graph.name, ROUTER_SUFFIX)},
        "subjects": [
            {
                "kind": "ServiceAccount",
                "name": child_name(graph.name, suffix),
                "namespace": context.namespace,
            }
            for suffix in accounts
        ],
    }
