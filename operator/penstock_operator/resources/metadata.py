"""What every child of a graph carries: where it lives, its labels and selectors, and its owner.

A Deployment's selector never changes, so it holds what names the service and nothing else; what changes
during a pod's life (`SERVING_LABEL`) is selected by Services alone, and Kubernetes' recommended labels, which
other tools read, by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final

from penstock.api import API_VERSION, GraphDeployment, GraphSpec, ProfileRequest
from penstock.kube.kinds import INFERENCE_POOL, LEADER_WORKER_SET, Kind
from penstock.kube.objects.names import (
    GRAPH_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    child_name,
)
from penstock.runtimes import runtime_of
from penstock_operator.resources.accelerators import GPU_RESOURCES
from penstock_operator.resources.allowances import NOTHING, Allowances


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Where children live and what the cluster offers; the same for every child of a graph.

    Attributes:
        owner_uid: UID of the GraphDeployment; empty: children without an owner, for reading only.
        operator_namespace: Namespace of operator and planner, which may scrape workers; None: the graph's own.
        penstock_image: Image of routers and simulated workers whose graph names none; None: the release's.
        image_pull_policy: Always, IfNotPresent or Never.
        allowed: What a podTemplate may add to the restricted standard, see `resources.privileges`.
        gpu_resources: Names, or patterns, of the resources that are GPUs.
        claimed_gpus: GPUs that a claim of each ResourceClaimTemplate holds; without those that are unknown.
        is_ipv6: Whether the pods' own addresses are of IPv6, the first ones where they have both.
        ip_family_policy: ``spec.ipFamilyPolicy`` of Services; empty: the cluster's default.
        kinds: Kinds of others' definitions that the graph needs and the cluster serves.
        in_pool: The graph draws from a GPU pool, whose grant bounds it where it states no budget itself.
        labels: Labels of the graph that its children carry too; pods do not, which a changed one would roll.
        annotations: Annotations of the graph, likewise.
    """

    owner_uid: str
    namespace: str
    operator_namespace: str | None = None
    penstock_image: str | None = None
    image_pull_policy: str = "IfNotPresent"
    allowed: Allowances = NOTHING
    gpu_resources: tuple[str, ...] = GPU_RESOURCES
    claimed_gpus: Mapping[str, int] = field(default_factory=dict)
    is_ipv6: bool = False
    ip_family_policy: str = ""
    kinds: frozenset[Kind] = frozenset()
    in_pool: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


ROUTER_SUFFIX: Final = "router"
"""Suffix of the ConfigMap, ServiceAccount, Role, RoleBinding and NetworkPolicy that all routers of a graph share."""

POOL_SUFFIX: Final = "pool"
"""Suffix of the InferencePool."""

WORKER_SUFFIX: Final = "worker"
"""Suffix of the ServiceAccount and NetworkPolicy that all workers of a graph share."""

_RECOMMENDED: Final = "app.kubernetes.io"
_APPLICATION: Final = "penstock-graph"
"""Not the runtime's name: a chart of that name selects its pods by it."""
_RELEASE: Final = version("penstock").replace("+", "_")

_OTHERS: Final = ("*kubernetes.io", "*.k8s.io", "penstock.dev", "*helm.sh", "*argoproj.io", "*fluxcd.io")
"""Domains of keys that stay with the graph: tools find their own objects by them, and would prune the children."""


def needed_kinds(spec: GraphSpec) -> dict[Kind, str]:
    """Return the kinds of others' definitions that a graph needs, each with what to say where the cluster lacks it."""
    found: dict[Kind, str] = {}
    cluster = runtime_of(spec.runtime).cluster
    if cluster.kind is not None:
        kind = f"{cluster.kind.kind} of {cluster.kind.group}"
        found[cluster.kind] = f"runtime {spec.runtime} needs the kind {kind}, {cluster.kind_source}"
    over_nodes = sorted(name for name, each in spec.services.items() if each.nodes_per_replica > 1)
    if over_nodes:
        found[LEADER_WORKER_SET] = (
            f"{', '.join(over_nodes)}: nodesPerReplica above 1 needs the kind LeaderWorkerSet, which this "
            "cluster does not know; install https://lws.sigs.k8s.io, or set nodesPerReplica to 1"
        )
    if spec.router.gateway.enabled:
        found[INFERENCE_POOL] = (
            "spec.router.gateway.enabled needs the kind InferencePool of inference.networking.k8s.io, which this cluster "
            "does not know; install https://gateway-api-inference-extension.sigs.k8s.io, or set it to false"
        )
    return found


