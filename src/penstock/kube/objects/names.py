"""Labels, annotations and names that operator, planner and router agree on in a cluster.

Pure. Everything that two of them must spell alike is here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

DOMAIN: Final = "penstock.dev"

GRAPH_LABEL: Final = f"{DOMAIN}/graph"
"""Graph's name; on every child, its pods and its EndpointSlices."""

SERVICE_LABEL: Final = f"{DOMAIN}/service"
"""Service's name within the graph; on Deployments, pods and EndpointSlices."""

ROLE_LABEL: Final = f"{DOMAIN}/role"
"""router, prefill, decode or aggregated; alongside `SERVICE_LABEL`."""

PROFILE_LABEL: Final = f"{DOMAIN}/profile"
"""ProfileRequest's name; on its children and the Job's pods, which carry no `GRAPH_LABEL` and are not workers of a graph."""

SERVING_LABEL: Final = f"{DOMAIN}/serving"
"""On pods: `SERVING` in the template; `DRAINING` takes a pod out of its Service, so routers send nothing new."""

SERVING: Final = "true"
DRAINING: Final = "draining"

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "penstock"

DRAIN_ANNOTATION: Final = f"{DOMAIN}/drain-since"
"""On a draining pod: when its drain began, RFC 3339."""

DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own: of two equal pods the one with the lower cost is deleted first."""

GPUS_ANNOTATION: Final = f"{DOMAIN}/gpus"
"""On every worker pod: GPUs that it counts against the budget, also where no device is requested (simulated)."""

SCHEME_ANNOTATION: Final = f"{DOMAIN}/scheme"
"""On workers' pods that speak another scheme than http."""

METRICS_PATH_ANNOTATION: Final = f"{DOMAIN}/metrics-path"
"""On workers' pods whose metrics are not at `METRICS_PATH`."""

APPLIED_ANNOTATION: Final = f"{DOMAIN}/applied"
"""On every child: digest of the last applied object, so that the operator notices what it no longer wants."""

DECISION_ANNOTATION: Final = f"{DOMAIN}/decision-id"
"""On a ScalingAdapter: the ledger's id of the planner's newest change to it."""

GRAPH_SECRET_VARIABLE: Final = "PENSTOCK_GRAPH_SECRET"  # noqa: S105 - a name
"""Variable of a graph's routers: the secret by which they know each other."""

CONFIG_ANNOTATION: Final = f"{DOMAIN}/config"
"""On a pod template: digest of the configuration that the pod reads once, so that a change rolls it."""

COMPONENT_LABEL: Final = f"{DOMAIN}/component"
"""On the Leases of operators and planners: ``operator`` or ``planner``."""

SCOPE_LABEL: Final = f"{DOMAIN}/scope"
"""On the chart's pods of operator and planner: the namespace that they watch, or ``cluster``."""

CLASS_LABEL: Final = f"{DOMAIN}/operator-class"
"""On the chart's pods of operator and planner, and on their Leases: the class of graphs that they work on."""

OPERATOR_CLASS: Final = "penstock"
"""Class of graphs and installations that name none."""

POD_TEMPLATES_LABEL: Final = f"{DOMAIN}/pod-templates"
"""On a namespace: the chart's ``podTemplates.profiles`` that its podTemplates may have."""
METRICS_ACCESS_LABEL: Final = f"{DOMAIN}/metrics-access"
"""On a namespace, with value `METRICS_ACCESS`: its pods (a Prometheus) may reach the workers' port."""

METRICS_ACCESS: Final = "true"

GATEWAY_ACCESS_LABEL: Final = f"{DOMAIN}/gateway-access"
"""On a namespace, with value `GATEWAY_ACCESS`: its pods (a Gateway's Envoy) may reach the workers' port."""

GATEWAY_ACCESS: Final = "true"

BUDGET_GATE: Final = f"{DOMAIN}/gpu-budget"
"""Scheduling gate of every worker pod of a graph with a GPU ceiling; the operator lifts it within the budget."""

DRAIN_FINALIZER: Final = f"{DOMAIN}/drain"
"""On a GraphDeployment (of another class than `OPERATOR_CLASS`: `drain_finalizer`): it is gone only after its requests are finished and its children deleted in order."""

RECONCILE_ANNOTATION: Final = f"{DOMAIN}/reconcile"
"""On a GraphDeployment: ``disabled`` pauses it as ``spec.paused`` does, where its specification is another tool's."""

OPERATOR: Final = "penstock-operator"
"""Field manager and event source of the operator."""

INITIAL: Final = f"{OPERATOR}-init"
"""Field manager of an adapter's first number, which belongs to the next one that scales."""

