"""The ScalingAdapter of a service: its desired number of replicas as an object of its own."""

from __future__ import annotations

from typing import Any

from penstock.api import API_VERSION, GraphDeployment
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import service_labels
from penstock.operator.resources.metadata import metadata


def scaling_adapter(
    graph: GraphDeployment, service: str, context: BuildContext, *, replicas: int | None
) -> dict[str, Any]:
    """Return a service's ScalingAdapter.

    Args:
        graph: The graph.
        service: Service's name.
        context: Of the build.
        replicas: Number to start with; None leaves the number to whoever owns it.
    """
    spec: dict[str, Any] = {"graph": graph.name, "service": service}
    if replicas is not None:
        spec["replicas"] = replicas
    return {
        "apiVersion": API_VERSION,
        "kind": "ScalingAdapter",
        "metadata": metadata(graph, context, service, service_labels(graph, service)),
        "spec": spec,
    }