def recommended_labels(instance: str, component: str) -> dict[str, str]:
    """Return Kubernetes' recommended labels, which no later release changes, of a component of a named object."""
    names = {"name": _APPLICATION, "instance": instance, "component": component, "part-of": MANAGED_BY}
    return {f"{_RECOMMENDED}/{key}": value for key, value in names.items()}


def release_label() -> dict[str, str]:
    """Return the release that wrote an object; on no pod template, where each release would roll the workers."""
    return {f"{_RECOMMENDED}/version": _RELEASE}


def inherit(context: BuildContext, metadata: Mapping[str, Any], annotations: Iterable[str]) -> BuildContext:
    """Return a context with the labels of a graph's metadata, and the annotations of these keys, for its children."""
    chosen = set(annotations)
    labels, others = metadata.get("labels") or {}, metadata.get("annotations") or {}
    return replace(
        context,
        labels={key: value for key, value in labels.items() if not _is_others(key)},
        annotations={k: value for k, value in others.items() if k in chosen and not _is_others(k)},
    )


def _is_others(key: str) -> bool:
    domain, slash, _ = key.partition("/")
    return bool(slash) and any(fnmatchcase(domain, each) for each in _OTHERS)


def service_labels(graph: GraphDeployment, service: str) -> dict[str, str]:
    """Return the labels that Penstock reads of a child or a pod of one service."""
    role = graph.spec.services[service].role.value
    return {**_graph_labels(graph), SERVICE_LABEL: service, ROLE_LABEL: role}


def selector(graph: GraphDeployment, service: str) -> dict[str, str]:
    """Return what selects all pods of a service, serving or draining."""
    return {GRAPH_LABEL: graph.name, SERVICE_LABEL: service}


def graph_child(
    kind: Kind, graph: GraphDeployment, context: BuildContext, suffix: str, **fields: Any
) -> dict[str, Any]:
    """Return the child ``GRAPH-SUFFIX``, which belongs to the entire graph."""
    return kind.of(_metadata(graph, context, suffix, _graph_labels(graph), component=suffix), **fields)


def service_child(
    kind: Kind,
    graph: GraphDeployment,
    service: str,
    context: BuildContext,
    *,
    more_labels: Mapping[str, str] = MappingProxyType({}),
    **fields: Any,
) -> dict[str, Any]:
    """Return the child ``GRAPH-SERVICE``, which belongs to one service."""
    labels = {**service_labels(graph, service), **more_labels}
    return kind.of(_metadata(graph, context, service, labels, component=labels[ROLE_LABEL]), **fields)


def owned_by(owner: GraphDeployment | ProfileRequest, context: BuildContext) -> dict[str, Any]:
    """Return the part of a child's metadata by which it goes with its owner; empty in a build for reading only."""
    reference = {
        "apiVersion": API_VERSION,
        "kind": owner.kind,
        "name": owner.name,
        "uid": context.owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"ownerReferences": [reference]} if context.owner_uid else {}


def _graph_labels(graph: GraphDeployment) -> dict[str, str]:
    return {GRAPH_LABEL: graph.name, MANAGED_BY_LABEL: MANAGED_BY}


def _metadata(
    graph: GraphDeployment, context: BuildContext, suffix: str, labels: Mapping[str, str], *, component: str
) -> dict[str, Any]:
    described = {**recommended_labels(graph.name, component), **release_label()}
    return {
        "name": child_name(graph.name, suffix),
        "namespace": context.namespace,
        "labels": {**context.labels, **described, **labels},
        **({"annotations": dict(context.annotations)} if context.annotations else {}),
        **owned_by(graph, context),
    }
