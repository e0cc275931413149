"""The Deployment of a service whose replicas are one pod each."""

from __future__ import annotations

import math
from typing import Any

from penstock.api import GraphDeployment
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import selector, service_labels
from penstock.operator.resources.metadata import metadata
from penstock.operator.resources.pod import pod_template
from penstock.runtimes import ProcessSpec

_SLACK_S = 60
"""Beyond leaving and loading, for the scheduler and the image; chosen."""


def deployment(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, unavailable: int
) -> dict[str, Any]:
    """Return a service's Deployment.

    Args:
        graph: The graph.
        spec: The service's process.
        context: Of the build.
        replicas: Number to write.
        unavailable: Replicas that a rollout may take away at once; 0: it starts a new pod before it ends an old
            one, which needs room in the budget.
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
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rollout(unavailable)},
            "template": pod_template(graph, spec, context),
        },
    }


def rollout(unavailable: int) -> dict[str, int]:
    """Return how many replicas a rollout may add and take; one at a time keeps the pools' proportions."""
    return {"maxSurge": 0 if unavailable else 1, "maxUnavailable": unavailable}
