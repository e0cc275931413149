"""Reads the ResourceQuotas of a GpuPool's namespace, at most every `POLL_S`, to say which are lower than the pool."""

from __future__ import annotations

import time
from typing import Any, Final

from penstock.api import GpuPool
from penstock.core.errors import ClusterError, ForbiddenError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import RESOURCE_QUOTA
from penstock_operator.plan.pool_quotas import quota_problems

POLL_S: Final = 60.0
"""Between two looks. Chosen: administrators change quotas seldom, and what one refuses is told at once anyway."""


class PoolQuotaReader:
    """Of every namespace with a pool; without the right to list them, or an answer, nothing new is said."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._read: dict[str, tuple[float, list[dict[str, Any]]]] = {}

    async def problems(self, pool: GpuPool, namespace: str, gpus: int) -> list[str]:
        """Return which quotas are lower than a pool, each as a sentence.

        Args:
            pool: The pool.
            namespace: Its own.
            gpus: That its graphs may hold together now.
        """
        now_s, before = time.monotonic(), self._read.get(namespace)
        if before is None or now_s - before[0] >= POLL_S:
            known = [] if before is None else before[1]
            before = self._read[namespace] = (now_s, await self._quotas(namespace, known))
        return quota_problems(before[1], pool.spec.resource, gpus)

    async def _quotas(self, namespace: str, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return (await self._client.list(RESOURCE_QUOTA, namespace=namespace)).items
        except ForbiddenError:
            return []
        except ClusterError:
            return known
