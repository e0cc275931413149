"""Reads and caches a pool's nodes, the pods on them, and the ResourceQuotas of its namespaces.

If something cannot be read, that is reported, and no grant shrinks because of it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import quote

from penstock.api import PoolObject
from penstock.core.errors import ClusterError, ForbiddenError, NotFoundError
from penstock.kube.client import KubeClient
from penstock.kube.kinds import NODE, RESOURCE_QUOTA
from penstock_operator.pools.capacity import PoolNodes, counted, foreign_gpus, usable_nodes
from penstock_operator.queue import Key
from penstock_operator.trim import Object

NODES_POLL_S: Final = 15.0
"""Seconds between two counts of nodes. Chosen: the pool's own workers are counted at every event, and a lost node
shows only after 40 s anyway."""

QUOTAS_POLL_S: Final = 60.0
"""Seconds between two reads of quotas. Chosen: quotas change rarely, and pods that they reject are reported at once
anyway."""

T = TypeVar("T")


class PoolReadings:
    """Cache of the GPU counts of each pool's nodes, by the pool's UID, and of each namespace's ResourceQuotas.

    It limits how often nodes, pods and ResourceQuotas are listed for the allocation of GPUs.
    """

    def __init__(self, client: KubeClient, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._now_s = now_s
        self._known: dict[tuple[str, str], tuple[float, Hashable, Any]] = {}

    async def nodes(
        self, pool: PoolObject, uid: str, *, generation: int, graphs: Collection[Key]
    ) -> PoolNodes | None:
        """Return the number of GPUs of a pool's nodes that its graphs can use; None if the pool does not select nodes.

        The GPUs are counted at most once per 15 wall-clock seconds; in between, the last count is returned.

        Args:
            pool: The pool.
            uid: UID of the pool.
            generation: Current ``metadata.generation`` of the pool; a change triggers a new count at once.
            graphs: Namespace and name of the pool's graphs.
        """
        if not pool.spec.node_selector:
            self.forget(uid)
            return None

        async def count(before: PoolNodes | None) -> PoolNodes:
            return await self._count(pool, graphs, before)

        return await self._polled(("nodes", uid), count, fresh_s=NODES_POLL_S, version=generation)

    async def quotas(self, namespace: str) -> list[Object]:
        """Return a namespace's ResourceQuotas, read at most once per 60 wall-clock seconds.

        Returns an empty list if the operator has no right to list them, or if the first read fails.
        """

        async def read(known: list[Object] | None) -> list[Object]:
            try:
                return (await self._client.list(RESOURCE_QUOTA, namespace=namespace)).items
            except ForbiddenError:
                return []
            except ClusterError:
                return known or []

        return await self._polled(("quotas", namespace), read, fresh_s=QUOTAS_POLL_S)

    def forget(self, uid: str) -> None:
        """Drop the cached count of the GPUs of a deleted pool; does nothing if there is none."""
        self._known.pop(("nodes", uid), None)

    async def _polled(
        self,
        key: tuple[str, str],
        read: Callable[[T | None], Awaitable[T]],
        *,
        fresh_s: float,
        version: Hashable = None,
    ) -> T:
        """Return the cached value of ``key``; read it again if it is older than ``fresh_s`` or has another version."""
        now_s, before = self._now_s(), self._known.get(key)
        if before is not None and before[1] == version and now_s - before[0] < fresh_s:
            known: T = before[2]
            return known
        found = await read(None if before is None else before[2])
        self._known[key] = (now_s, version, found)
        return found

    async def _count(self, pool: PoolObject, graphs: Collection[Key], before: PoolNodes | None) -> PoolNodes:
        resource = pool.spec.resource
        try:
            nodes = (await self._client.list(NODE, namespace=None, labels=pool.spec.node_selector)).items
            usable, left_out = usable_nodes(nodes, resource)
            foreign = await self._foreign(list(usable), resource, graphs)
        except (ForbiddenError, NotFoundError):
            return PoolNodes(None, "the operator has no right to list nodes (enable rbac.nodes in the chart)")
        except ClusterError as exc:
            if before is None or before.gpus is None:
                return PoolNodes(None, f"the nodes could not be read: {exc}")
            return replace(
                before, message=f"the nodes could not be read, so the last known count is used: {exc}"
            )
        return counted(nodes, usable, left_out, foreign)

    async def _foreign(self, nodes: list[str], resource: str, graphs: Collection[Key]) -> int | None:
        pods: list[Object] = []
        try:
            for node in nodes:
                answer = await self._client.raw_get(
                    f"/api/v1/pods?fieldSelector=spec.nodeName%3D{quote(node)}"
                )
                pods += answer.get("items") or ()
        except ForbiddenError:
            return None
        return foreign_gpus(pods, resource, graphs)
