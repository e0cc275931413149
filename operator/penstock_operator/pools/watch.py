"""Watches GPU pools, and finds the pools that match a graph; this process's own writes are visible at once.

GpuPools match graphs in their own namespace, ClusterGpuPools those in the namespaces that their entries name. An
operator that watches one namespace ignores ClusterGpuPools. Pools of another operator class are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from penstock.api import ClusterGpuPool, GpuPool, PoolEntry, PoolObject
from penstock.api.manifests.validation import validated
from penstock.core.errors import UnavailableError, one_line
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer, key_of
from penstock.kube.kinds import CLUSTER_GPU_POOL, GPU_POOL, NAMESPACE, Kind
from penstock.kube.objects.names import is_of_class
from penstock_operator.cluster import Cluster
from penstock_operator.pools.keys import is_of_cluster, kind_of_pool, member_of
from penstock_operator.pools.observe import entry_of, rows_of
from penstock_operator.queue import Key
from penstock_operator.trim import Object, version_of

SERVED_S: Final = 30.0
"""Wall-clock seconds between two checks for a kind that the API server does not serve. Chosen."""

RETRY_S: Final = 5.0
"""Seconds until the next check after one that got no answer. Chosen."""

NAMESPACES_S: Final = 5.0
"""Maximum seconds to wait at the start for the namespaces that a pool selects by labels. Chosen: a pool whose
namespaces are unknown does not change its graphs' grants."""

OnEdit = Callable[[Object, bool], None]
"""Function that is called with a pool that is new, edited or deleted; the second argument is True if it was deleted."""

log = get_logger(__name__)


