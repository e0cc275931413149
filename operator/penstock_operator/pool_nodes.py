"""Reads the nodes of a pool and the pods on them, at most every `POLL_S`; what cannot be read is reported and shrinks nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote

from penstock.api import PoolObject
from penstock.core.errors import ClusterError, ForbiddenError, NotFoundError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import NODE
from penstock_operator.plan.pool_nodes import PoolNodes, counted, foreign_gpus, usable_nodes
from penstock_operator.polled import Polled
from penstock_operator.queue import Key

POLL_S: Final = 15.0
"""Between two counts. Chosen: the pool's own workers are counted at every event; a lost node shows after 40 s anyway."""


class PoolNodeReader:
    """Of the pools with a nodeSelector; other pools have nothing to count."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._counted: Polled[PoolNodes] = Polled()

    async def read(
        self, pool: PoolObject, uid: str, *, generation: int, graphs: Collection[Key]
    ) -> PoolNodes | None:
        """Return what a pool's nodes offer; None: it selects none.

        Args:
            pool: The pool.
            uid: Its own.
            generation: Its newest; an edit is counted at once.
            graphs: Its graphs, namespace and name.
        """
        if not pool.spec.node_selector:
            self._counted.forget(uid)
            return None

        async def count(before: PoolNodes | None) -> PoolNodes:
            return await self._count(pool, graphs, before)

        return await self._counted.get(uid, count, fresh_s=POLL_S, version=generation)

    def forget(self, uid: str) -> None:
        """Forget a deleted pool."""
        self._counted.forget(uid)

    async def _count(self, pool: PoolObject, graphs: Collection[Key], before: PoolNodes | None) -> PoolNodes:
        resource = pool.spec.resource
        try:
            nodes = (await self._client.list(NODE, namespace=None, labels=pool.spec.node_selector)).items
            usable, left_out = usable_nodes(nodes, resource)
            foreign = await self._foreign(list(usable), resource, graphs)
        except (ForbiddenError, NotFoundError):
            return PoolNodes(None, "the operator may not list nodes (the chart's rbac.nodes)")
        except ClusterError as exc:
            if before is None or before.gpus is None:
                return PoolNodes(None, f"the nodes could not be read: {exc}")
            return replace(before, words=f"the nodes could not be read, so what was known counts: {exc}")
        return counted(nodes, usable, left_out, foreign)

    async def _foreign(self, nodes: list[str], resource: str, graphs: Collection[Key]) -> int | None:
        pods: list[dict[str, Any]] = []
        try:
            for node in nodes:
                answer = await self._client.raw_get(
                    f"/api/v1/pods?fieldSelector=spec.nodeName%3D{quote(node)}"
                )
                pods += answer.get("items") or ()
        except ForbiddenError:
            return None
        return foreign_gpus(pods, resource, graphs)
