"""Metadata that every child of a graph has: namespace, labels, selectors and owner.

A Deployment's selector never changes, so it contains only labels that identify the service. `SERVING_LABEL`, which
changes during a pod's life, is used only by the selectors of Services. Kubernetes' recommended labels, which other
tools read, are used by no selector.
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
    """Settings from which a graph's objects (its children) are built: namespace, cluster, and the operator's options.

    Attributes:
        owner_uid: UID of the GraphDeployment; empty builds children without an owner, for display only.
        namespace: Namespace of the children.
        operator_namespace: Namespace of operator and planner, whose pods are allowed to scrape the metrics of workers;
            None means the graph's own.
        penstock_image: Image of routers and simulated workers for graphs that name none; None means the release's
            image.
        image_pull_policy: Always, IfNotPresent or Never.
        allowed: Privileges that a podTemplate can use beyond the restricted Pod Security Standard of Kubernetes.
        gpu_resources: Names, or patterns, of the resources that count as GPUs.
        claimed_gpus: Number of GPUs per claim, by ResourceClaimTemplate; unknown ones are absent.
        is_ipv6: Whether the pods' primary addresses are IPv6.
        ip_family_policy: ``spec.ipFamilyPolicy`` of Services; empty means the cluster's default.
        kinds: Kinds from other projects' CustomResourceDefinitions that the graph needs and the cluster serves.
        in_pool: Whether the graph takes its GPUs from a GPU pool, whose grant limits it even if the graph has no budget
            itself.
        labels: Labels of the graph that are copied to its children, but not to its pods, since a changed label would
            restart the pods.
        annotations: Annotations of the graph that are copied to its children, but not to its pods.
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
"""Name suffix of the ConfigMap, ServiceAccount, Role, RoleBinding and NetworkPolicy that all routers of a graph
share."""

POOL_SUFFIX: Final = "pool"
"""Suffix of the InferencePool's name."""

WORKER_SUFFIX: Final = "worker"
"""Name suffix of the ServiceAccount and NetworkPolicy that all workers of a graph share."""

_RECOMMENDED: Final = "app.kubernetes.io"
_APPLICATION: Final = "penstock-graph"
"""Value of the label app.kubernetes.io/name. It differs from the runtime's name, because a chart of that name selects
its own pods by it."""
_RELEASE: Final = version("penstock").replace("+", "_")

_OTHERS: Final = ("*kubernetes.io", "*.k8s.io", "penstock.dev", "*helm.sh", "*argoproj.io", "*fluxcd.io")
"""Domains of label and annotation keys that are not copied to children: tools recognise their own objects by them and
would delete the children."""


def needed_kinds(spec: GraphSpec) -> dict[Kind, str]:
    """Return the kinds from other projects that a graph needs, each with the message to show if the cluster does not serve it."""
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
    """Return Kubernetes' recommended labels for a component of the object named ``instance``; the labels do not change with the release."""
    names = {"name": _APPLICATION, "instance": instance, "component": component, "part-of": MANAGED_BY}
    return {f"{_RECOMMENDED}/{key}": value for key, value in names.items()}


def release_label() -> dict[str, str]:
    """Return the label with Penstock's release, which is on every object that Penstock writes.

    Pod templates do not have the label, since each release would restart the workers.
    """
    return {f"{_RECOMMENDED}/version": _RELEASE}


def inherit(context: BuildContext, metadata: Mapping[str, Any], annotations: Iterable[str]) -> BuildContext:
    """Return a copy of the build settings ``context``, so that objects built from it get the graph's labels and some of its annotations.

    Args:
        context: Settings from which the graph's objects are built.
        metadata: Metadata of the GraphDeployment.
        annotations: Keys of the annotations to copy. Labels and annotations by which other tools recognise their own
            objects are never copied.
    """
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
    """Return the labels by which Penstock itself finds the objects and pods of a service (graph, service, role)."""
    role = graph.spec.services[service].role.value
    return {**_graph_labels(graph), SERVICE_LABEL: service, ROLE_LABEL: role}


def selector(graph: GraphDeployment, service: str) -> dict[str, str]:
    """Return the labels by which a selector finds all pods of a graph's service, whether they serve or drain."""
    return {GRAPH_LABEL: graph.name, SERVICE_LABEL: service}


def graph_child(
    kind: Kind, graph: GraphDeployment, context: BuildContext, suffix: str, **fields: Any
) -> dict[str, Any]:
    """Return an object named ``GRAPH-SUFFIX``, owned by the graph, that belongs to the entire graph and not to one service.

    Args:
        kind: Kind of the object.
        graph: The graph.
        context: Settings from which the objects are built.
        suffix: Suffix of the name; also the component label.
        **fields: Other top-level fields of the object, such as ``spec``.
    """
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
    """Return an object named ``GRAPH-SERVICE``, owned by the graph, that belongs to one service.

    Args:
        kind: Kind of the object.
        graph: The graph.
        service: Name of the service.
        context: Settings from which the objects are built.
        more_labels: Additional labels.
        **fields: Other top-level fields of the object, such as ``spec``.
    """
    labels = {**service_labels(graph, service), **more_labels}
    return kind.of(_metadata(graph, context, service, labels, component=labels[ROLE_LABEL]), **fields)


def owned_by(owner: GraphDeployment | ProfileRequest, context: BuildContext) -> dict[str, Any]:
    """Return ``{"ownerReferences": [...]}`` for the metadata of a child, so that Kubernetes deletes the child with its owner.

    Returns an empty dictionary if the context has no UID of the owner. ``owner`` must be the object that the UID
    belongs to.
    """
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
