"""The Role of a graph's processes: find workers, read their own graph, and what their runtime needs."""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import graph_labels
from penstock.operator.resources.metadata import ROUTER_SUFFIX, metadata
from penstock.runtimes import runtime_of


def role(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the Role; an operator may only grant what it holds itself."""
    rules = [_rule("discovery.k8s.io", "endpointslices", "get", "list", "watch")]
    # Its live page shows what planner and operator say of the graph.
    rules.append({**_rule("penstock.dev", "graphdeployments", "get"), "resourceNames": [graph.name]})
    own = runtime_of(graph.spec.runtime).cluster.verbs
    rules += [_rule(group, resource, *verbs) for (group, resource), verbs in own.items()]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(graph, context, ROUTER_SUFFIX, graph_labels(graph)),
        "rules": rules,
    }


def _rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
