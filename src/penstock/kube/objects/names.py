"""Labels, annotations and names that operator, planner and router share in a cluster.

Pure. Every name that two of them must spell alike is defined only here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

DOMAIN: Final = "penstock.dev"

GRAPH_LABEL: Final = f"{DOMAIN}/graph"
"""Label with the graph's name; on every child, its pods and its EndpointSlices."""

SERVICE_LABEL: Final = f"{DOMAIN}/service"
"""Label with the service's name in the graph; on workloads, pods and EndpointSlices."""

ROLE_LABEL: Final = f"{DOMAIN}/role"
"""Label with the role: router, prefill, decode or aggregated; on the same objects as `SERVICE_LABEL`."""

PROFILE_LABEL: Final = f"{DOMAIN}/profile"
"""Label with the ProfileRequest's name; on its children and its Job's pods. These have no `GRAPH_LABEL` and are not
workers of a graph."""

SERVING_LABEL: Final = f"{DOMAIN}/serving"
"""Label on pods: `SERVING` in the template. `DRAINING` removes a pod from its Service, so that routers send it no new
requests."""

SERVING: Final = "true"
DRAINING: Final = "draining"

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "penstock"

DRAIN_ANNOTATION: Final = f"{DOMAIN}/drain-since"
"""Annotation on a draining pod: time at which its drain began, RFC 3339."""

DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own annotation: of two otherwise equal pods, the one with the lower cost is deleted first."""

GPUS_ANNOTATION: Final = f"{DOMAIN}/gpus"
"""Annotation on every worker pod: number of GPUs that it counts against the budget, even if it requests no device
(simulated workers)."""

SCHEME_ANNOTATION: Final = f"{DOMAIN}/scheme"
"""Annotation on worker pods whose HTTP endpoints use another scheme than http."""

METRICS_PATH_ANNOTATION: Final = f"{DOMAIN}/metrics-path"
"""Annotation on worker pods whose metrics are not at `METRICS_PATH`."""

APPLIED_ANNOTATION: Final = f"{DOMAIN}/applied"
"""Annotation on every child: digest of the last applied object, with which the operator detects fields that it no
longer desires."""

DECISION_ANNOTATION: Final = f"{DOMAIN}/decision-id"
"""Annotation on a ScalingAdapter: ID, in the planner's decision log (ledger), of the planner's newest change to it."""

GRAPH_SECRET_VARIABLE: Final = "PENSTOCK_GRAPH_SECRET"  # noqa: S105 - a name
"""Environment variable of a graph's routers with the secret by which they authenticate each other."""

CONFIG_ANNOTATION: Final = f"{DOMAIN}/config"
"""Annotation on a pod template: digest of the configuration that the pod reads only at its start, so that a change
restarts the pods."""

COMPONENT_LABEL: Final = f"{DOMAIN}/component"
"""Label on the Leases of operators and planners: ``operator`` or ``planner``."""

SCOPE_LABEL: Final = f"{DOMAIN}/scope"
"""Label on the chart's operator and planner pods: the namespace that they watch, or ``cluster``."""

CLASS_LABEL: Final = f"{DOMAIN}/operator-class"
"""Label on the chart's operator and planner pods and on their Leases: the operator class of the graphs that they
handle."""

OPERATOR_CLASS: Final = "penstock"
"""Operator class of graphs and installations that name none."""

POD_TEMPLATES_LABEL: Final = f"{DOMAIN}/pod-templates"
"""Label on a namespace: name of the profile in the chart's ``podTemplates.profiles`` that its podTemplates can use."""
METRICS_ACCESS_LABEL: Final = f"{DOMAIN}/metrics-access"
"""Label on a namespace; with value `METRICS_ACCESS`, its pods (a Prometheus) can reach the workers' port."""

METRICS_ACCESS: Final = "true"

GATEWAY_ACCESS_LABEL: Final = f"{DOMAIN}/gateway-access"
"""Label on a namespace; with value `GATEWAY_ACCESS`, its pods (a Gateway's Envoy) can reach the workers' port."""

GATEWAY_ACCESS: Final = "true"

BUDGET_GATE: Final = f"{DOMAIN}/gpu-budget"
"""Scheduling gate of every worker pod of a graph with a GPU budget; the operator removes it within the budget."""

DRAIN_FINALIZER: Final = f"{DOMAIN}/drain"
"""Finalizer on a GraphDeployment of `OPERATOR_CLASS` (for other classes see `drain_finalizer`). The graph is deleted
only after its requests have finished and its children have been deleted in order."""

RECONCILE_ANNOTATION: Final = f"{DOMAIN}/reconcile"
"""Annotation on a GraphDeployment: ``disabled`` pauses it as ``spec.paused`` does, for graphs whose specification
belongs to another tool."""

OPERATOR: Final = "penstock-operator"
"""Field manager and event source of the operator."""

INITIAL: Final = f"{OPERATOR}-init"
"""Field manager of an adapter's initial number of replicas, which the next writer that scales takes over."""

PLANNER: Final = "penstock-planner"
"""Field manager and event source of the planner."""

