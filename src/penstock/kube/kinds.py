"""Kinds of Kubernetes objects that Penstock reads or writes, and their paths on the API server. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from penstock.core.errors import InvalidObjectError


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object.

    Attributes:
        api_version: Group and version, such as ``apps/v1``; ``v1`` for the core group.
        kind: Name of the kind in manifests.
        plural: Name of the kind in paths.
        namespaced: Whether its objects are in namespaces.
    """

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """API group of the kind; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def of(self, metadata: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Return an object of this kind with the metadata and other top-level fields."""
        return {"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata, **fields}

    def path(
        self, namespace: str | None = None, name: str | None = None, *, subresource: str | None = None
    ) -> str:
        """Return the API path of the collection, of one object or of its subresource.

        Args:
            namespace: Namespace; None means all. Ignored for cluster-scoped kinds.
            name: Name of the object; None means the collection.
            subresource: Subresource of the object, such as ``status`` or ``scale``; None means the object.
        """
        base = "/apis/" if "/" in self.api_version else "/api/"
        parts = [base + self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
            if subresource is not None:
                parts.append(subresource)
        return "/".join(parts)


GPU_POOL: Final = Kind("penstock.dev/v1alpha1", "GpuPool", "gpupools")
CLUSTER_GPU_POOL: Final = Kind("penstock.dev/v1alpha1", "ClusterGpuPool", "clustergpupools", namespaced=False)
GRAPH_DEPLOYMENT: Final = Kind("penstock.dev/v1alpha1", "GraphDeployment", "graphdeployments")
SCALING_ADAPTER: Final = Kind("penstock.dev/v1alpha1", "ScalingAdapter", "scalingadapters")
PROFILE_REQUEST: Final = Kind("penstock.dev/v1alpha1", "ProfileRequest", "profilerequests")
DEPLOYMENT: Final = Kind("apps/v1", "Deployment", "deployments")
LEADER_WORKER_SET: Final = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
INFERENCE_POOL: Final = Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
JOB: Final = Kind("batch/v1", "Job", "jobs")
POD: Final = Kind("v1", "Pod", "pods")
SERVICE: Final = Kind("v1", "Service", "services")
ENDPOINT_SLICE: Final = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
CONFIG_MAP: Final = Kind("v1", "ConfigMap", "configmaps")
SECRET: Final = Kind("v1", "Secret", "secrets")
SERVICE_ACCOUNT: Final = Kind("v1", "ServiceAccount", "serviceaccounts")
RESOURCE_CLAIM_TEMPLATE: Final = Kind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates")
NODE: Final = Kind("v1", "Node", "nodes", namespaced=False)
NAMESPACE: Final = Kind("v1", "Namespace", "namespaces", namespaced=False)
RESOURCE_QUOTA: Final = Kind("v1", "ResourceQuota", "resourcequotas")
ROLE: Final = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING: Final = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
POD_DISRUPTION_BUDGET: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY: Final = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEASE: Final = Kind("coordination.k8s.io/v1", "Lease", "leases")
EVENT: Final = Kind("v1", "Event", "events")
CRD: Final = Kind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)
ACCESS_REVIEW: Final = Kind(
    "authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)
SUBJECT_REVIEW: Final = Kind(
    "authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", namespaced=False
)

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {each.kind: each for each in tuple(globals().values()) if isinstance(each, Kind)}
)
"""All kinds, by their name in manifests."""


def kind_of(obj: Mapping[str, Any]) -> Kind:
    """Return the kind of an object, in the API version that the object names.

    Raises:
        InvalidObjectError: Penstock does not know the kind.
    """
    name, version = obj.get("kind"), obj.get("apiVersion")
    known = KINDS.get(name) if isinstance(name, str) else None
    if known is None or not isinstance(version, str):
        raise InvalidObjectError(f"apiVersion {version!r}, kind {name!r}: not a kind that Penstock handles")
    return known if known.api_version == version else replace(known, api_version=version)