class PoolWatch:
    """In-memory view of all GPU pools of one operator class, in a namespace or in the cluster.

    A pool's key is its namespace (empty for a ClusterGpuPool) and name.
    """

    def __init__(
        self,
        client: KubeClient,
        cluster: Cluster,
        *,
        namespace: str | None,
        operator_class: str,
        on_change: Callable[[], None],
        on_edit: OnEdit,
    ) -> None:
        """Prepare; `run` starts the watches.

        Args:
            client: Client of the Kubernetes API.
            cluster: View that knows which kinds the API server serves.
            namespace: Namespace to watch; None watches all, including ClusterGpuPools.
            operator_class: Only pools of this ``spec.operatorClass`` are returned.
            on_change: Called at every change of a pool.
            on_edit: Called if a pool's specification changed, or if a selected namespace's labels did.
        """
        self._cluster = cluster
        self._class = operator_class
        self._on_change, self._on_edit = on_change, on_edit
        kinds = (GPU_POOL,) if namespace is not None else (GPU_POOL, CLUSTER_GPU_POOL)
        self._informers = {
            kind: Informer(client, kind, namespace=namespace, on_change=self._changed) for kind in kinds
        }
        self._namespaces = Informer(
            client, NAMESPACE, namespace=None, trim=_name_and_labels, on_change=self._labels_changed
        )
        self._selects_namespaces = asyncio.Event()
        self._labels: dict[str, Mapping[str, str]] = {}
        self._label_version = 0
        self._answers: dict[Key, Object] = {}
        self._generations: dict[Key, Any] = {}
        self._models: dict[tuple[str, Any, int], tuple[PoolObject | None, str]] = {}

    async def run(self, ready: asyncio.Event) -> None:
        """Watch GPU pools until cancelled.

        Args:
            ready: Event that this method sets when it has read the pools of every kind, or when the API server does
                not serve the kind yet.
        """
        first_check: dict[Kind, asyncio.Event] = {kind: asyncio.Event() for kind in self._informers}
        async with asyncio.TaskGroup() as group:
            for kind, informer in self._informers.items():
                group.create_task(self._watch(kind, informer, first_check[kind]), name=kind.plural)
            group.create_task(self._watch_namespaces(), name="namespaces")
            for each in first_check.values():
                await each.wait()
            if self._selects_namespaces.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(NAMESPACES_S):
                        await self._namespaces.synced.wait()
            ready.set()

    async def _watch_namespaces(self) -> None:
        """Start to watch namespaces when a pool selects some by labels."""
        await self._selects_namespaces.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._namespaces.run(), name="namespaces")
            await self._namespaces.synced.wait()
            self._resolve()

    async def _watch(self, kind: Kind, informer: Informer, first_check: asyncio.Event) -> None:
        while not await self._is_served(kind):
            first_check.set()
            await asyncio.sleep(SERVED_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(informer.run(), name=kind.plural)
            await informer.synced.wait()
            first_check.set()

    async def _is_served(self, kind: Kind) -> bool:
        while True:
            try:
                return await self._cluster.has_kind(kind)
            except UnavailableError as exc:
                log.warning("kind not looked up", kind=kind.kind, error=str(exc), retry_s=RETRY_S)
                await asyncio.sleep(RETRY_S)

    def problem(self) -> str | None:
        """Return why the in-memory view of GpuPools or ClusterGpuPools may be outdated; None if all watches work."""
        for kind, informer in self._informers.items():
            if informer.problem is not None:
                return f"{kind.plural}: {informer.problem}"
        if self._selects_namespaces.is_set() and self._namespaces.problem is not None:
            return f"namespaces: {self._namespaces.problem}"
        return None

    def known(self) -> list[Key]:
        """Return namespace (empty for a ClusterGpuPool) and name of all GPU pools of this operator class."""
        return [key for informer in self._informers.values() for key in informer.objects if self.get(key)]

    def get(self, key: Key) -> Object | None:
        """Return the GPU pool with this namespace and name, as the watch or the answer to a write by this process shows it; else None."""
        informer = self._informers.get(kind_of_pool(key))
        shown = None if informer is None else informer.objects.get(key)
        if shown is None or not is_of_class(shown["spec"], self._class):
            return None
        answer = self._answers.get(key)
        if answer is not None and answer["metadata"]["uid"] == shown["metadata"]["uid"]:
            return max((shown, answer), key=lambda each: version_of(each["metadata"]))
        return shown

    def record_write(self, answer: Object) -> None:
        """Store ``answer``, the pool as returned by a write of this process; `get` returns it until the watch shows a newer version."""
        self._answers[key_of(answer)] = answer

    def model(self, pool: Object) -> tuple[PoolObject | None, str]:
        """Return a pair: the validated pool and an empty text, or None and the reason why the pool cannot be used yet.

        In the validated pool, labels that select namespaces are replaced by the names of these namespaces.
        """
        if _selects_namespaces(pool) and not self._namespaces.synced.is_set():
            why = self._namespaces.problem or "they are being listed"
            return (
                None,
                f"match.namespaceLabels: the namespaces are not known yet, so graphs keep their grants: {why}",
            )
        identity = (pool["metadata"]["uid"], pool["metadata"].get("generation"), self._label_version)
        if identity not in self._models:
            found: PoolObject | None
            if is_of_cluster(key_of(pool)):
                found, problems = validated(ClusterGpuPool, pool)
                found = None if found is None else found.within(self._labels)
            else:
                found, problems = validated(GpuPool, pool)
            self._models[identity] = (found, one_line(problems))
        return self._models[identity]

    def entry(self, pool: Object, graph: Object) -> PoolEntry | None:
        """Return the first entry (guarantee, priority) of a GPU pool that matches a graph; None if none does or the pool is invalid."""
        model, _ = self.model(pool)
        metadata = graph["metadata"]
        if model is None:
            return None
        return entry_of(model, metadata["name"], metadata.get("labels") or {}, metadata["namespace"])

    def covers(self, pool: Object, graph: Object) -> bool:
        """Return whether a GPU pool applies to a graph; a pool with an invalid manifest applies to the graphs that its status lists."""
        key, graph_key = key_of(pool), key_of(graph)
        if not is_of_cluster(key) and key[0] != graph_key[0]:
            return False
        if self.model(pool)[0] is None:
            return member_of(key, graph_key) in rows_of(pool.get("status"))
        return self.entry(pool, graph) is not None

    def of(self, graph: Object) -> Iterator[Object]:
        """Yield the pools that apply to a graph, the oldest first; only the oldest one takes effect. Yields nothing if none applies."""
        known = [pool for key in self.known() if (pool := self.get(key)) is not None]
        yield from sorted(
            (each for each in known if self.covers(each, graph)),
            key=lambda each: (each["metadata"]["creationTimestamp"], key_of(each)),
        )

    def _labels_changed(self, change: str, namespace: Object) -> None:
        name = namespace["metadata"]["name"]
        before = self._labels.pop(name, None)
        if change != "DELETED":
            self._labels[name] = namespace["metadata"]["labels"]
        if self._labels.get(name) != before and self._namespaces.synced.is_set():
            self._resolve()

    def _resolve(self) -> None:
        """Discard the resolved pools, and report those that select namespaces as edited."""
        self._label_version += 1
        self._models.clear()
        for key in self.known():
            pool = self.get(key)
            if pool is not None and _selects_namespaces(pool):
                self._on_edit(pool, False)
        self._on_change()

    def _changed(self, change: str, pool: Object) -> None:
        if _selects_namespaces(pool):
            self._selects_namespaces.set()
        key, is_deleted = key_of(pool), change == "DELETED"
        generation = None if is_deleted else pool["metadata"].get("generation")
        if is_deleted:
            self._answers.pop(key, None)
            for each in [each for each in self._models if each[0] == pool["metadata"]["uid"]]:
                del self._models[each]
        if self._generations.get(key) != generation:
            self._generations[key] = generation
            self._on_edit(pool, is_deleted)
        self._on_change()


def _name_and_labels(namespace: Object) -> Object:
    """Return a namespace reduced to its name and labels."""
    metadata = namespace["metadata"]
    kept = {key: metadata[key] for key in ("name", "uid", "resourceVersion") if key in metadata}
    return {"metadata": {**kept, "labels": metadata.get("labels") or {}}}


def _selects_namespaces(pool: Object) -> bool:
    """Return whether a pool selects namespaces by labels; the pool may be invalid."""
    entries = pool["spec"].get("graphs") or ()
    return any((each.get("match") or {}).get("namespaceLabels") for each in entries)
