"""Reads the nodes of a GpuPool and the pods on them, at most every `POLL_S`; what cannot be read is told and shrinks nothing."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import quote

from penstock.api import GpuPool
from penstock.core.errors import ClusterError, ForbiddenError, NotFoundError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import NODE
from penstock_operator.plan.pool_nodes import PoolNodes, counted, foreign_gpus, usable_nodes

POLL_S: Final = 15.0
"""Between two counts. Chosen: the pool's own workers are counted at every event; a lost node shows after 40 s anyway."""


class PoolNodeReader:
    """Of the pools with a nodeSelector; other pools have nothing to count."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._counted: dict[str, tuple[float, int, PoolNodes]] = {}

    async def read(
        self, pool: GpuPool, uid: str, *, generation: int, namespace: str, graphs: Collection[str]
    ) -> PoolNodes | None:
        """Return what a pool's nodes offer; None: it selects none.

        Args:
            pool: The pool.
            uid: Its own.
            generation: Its newest; an edit is counted at once.
            namespace: Its own.
            graphs: Its graphs.
        """
        if not pool.spec.node_selector:
            self._counted.pop(uid, None)
            return None
        now_s, before = time.monotonic(), self._counted.get(uid)
        if before is not None and before[1] == generation and now_s - before[0] < POLL_S:
            return before[2]
        found = await self._count(pool, namespace, graphs, None if before is None else before[2])
        self._counted[uid] = (now_s, generation, found)
        return found

    def forget(self, uid: str) -> None:
        """Forget a deleted pool."""
        self._counted.pop(uid, None)

    async def _count(
        self, pool: GpuPool, namespace: str, graphs: Collection[str], before: PoolNodes | None
    ) -> PoolNodes:
        resource = pool.spec.resource
        try:
            nodes = (await self._client.list(NODE, namespace=None, labels=pool.spec.node_selector)).items
            usable, left_out = usable_nodes(nodes, resource)
            foreign = await self._foreign(list(usable), resource, namespace, graphs)
        except (ForbiddenError, NotFoundError):
            return PoolNodes(
                None, "the operator may not list nodes (the chart's rbac.nodes); spec.gpus counts"
            )
        except ClusterError as exc:
            known = None if before is None else before.gpus
            return PoolNodes(known, f"the nodes could not be read, so what was known counts: {exc}")
        return counted(nodes, usable, left_out, foreign)

    async def _foreign(
        self, nodes: list[str], resource: str, namespace: str, graphs: Collection[str]
    ) -> int | None:
        pods: list[dict[str, Any]] = []
        try:
            for node in nodes:
                answer = await self._client.raw_get(
                    f"/api/v1/pods?fieldSelector=spec.nodeName%3D{quote(node)}"
                )
                pods += answer.get("items") or ()
        except ForbiddenError:
            return None
        return foreign_gpus(pods, resource, namespace=namespace, graphs=graphs)
