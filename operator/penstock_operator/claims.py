"""Reads from ResourceClaimTemplates how many GPUs each claim of a graph's pods holds (DRA); called by the reconciler.

The count of a template that is absent or unreadable is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from penstock.api import GraphDeployment
from penstock.core.errors import ClusterError, NotFoundError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.kinds import RESOURCE_CLAIM_TEMPLATE
from penstock.kube.objects.device_claims import claimed_devices
from penstock_operator.resources.accelerators import claim_templates, is_accelerator
from penstock_operator.trim import Object

_VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""API versions that are tried in this order. Kubernetes serves v1 since 1.34, v1beta2 since 1.33 and v1beta1 since
1.32. A version that is not served answers 404, as an absent object does."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimReader:
    """Reads how many GPUs one claim of a ResourceClaimTemplate holds, so that these GPUs count against the graph's GPU budget.

    It reads the templates at each reconcile of a graph whose podTemplates name any; most graphs name none.

    Attributes:
        client: Client of the Kubernetes API.
        gpus: Names, or patterns, of the device classes and resources that count as GPUs.
    """

    client: KubeClient
    gpus: tuple[str, ...]

    async def of(self, namespace: str, graph: GraphDeployment) -> dict[str, int]:
        """Return the number of GPUs of one claim, by name of the ResourceClaimTemplate, for those that a graph's podTemplates name.

        ResourceClaimTemplates that do not exist, that cannot be read, or whose number of GPUs is not a fixed number are left
        out.

        Args:
            namespace: Namespace of the graph.
            graph: Graph whose podTemplates name the ResourceClaimTemplates.
        """
        names = {each for service in graph.spec.services for each in claim_templates(graph, service)}
        found = {}
        for name in sorted(names):
            template = await self._template(namespace, name)
            gpus = (
                None
                if template is None
                else claimed_devices(template, lambda device: is_accelerator(device, self.gpus))
            )
            if gpus is not None:
                found[name] = gpus
        return found

    async def _template(self, namespace: str, name: str) -> Object | None:
        for version in _VERSIONS:
            kind = replace(RESOURCE_CLAIM_TEMPLATE, api_version=f"{RESOURCE_CLAIM_TEMPLATE.group}/{version}")
            try:
                return await self.client.get(kind, name, namespace=namespace)
            except NotFoundError:
                continue
            except ClusterError as exc:
                log.warning("ResourceClaimTemplate not read", namespace=namespace, name=name, error=str(exc))
                return None
        return None