PLANNER: Final = "penstock-planner"
"""Field manager and event source of the planner."""

PROFILER: Final = "penstock-profiler"
"""Field manager of `penstock profile`."""

HTTP_PORT: Final = "http"
"""Name of the port that serves requests, on pods and Services."""

EXT_PROC_PORT: Final = "ext-proc"
"""Name of the port on which routers answer a Gateway's Envoy."""

GRAPH_FILE: Final = "/etc/penstock/graph.yaml"
"""Where router pods find the graph's manifest."""

PROFILE_GRAPH_FILE: Final = "/etc/penstock-profile/graph.yaml"
"""Where a profile Job's pod finds the graph that it measures."""

PROFILE_KEY: Final = "profile.json"
"""Key of the profile in the ConfigMap that a graph's planner.sla.profile names."""

SUMMARY_KEY: Final = "recommendation.txt"
"""Key of the recommended sizes and bounds in words, one a line."""

GRAPH_KEY: Final = "graph.yaml"
"""Key of the graph with what is recommended, ready to apply."""

API_KEYS_FOLDER: Final = "/etc/penstock-api-keys"
"""Where router pods find the Secret of accepted API keys, one file per key of the Secret."""

WORKER_TLS_FOLDER: Final = "/etc/penstock-worker-tls"
"""Where workers' pods find their certificate and its key."""

WORKER_AUTH_FOLDER: Final = "/etc/penstock-worker-auth"
"""Where router pods find the token that workers take, under its key of the workers' Secret."""

GATEWAY_TLS_FOLDER: Final = "/etc/penstock-gateway-tls"
"""Where router pods find the certificate of the endpoint picker and its key."""

TIER_KEYS_FOLDER: Final = "/etc/penstock-tier-keys"
"""Where router pods find the Secret of keys that carry tiers, likewise."""


def pool_drawn_from(graph: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a graph's status says of the GPU pool that it draws from; None: it draws from none."""
    return (graph.get("status") or {}).get("pool") or None


def paused_by(graph: Mapping[str, Any]) -> str:
    """Return what pauses a live GraphDeployment, as text; empty: nothing does."""
    if graph["spec"].get("paused"):
        return "spec.paused is true"
    if (graph["metadata"].get("annotations") or {}).get(RECONCILE_ANNOTATION) == "disabled":
        return f"annotation {RECONCILE_ANNOTATION} is disabled"
    return ""


def lease_name(
    component: str, *, cluster_wide: bool, graph: str | None = None, operator_class: str = OPERATOR_CLASS
) -> str:
    """Return the name of the Lease by which replicas of an installation (of `OPERATOR` or `PLANNER`) agree who works.

    Installations of both scopes and of several classes may live in one namespace, so they do not share one.
    """
    kind = component.removeprefix("penstock-")
    name = f"penstock-cluster-{kind}" if cluster_wide else component
    name = name if graph is None else f"{name}-{graph}"
    return name if operator_class == OPERATOR_CLASS else f"{name}.{operator_class}"


def drain_finalizer(operator_class: str) -> str:
    """Return the finalizer of graphs of a class; an operator would take another class's of the same name away."""
    return DRAIN_FINALIZER if operator_class == OPERATOR_CLASS else f"{DRAIN_FINALIZER}-{operator_class}"


def is_of_class(spec: Mapping[str, Any], operator_class: str) -> bool:
    """Return whether a GraphDeployment or ProfileRequest with this ``spec`` is of a class."""
    return bool(spec.get("operatorClass", OPERATOR_CLASS) == operator_class)


def child_name(graph: str, service: str) -> str:
    """Return the name of a service's Deployment, Service and ScalingAdapter."""
    return f"{graph}-{service}"


def profile_name(request: str) -> str:
    """Return the name of a ProfileRequest's Job, account, rights and ConfigMap of the graph to measure."""
    return f"{request}-profile"


GROUP_KEY_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-key"
"""LeaderWorkerSet's own: which group a pod belongs to."""

WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
"""LeaderWorkerSet's own: a pod's ordinal within its group; 0 is the leader."""

FINISHED_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""A pod's phases in which its containers are gone for good."""

REPLICA_FAILURE: Final = "ReplicaFailure"
"""Kubernetes' own condition of a workload whose pods the API server refuses; on ScalingAdapters it says the same."""

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
"""Reasons of waiting containers: kubernetes/pkg/kubelet/images/types.go and kuberuntime."""


def scheme_of(annotations: object) -> str:
    """Return by which scheme a pod with these annotations is reached; any other hand's word counts for nothing."""
    named = annotations.get(SCHEME_ANNOTATION) if isinstance(annotations, Mapping) else None
    return "https" if named == "https" else "http"
