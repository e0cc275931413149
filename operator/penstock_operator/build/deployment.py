"""The Deployment of a service whose replicas are one pod each."""

from __future__ import annotations

import math
from typing import Any

from penstock_graph.models import GraphDeployment
from penstock_graph.runtimes import ProcessSpec
from penstock_operator.build.context import BuildContext
from penstock_operator.build.labels import selector, service_labels
from penstock_operator.build.metadata import metadata
from penstock_operator.build.pod import pod_template

_SLACK_S = 60
"""Beyond leaving and loading, for the scheduler and the image; chosen."""


def deployment(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, surge: bool
) -> dict[str, Any]:
    """Return a service's Deployment.

    Args:
        graph: The graph.
        spec: The service's process.
        context: Of the build.
        replicas: Number to write.
        surge: Whether a rollout may start a new pod before it ends an old one; needs room in the budget.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(graph, context, spec.service, service_labels(graph, spec.service)),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 3,
            "progressDeadlineSeconds": math.ceil(spec.grace_s + spec.startup_s) + _SLACK_S,
            "selector": {"matchLabels": selector(graph, spec.service)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rollout(surge=surge)},
            "template": pod_template(graph, spec, context),
        },
    }


def rollout(*, surge: bool) -> dict[str, int]:
    """Return how many replicas a rollout may add and take; one at a time keeps the pools' proportions."""
    return {"maxSurge": 1, "maxUnavailable": 0} if surge else {"maxSurge": 0, "maxUnavailable": 1}
