"""Detects deleted and cordoned nodes.

Pods on a deleted node stay Ready until the garbage collector notices, which takes 40 s or more. Pods on a cordoned node
are likely to be evicted soon, so a service whose replicas are all on such nodes gets a replacement first.

Only a node that existed before can count as deleted, so that a lagging watch does not make the pods of a new node
look lost. Nodes are not namespaced, so watching them needs a separate right (the chart's ``rbac.nodes``). Without
that right no node counts as deleted or cordoned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.core.errors import ClusterError, ForbiddenError, NotFoundError
from penstock.core.logs import get_logger
from penstock.core.lru_cache import LruCache
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer
from penstock.kube.kinds import NODE
from penstock_operator.trim import Object

MAX_DELETED: Final = 10_000
"""Maximum number of deleted nodes' names that are remembered. Chosen: about one megabyte; their pods are gone within
minutes."""

RETRY_S: Final = 10.0
"""Seconds until the next try if the API server did not answer whether nodes can be watched; wall-clock time, chosen."""

FORBIDDEN_RETRY_S: Final = 60.0
"""Seconds until the next try if the API server forbids watching nodes. Wall-clock time, chosen: the right may be
granted, or a rejected token renewed, while this process leads."""

log = get_logger(__name__)


class Nodes:
    """Watches the cluster's nodes, and keeps the names of those that were deleted (and not created again) or are cordoned.

    Attributes:
        cordoned: Names of the cordoned nodes, which accept no new pods (``spec.unschedulable``).
    """

    def __init__(
        self,
        client: KubeClient,
        on_change: Callable[[str], None],
        *,
        retry_s: float = RETRY_S,
        forbidden_retry_s: float = FORBIDDEN_RETRY_S,
    ) -> None:
        """Prepare; `run` watches.

        Args:
            client: Client of the Kubernetes API.
            on_change: Called with the name of a node that was deleted, exists again, or was cordoned or uncordoned.
            retry_s: Seconds until the next try after an error; see `RETRY_S`.
            forbidden_retry_s: Seconds until the next try after a refusal; see `FORBIDDEN_RETRY_S`.
        """
        self._retry_s, self._forbidden_retry_s = retry_s, forbidden_retry_s
        self._client = client
        self._on_change = on_change
        self._deleted: LruCache[str, bool] = LruCache(MAX_DELETED)
        self.cordoned: set[str] = set()

    def is_deleted(self, node: str) -> bool:
        """Return whether the node with this name was deleted and not created again; False for a node that was never observed."""
        return self._deleted.get(node) is not None

    def __len__(self) -> int:
        """Return the number of nodes known to be deleted or cordoned."""
        return len(self._deleted) + len(self.cordoned)

    async def run(self, named: Callable[[], set[str]]) -> None:
        """Watch nodes until cancelled; as long as the operator has no right to watch nodes, it asks again every 60 s.

        Args:
            named: Returns the names of nodes that pods are bound to. Such a node has existed, so it counts as deleted
                if the first list lacks it.
        """
        await self._allowed()
        before = named()
        informer = Informer(self._client, NODE, namespace=None, trim=_trimmed, on_change=self._changed)
        async with asyncio.TaskGroup() as group:
            group.create_task(informer.run())
            await informer.synced.wait()
            for name in before - {name for _, name in informer.objects}:
                self._forget_or_add(name, is_deleted=True)

    async def _allowed(self) -> None:
        """Wait until listing nodes is allowed; a refusal is logged once."""
        is_logged = False
        while True:
            try:
                await self._client.raw_get("/api/v1/nodes?limit=1")
            except (ForbiddenError, NotFoundError):
                if not is_logged:
                    log.info(
                        "nodes not watched: a deleted node is noticed only when its pods are deleted; see rbac.nodes"
                    )
                is_logged = True
                await asyncio.sleep(self._forbidden_retry_s)
            except ClusterError as exc:
                log.warning("nodes not listed", error=str(exc), retry_s=self._retry_s)
                await asyncio.sleep(self._retry_s)
            else:
                return

    def _changed(self, change: str, node: Object) -> None:
        name = node["metadata"]["name"]
        is_cordoned = change != "DELETED" and bool((node.get("spec") or {}).get("unschedulable"))
        if is_cordoned != (name in self.cordoned):
            self.cordoned ^= {name}
            self._on_change(name)
        if change != "MODIFIED":
            self._forget_or_add(name, is_deleted=change == "DELETED")

    def _forget_or_add(self, name: str, *, is_deleted: bool) -> None:
        if is_deleted:
            self._deleted.put(name, True)
        elif self.is_deleted(name):
            self._deleted.forget(name)
        else:
            return
        self._on_change(name)


def _trimmed(node: Object) -> Object:
    is_cordoned = bool((node.get("spec") or {}).get("unschedulable"))
    spec = {"spec": {"unschedulable": True}} if is_cordoned else {}
    return {"metadata": {"name": node["metadata"]["name"]}, **spec}
