"""The PodDisruptionBudget of a service: an eviction takes one replica at a time.

Not ``minAvailable: 1``: with one replica that would forbid every node drain for ever, and an evicted pod
finishes its requests first anyway.
"""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import selector, service_labels
from penstock.operator.resources.metadata import metadata


def pod_disruption_budget(graph: GraphDeployment, service: str, context: BuildContext) -> dict[str, Any]:
    """Return the PodDisruptionBudget of one service."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(graph, context, service, service_labels(graph, service)),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(graph, service)},
            # A pod that never became ready serves nobody; it must not hold up a node's drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
