"""The ServiceAccounts of a graph: one for its routers, one for its workers.

Neither mounts a token by itself; a pod that asks the API server says so.
"""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import graph_labels
from penstock.operator.resources.metadata import metadata


def service_account(graph: GraphDeployment, suffix: str, context: BuildContext) -> dict[str, Any]:
    """Return the ServiceAccount ``GRAPH-SUFFIX``."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(graph, context, suffix, graph_labels(graph)),
        "automountServiceAccountToken": False,
    }
