"""The InferencePool by which a Gateway knows a graph's workers and asks its router which of them to choose."""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment, Role
from penstock.kube.kinds import INFERENCE_POOL, SERVICE
from penstock.kube.objects.names import (
    GRAPH_LABEL,
    ROLE_LABEL,
    SERVING,
    SERVING_LABEL,
    WORKER_PORT,
    child_name,
)
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import graph_labels
from penstock.operator.resources.metadata import POOL_SUFFIX, metadata


def inference_pool(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the InferencePool of a graph that has a router.

    Its members are the workers that answer: the router calls prefill workers itself.
    """
    gateway, services = graph.spec.router.gateway, graph.spec.services
    role = Role.DECODE if graph.spec.is_disaggregated else Role.AGGREGATED
    router = min(name for name, each in services.items() if each.role is Role.ROUTER)
    return {
        "apiVersion": INFERENCE_POOL.api_version,
        "kind": INFERENCE_POOL.kind,
        "metadata": metadata(graph, context, POOL_SUFFIX, graph_labels(graph)),
        "spec": {
            "selector": {
                "matchLabels": {GRAPH_LABEL: graph.name, ROLE_LABEL: role.value, SERVING_LABEL: SERVING}
            },
            "targetPorts": [{"number": WORKER_PORT}],
            "endpointPickerRef": {
                "group": "",
                "kind": SERVICE.kind,
                "name": child_name(graph.name, router),
                "port": {"number": gateway.port},
                "failureMode": gateway.failure_mode.value,
            },
        },
    }
