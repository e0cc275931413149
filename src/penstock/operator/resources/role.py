"""The Role of a graph's processes: find workers, and under Dynamo register as one."""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment, Runtime
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import graph_labels
from penstock.operator.resources.metadata import ROUTER_SUFFIX, metadata


def role(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the Role; an operator may only grant what it holds itself."""
    rules = [_rule("discovery.k8s.io", "endpointslices", "get", "list", "watch")]
    if graph.spec.runtime is Runtime.DYNAMO:
        # Each pod applies its own object, server-side, and watches those of the others; its owner's end removes it.
        rules.append(_rule("nvidia.com", "dynamoworkermetadatas", "create", "get", "list", "patch", "watch"))
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(graph, context, ROUTER_SUFFIX, graph_labels(graph)),
        "rules": rules,
    }


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
