"""Reads how many GPUs the claims of a graph's pods hold (DRA), by their ResourceClaimTemplates; called by the reconciler.

A template that is absent, or may not be read, is unknown.
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
"""Kubernetes serves the first since 1.34, the others since 1.33 and 1.32; absent ones answer 404 as an absent object does."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimReader:
    """Reads templates at each reconcile of a graph that names some; most name none.

    Attributes:
        gpus: Names, or patterns, of device classes and resources that are GPUs.
    """

    client: KubeClient
    gpus: tuple[str, ...]

    async def of(self, namespace: str, graph: GraphDeployment) -> dict[str, int]:
        """Return the GPUs of a claim of each template that the graph's podTemplates name, where it is known."""
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