PROFILER: Final = "penstock-profiler"
"""Field manager of `penstock profile`."""

HTTP_PORT: Final = "http"
"""Name of the port that serves requests, on pods and Services."""

EXT_PROC_PORT: Final = "ext-proc"
"""Name of the port on which routers serve a Gateway's Envoy."""

GRAPH_FILE: Final = "/etc/penstock/graph.yaml"
"""Path of the graph's manifest in router pods."""

PROFILE_GRAPH_FILE: Final = "/etc/penstock-profile/graph.yaml"
"""Path of the graph to measure in a profile Job's pod."""

PROFILE_KEY: Final = "profile.json"
"""Key of the profile in the ConfigMap that a graph's planner.sla.profile names."""

SUMMARY_KEY: Final = "recommendation.txt"
"""Key of the recommended sizes and bounds as text, one per line."""

GRAPH_KEY: Final = "graph.yaml"
"""Key of the recommended graph, ready to apply."""

API_KEYS_FOLDER: Final = "/etc/penstock-api-keys"
"""Folder in router pods with the Secret of accepted API keys, one file per key of the Secret."""

WORKER_TLS_FOLDER: Final = "/etc/penstock-worker-tls"
"""Folder in worker pods with their certificate and its private key."""

WORKER_AUTH_FOLDER: Final = "/etc/penstock-worker-auth"
"""Folder in router pods with the token that workers accept, in a file named as its key in the workers' Secret."""

GATEWAY_TLS_FOLDER: Final = "/etc/penstock-gateway-tls"
"""Folder in router pods with the certificate of the endpoint picker and its private key."""

TIER_KEYS_FOLDER: Final = "/etc/penstock-tier-keys"
"""Folder in router pods with the Secret of API keys that select tiers, one file per key of the Secret."""


def status_pool(graph: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return ``status.pool`` of a graph, which describes its GPU pool; None if it is in no pool."""
    return (graph.get("status") or {}).get("pool") or None


def paused_by(graph: Mapping[str, Any]) -> str:
    """Return the reason why a live GraphDeployment is paused, as text; empty if it is not paused."""
    if graph["spec"].get("paused"):
        return "spec.paused is true"
    if (graph["metadata"].get("annotations") or {}).get(RECONCILE_ANNOTATION) == "disabled":
        return f"annotation {RECONCILE_ANNOTATION} is disabled"
    return ""


def lease_name(
    component: str, *, cluster_wide: bool, graph: str | None = None, operator_class: str = OPERATOR_CLASS
) -> str:
    """Return the name of the Lease with which the replicas of an installation elect their leader.

    Installations of different scope or operator class can be in one namespace, so each has its own name.

    Args:
        component: `OPERATOR` or `PLANNER`.
        cluster_wide: Whether the installation watches all namespaces.
        graph: Name of the only graph that it handles; None if it handles all.
        operator_class: Operator class of the installation.
    """
    kind = component.removeprefix("penstock-")
    name = f"penstock-cluster-{kind}" if cluster_wide else component
    name = name if graph is None else f"{name}-{graph}"
    return name if operator_class == OPERATOR_CLASS else f"{name}.{operator_class}"


def drain_finalizer(operator_class: str) -> str:
    """Return the finalizer of graphs of an operator class; it differs by class, so that no operator removes another one's."""
    return DRAIN_FINALIZER if operator_class == OPERATOR_CLASS else f"{DRAIN_FINALIZER}-{operator_class}"


def is_of_class(spec: Mapping[str, Any], operator_class: str) -> bool:
    """Return whether a GraphDeployment or ProfileRequest with this ``spec`` belongs to an operator class."""
    return bool(spec.get("operatorClass", OPERATOR_CLASS) == operator_class)


def child_name(graph: str, service: str) -> str:
    """Return the name of the Deployment, Service and ScalingAdapter of a graph's service."""
    return f"{graph}-{service}"


def profile_name(request: str) -> str:
    """Return the name that Job, ServiceAccount, Role, RoleBinding and the ConfigMap with the graph to measure have for a ProfileRequest."""
    return f"{request}-profile"


GROUP_KEY_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-key"
"""LeaderWorkerSet's own label: key of the group that a pod belongs to."""

WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
"""LeaderWorkerSet's own label: ordinal of a pod in its group; 0 is the leader."""

FINISHED_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod whose containers will not run again."""

REPLICA_FAILURE: Final = "ReplicaFailure"
"""Kubernetes' own condition of a workload whose pods the API server rejects; ScalingAdapters have the same condition."""

CRASH_LOOP: Final = "CrashLoopBackOff"

PULL_REASONS: Final = frozenset(
    {
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
CONFIG_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""Reasons of containers that cannot be created; ``PULL_REASONS`` are those of images that cannot be pulled. Source:
kubernetes/pkg/kubelet/images/types.go and kuberuntime."""


def scheme_of(annotations: object) -> str:
    """Return the HTTP scheme of a pod with these annotations: ``https`` if they name it, else ``http``."""
    named = annotations.get(SCHEME_ANNOTATION) if isinstance(annotations, Mapping) else None
    return "https" if named == "https" else "http"
