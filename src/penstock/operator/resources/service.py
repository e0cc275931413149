"""The Service of a service.

A router's has one address for clients. A worker's is headless: nobody asks it, but Kubernetes keeps the
EndpointSlices in which routers find the workers, with this Service's labels.
"""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment
from penstock.kube.objects.names import EXT_PROC_PORT, HTTP_PORT, WORKER_PORT
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import endpoint_selector, slice_labels
from penstock.operator.resources.metadata import metadata


def service(graph: GraphDeployment, name: str, context: BuildContext) -> dict[str, Any]:
    """Return the Service of the graph's service ``name``."""
    spec: dict[str, Any] = {
        "selector": endpoint_selector(graph, name),
        "ports": [{"name": HTTP_PORT, "port": WORKER_PORT, "targetPort": HTTP_PORT, "protocol": "TCP"}],
    }
    if graph.spec.services[name].role.is_worker:
        spec["clusterIP"] = "None"
    elif graph.spec.router.gateway.enabled:
        ext_proc = {
            "name": EXT_PROC_PORT,
            "port": graph.spec.router.gateway.port,
            "targetPort": EXT_PROC_PORT,
        }
        spec["ports"].append({**ext_proc, "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(graph, context, name, slice_labels(graph, name)),
        "spec": spec,
    }
