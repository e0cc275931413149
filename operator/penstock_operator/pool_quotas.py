"""Reads the ResourceQuotas of a pool's namespaces, at most every `POLL_S`, to say which are lower than the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.core.errors import ClusterError, ForbiddenError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import RESOURCE_QUOTA
from penstock_operator.plan.pool_quotas import quota_problems
from penstock_operator.polled import Polled

POLL_S: Final = 60.0
"""Between two reads. Chosen: quotas change seldom, and what one refuses is reported at once anyway."""


class PoolQuotaReader:
    """Of every namespace with a pool; without the right to list them, or an answer, nothing new is said."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._read: Polled[list[dict[str, Any]]] = Polled()

    async def problems(self, resource: str, namespace: str, gpus: int) -> list[str]:
        """Return which quotas are lower than a GpuPool, each as a sentence.

        Args:
            resource: Extended resource of the pool.
            namespace: Its own.
            gpus: That its graphs may hold together now.
        """
        return quota_problems(await self._quotas(namespace), resource, gpus)

    async def cluster_problems(self, resource: str, guaranteed: Mapping[str, int]) -> list[str]:
        """Return which quotas are lower than what a ClusterGpuPool guarantees in their namespace, each as a sentence.

        Args:
            resource: Extended resource of the pool.
            guaranteed: GPUs by namespace.
        """
        said = []
        for namespace, gpus in sorted(guaranteed.items()):
            quotas = await self._quotas(namespace)
            said += quota_problems(quotas, resource, gpus, namespace=namespace)
        return said

    async def _quotas(self, namespace: str) -> list[dict[str, Any]]:
        async def read(known: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
            try:
                return (await self._client.list(RESOURCE_QUOTA, namespace=namespace)).items
            except ForbiddenError:
                return []
            except ClusterError:
                return known or []

        return await self._read.get(namespace, read, fresh_s=POLL_S)
