"""Decides which node resources are accelerators that a graph's budget counts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from penstock.api import GraphDeployment
from penstock.core.errors import ManifestProblem

GPU_RESOURCES: Final = (
    "*/gpu",
    "*/gpu.shared",
    "*/mig-*",
    "aws.amazon.com/neuron*",
    "gpu.intel.com/*",
    "google.com/tpu",
    "habana.ai/gaudi*",
    "gpu.*",
    "mig.*",
    "neuron.*",
    "tpu.*",
)
"""Names, or patterns of names, of the resources that the device plugins of NVIDIA, AMD, Intel, Habana, Google and AWS
offer, and of their DRA drivers' device classes. The chart's ``operator.gpuResources`` replaces them."""


_NETWORK: Final = ("*/efa", "rdma/*")
"""Resources of network devices that transfer KV between nodes. They are not accelerators."""
_OF_KUBERNETES: Final = "kubernetes.io"


def is_accelerator(resource: str, known: tuple[str, ...] = GPU_RESOURCES) -> bool:
    """Return whether a resource name matches one of the ``known`` patterns of accelerators."""
    return any(fnmatchcase(resource, pattern) for pattern in known)


def claim_templates(graph: GraphDeployment, name: str) -> list[str]:
    """Return the names of the ResourceClaimTemplates from which a service's containers claim devices; a name occurs once per claim.

    The names come from the podTemplate of service ``name`` in ``graph``. Returns an empty list if it has no claims.
    """
    spec = _map(graph.spec.services[name].pod_template.get("spec"))
    containers = [_map(each) for kind in ("containers", "initContainers") for each in _list(spec.get(kind))]
    used = {
        _map(claim).get("name")
        for container in containers
        for claim in _list(_map(container.get("resources")).get("claims"))
    }
    claims = [_map(each) for each in _list(spec.get("resourceClaims"))]
    named = [each.get("resourceClaimTemplateName") for each in claims if each.get("name") in used]
    return [each for each in named if isinstance(each, str)]


def claimed_gpus(graph: GraphDeployment, name: str, claimed: Mapping[str, int]) -> int | None:
    """Return how many GPUs the ResourceClaims of one pod of a service hold; None if there is no claim, or one of unknown size.

    Args:
        graph: The graph.
        name: Name of the service.
        claimed: Number of GPUs of one claim, by ResourceClaimTemplate; those with an unknown number are absent.
    """
    templates = claim_templates(graph, name)
    if not templates or not all(each in claimed for each in templates):
        return None
    return sum(claimed[each] for each in templates)


def uncounted_devices(
    graph: GraphDeployment, known: tuple[str, ...] = GPU_RESOURCES, claimed: Mapping[str, int] | None = None
) -> Iterator[ManifestProblem]:
    """Yield a problem for each device in podTemplates that may be an accelerator but is not counted by the budget.

    Args:
        graph: The graph whose podTemplates are checked.
        known: Patterns of the resources that are counted.
        claimed: Number of GPUs of one claim, by ResourceClaimTemplate; those with an unknown number are absent. None
            means that no number is known.
    """
    for name, service in graph.spec.services.items():
        pool = graph.spec.node_pools.get(service.node_pool or "")
        counted = {pool.gpu_resource_name} if pool is not None else set()
        path = f"spec.services.{name}.podTemplate.spec"
        for place, resource in dict.fromkeys(_devices(service.pod_template.get("spec"))):
            if resource not in counted and not is_accelerator(resource, (*known, *_NETWORK)):
                message = (
                    f"{resource} is a device that the GPU budget does not count; if it is an accelerator, add it to the chart's "
                    "operator.gpuResources, and set the node pool's gpuResourceName"
                )
                yield ManifestProblem(path=f"{path}.{place}", message=message)
        gpus = graph.spec.gpu_resource_of(name)
        is_claimed = claimed_gpus(graph, name, claimed or {}) is not None
        if gpus is not None and not is_claimed and _has_other_claims(gpus, service.pod_template.get("spec")):
            message = (
                f"pods ask for {gpus} in addition to what they claim; if a claim holds the GPUs, give their number in "
                f'gpusPerReplica, which the budget counts, and {gpus}: "0" in the container\'s limits and requests'
            )
            yield ManifestProblem(path=f"{path}.resourceClaims", message=message)


def _has_other_claims(gpus: str, spec: object) -> bool:
    """Return whether a container uses a device claim and also requests the extended resource ``gpus``."""
    for container in _list(_map(spec).get("containers")):
        resources = _map(_map(container).get("resources"))
        limits = _map(resources.get("limits"))
        if _list(resources.get("claims")) and str(limits.get(gpus, "unset")) not in {"0", "None"}:
            return True
    return False


def _devices(spec: object) -> Iterator[tuple[str, str]]:
    """Yield each extended resource in a podTemplate, after the path of the container's resources; the podTemplate may be malformed."""
    for kind in ("containers", "initContainers"):
        for container in _list(_map(spec).get(kind)):
            resources = _map(_map(container).get("resources"))
            for each in ("limits", "requests"):
                for resource, requested in _map(resources.get(each)).items():
                    vendor, slash, _ = resource.partition("/")
                    is_device = bool(slash) and not f".{vendor}".endswith(f".{_OF_KUBERNETES}")
                    if is_device and str(requested) not in {"0", "None"}:
                        yield f"{kind}[{_map(container).get('name')}].resources", resource


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
