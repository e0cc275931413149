"""Labels and selectors of a graph's children.

A Deployment's selector never changes, so it holds what names the service and nothing else; what changes
during a pod's life (`SERVING_LABEL`) is selected by Services alone.
"""

from __future__ import annotations

from penstock.api import GraphDeployment, Role
from penstock.kube.objects.names import (
    GRAPH_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    SERVING,
    SERVING_LABEL,
)
from penstock.runtimes import runtime_of


def graph_labels(graph: GraphDeployment) -> dict[str, str]:
    """Return the labels of a child that belongs to the whole graph."""
    return {GRAPH_LABEL: graph.name, MANAGED_BY_LABEL: MANAGED_BY}


def service_labels(graph: GraphDeployment, service: str) -> dict[str, str]:
    """Return the labels of a child that belongs to one service."""
    role = graph.spec.services[service].role.value
    return {**graph_labels(graph), SERVICE_LABEL: service, ROLE_LABEL: role}


def pod_labels(graph: GraphDeployment, service: str, *, is_addressable: bool = True) -> dict[str, str]:
    """Return the labels of a service's pods.

    Args:
        graph: The graph.
        service: Service's name.
        is_addressable: Whether the pod answers requests; a follower of a multi-node replica does not.
    """
    labels = service_labels(graph, service)
    if graph.spec.services[service].role.is_worker and is_addressable:
        labels[SERVING_LABEL] = SERVING
    return labels


def selector(graph: GraphDeployment, service: str) -> dict[str, str]:
    """Return what selects all pods of a service, serving or draining."""
    return {GRAPH_LABEL: graph.name, SERVICE_LABEL: service}


def endpoint_selector(graph: GraphDeployment, service: str) -> dict[str, str]:
    """Return what selects the pods that may get requests; a draining worker is none of them."""
    if graph.spec.services[service].role is Role.ROUTER:
        return selector(graph, service)
    return {**selector(graph, service), SERVING_LABEL: SERVING}


def slice_labels(graph: GraphDeployment, service: str) -> dict[str, str]:
    """Return the labels of a Service, which Kubernetes copies to its EndpointSlices."""
    return {**service_labels(graph, service), **runtime_of(graph.spec.runtime).cluster.service_labels}
