"""The objects of a ProfileRequest: one Job, and what it reads, writes and may do.

The Job's pod is no worker of the graph: it carries the request's label and not the graph's, gets no requests of
users, and holds its GPUs by its own declaration (``maxGpus``) beside the graph's budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from penstock.api import API_VERSION, GraphDeployment, ProfileRequest
from penstock.kube.objects.names import (
    MANAGED_BY_LABEL,
    OPERATOR,
    PROFILE_GRAPH_FILE,
    PROFILE_LABEL,
    profile_name,
)
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.labels import recommended_labels, release_label
from penstock.operator.resources.profile_job import ProfileWork, job

_RBAC: Final = "rbac.authorization.k8s.io"


@dataclass(frozen=True, slots=True)
class ProfileObjects:
    """What a request becomes.

    Attributes:
        before: All that the Job needs to be there, in the order in which it is applied.
        job: The Job.
    """

    before: tuple[dict[str, Any], ...]
    job: dict[str, Any]


def profile_objects(request: ProfileRequest, graph: GraphDeployment, context: BuildContext) -> ProfileObjects:
    """Return the objects of a request; the same arguments give the same objects.

    Args:
        request: A valid request.
        graph: The valid graph that it measures.
        context: Of the build; the owner is the request.

    Raises:
        InvalidSpecError: the request does not fit the graph: a pool that it does not have, no image for its
            runtime, or a podTemplate that cannot be laid over the pod's.
    """
    name = profile_name(request.name)
    metadata = _metadata(request, context, name)
    before = (
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata,
            "automountServiceAccountToken": False,
        },
        _role(request, metadata),
        _role_binding(metadata),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": _graph_file(graph)},
        # Made empty, so that the Job may patch this one object and can take no other's name.
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(request, context, request.config_map),
        },
        _network_policy(request, metadata),
    )
    work = ProfileWork(request, graph, context, labels=_labels(request))
    return ProfileObjects(before, job(work, metadata))


def _labels(request: ProfileRequest) -> dict[str, str]:
    # Managed by the operator, yet not by the name that its watches of graphs' children select.
    names = {PROFILE_LABEL: request.name, MANAGED_BY_LABEL: OPERATOR}
    return {**recommended_labels(request.name, "profile"), **names}


def _metadata(request: ProfileRequest, context: BuildContext, name: str) -> dict[str, Any]:
    owner = {
        "apiVersion": API_VERSION,
        "kind": request.kind,
        "name": request.name,
        "uid": context.owner_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    labels = {**_labels(request), **release_label()}
    found: dict[str, Any] = {"name": name, "namespace": context.namespace, "labels": labels}
    return {**found, "ownerReferences": [owner]} if context.owner_uid else found


def _graph_file(graph: GraphDeployment) -> dict[str, str]:
    manifest = {
        "apiVersion": graph.api_version,
        "kind": graph.kind,
        "metadata": {"name": graph.name},
        "spec": graph.spec.to_manifest(),
    }
    return {PurePosixPath(PROFILE_GRAPH_FILE).name: yaml.safe_dump(manifest, sort_keys=False, width=110)}


def _role(request: ProfileRequest, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rights to fill the result's ConfigMap, and nothing else."""
    rule = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [request.config_map],
        "verbs": ["get", "patch"],
    }
    return {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]}


def _role_binding(metadata: Mapping[str, Any]) -> dict[str, Any]:
    name = metadata["name"]
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": metadata["namespace"]}],
    }


def _network_policy(request: ProfileRequest, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy by which nobody reaches the workers under test, which ask for no key."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {
            "podSelector": {"matchLabels": {PROFILE_LABEL: request.name}},
            "policyTypes": ["Ingress"],
            "ingress": [],
        },
    }
