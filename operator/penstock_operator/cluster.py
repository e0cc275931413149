"""The operator's in-memory view of the cluster, filled only from watches: every graph with its children, adapters and pods.

Kopf's handlers report GraphDeployments. Children (ScalingAdapters included) and pods have informers, restricted to
objects labelled `managed-by: penstock`. Objects are trimmed to the fields from which the functions in `plan` decide. A
change enqueues the graph that the object belongs to, unless it changes only other fields, such as a heartbeat or a
status condition of another writer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from penstock.api import Role
from penstock.core.errors import ClusterError, ForbiddenError, NotFoundError, UnavailableError
from penstock.core.logs import get_logger
from penstock.core.lru_cache import LruCache
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer, key_of
from penstock.kube.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    GRAPH_DEPLOYMENT,
    INFERENCE_POOL,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    POD,
    POD_DISRUPTION_BUDGET,
    ROLE,
    ROLE_BINDING,
    SCALING_ADAPTER,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    kind_of,
)
from penstock.kube.objects.names import GRAPH_LABEL, MANAGED_BY, MANAGED_BY_LABEL
from penstock_operator.nodes import Nodes
from penstock_operator.plan.pods import PodView, on_cordoned_node, on_deleted_node
from penstock_operator.queue import Key
from penstock_operator.trim import VERSION, Object, same, trim_child, trim_graph, trim_pod

CHILD_KINDS: Final = (
    SCALING_ADAPTER,
    DEPLOYMENT,
    SERVICE,
    CONFIG_MAP,
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    POD_DISRUPTION_BUDGET,
    NETWORK_POLICY,
)
"""Kinds of children that every cluster serves and that are watched from the start."""

OPTIONAL_KINDS: Final = (LEADER_WORKER_SET, INFERENCE_POOL)
"""Kinds of children from optional CustomResourceDefinitions. They are watched from the start if any such children
exist, else as soon as a graph needs them."""

CONFIRM_S: Final = 30.0
"""Seconds for which the answer to a write is trusted although the watch has not shown the object; wall-clock time.
Chosen: longer than a reconnect."""

LIST_S: Final = 5.0
"""Maximum seconds to wait for the first list of an optional kind, and the pause before the next try; wall-clock time.
Chosen: a graph that needs the kind tries again."""

MAX_TOMBSTONES: Final = 10_000
"""Number of deleted objects that are remembered, so that a late answer to a write does not restore them in the view.
Chosen: about two megabytes."""

Trim = Callable[[Object], Object]

_USER_KINDS: Final = frozenset({GRAPH_DEPLOYMENT, SCALING_ADAPTER})
"""Kinds whose specification is changed only by users and autoscalers."""

Enqueue = Callable[[Key, bool], None]
"""Function that enqueues a graph for reconciliation; the second argument is True if a user changed it."""

log = get_logger(__name__)


@dataclass(slots=True)
class GraphSnapshot:
    """The objects of one graph, reduced to the fields that the operator needs, each by (kind, name).

    Objects are shared with the informers and must not be changed.

    Attributes:
        graphs: The GraphDeployment; empty if it does not exist (any more).
        children: Objects that the operator created for the graph; ScalingAdapters are among them.
        pods: Pods; key ``view`` of each has the `PodView` (facts about the pod) from which the operator decides.
    """

    graphs: dict[tuple[str, str], Object] = field(default_factory=dict)
    children: dict[tuple[str, str], Object] = field(default_factory=dict)
    pods: dict[tuple[str, str], Object] = field(default_factory=dict)

    @property
    def graph(self) -> Object | None:
        """The GraphDeployment, or None if it does not exist."""
        return next(iter(self.graphs.values()), None)

    def of(self, kind: Kind) -> dict[tuple[str, str], Object]:
        """Return the field that holds objects of ``kind``, by (kind, name): `graphs`, `pods`, or `children` with objects of all other kinds."""
        return self.graphs if kind is GRAPH_DEPLOYMENT else self.pods if kind is POD else self.children

    def views(self) -> list[PodView]:
        """Return the `PodView` (facts from which the operator decides) of each pod of the graph, including finished and terminating ones."""
        return [each["view"] for each in self.pods.values()]

    def workers(self) -> list[PodView]:
        """Return the facts about each of the graph's worker pods: all pods except routers."""
        return [each for each in self.views() if each.role != Role.ROUTER]

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that changes whenever any object of the graph changes, or a node of one of its pods is deleted or cordoned."""
        versions = [each[VERSION] for each in (*self.children.values(), *self.pods.values())]
        graph = None if self.graph is None else self.graph[VERSION]
        versions += [1 for each in self.views() if each.node_is_deleted]
        versions += [2 for each in self.views() if each.node_is_cordoned]
        return (graph, len(self.children), len(self.pods), *sorted(versions))


class Cluster:
    """In-memory view of GraphDeployments in one namespace or in all, of the objects created for them, and of their pods.

    Watches of the Kubernetes API keep it current. A change of an object enqueues its graph for a reconcile, which
    reads the graph's objects by `snapshot`.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str | None,
        enqueue: Enqueue,
        confirm_s: float = CONFIRM_S,
        list_s: float = LIST_S,
    ) -> None:
        """Prepare; `run` starts the watches.

        Args:
            client: Client of the Kubernetes API.
            namespace: Namespace to watch; None watches all.
            enqueue: Called for each graph that may have to be reconciled.
            confirm_s: Seconds for which the answer to a write is trusted without the watch; see `CONFIRM_S`.
            list_s: Maximum seconds to wait for the first list of an optional kind; see `LIST_S`.
        """
        self._confirm_s = confirm_s
        self._list_s = list_s
        self._client = client
        self._namespace = namespace
        self._enqueue = enqueue
        self._snapshots: dict[Key, GraphSnapshot] = {}
        self._owners: dict[tuple[str, str, str], Key] = {}
        self._written_s: dict[tuple[str, str, str], float] = {}
        self._reported: set[tuple[str, str, str]] = set()
        self._tombstones: LruCache[tuple[str, str, str], int] = LruCache(MAX_TOMBSTONES)
        self._trims: dict[Kind, Trim] = {
            GRAPH_DEPLOYMENT: trim_graph,
            **dict.fromkeys((*CHILD_KINDS, *OPTIONAL_KINDS), trim_child),
            POD: trim_pod,
        }
        self._informers = {kind: self._informer(kind) for kind in (*CHILD_KINDS, POD)}
        self._nodes = Nodes(client, self._node_changed)
        self._group = asyncio.TaskGroup()
        self._optional_lock = asyncio.Lock()

    async def run(self) -> None:
        """Watch the graphs' objects and pods until cancelled; kopf (the operator framework) adds GraphDeployments through `report` and `remove`."""
        async with self._group as group:
            for informer in self._informers.values():
                group.create_task(informer.run())

    async def synced(self) -> None:
        """Wait until every watched kind has been listed once, so that `snapshot` is complete.

        If the API server serves LeaderWorkerSets or InferencePools, kinds of other projects, they are watched as well.
        """
        await self._listed()
        for kind in OPTIONAL_KINDS:
            if await self._has_any(kind):
                self._watch(kind)
        await self._listed()
        self._group.create_task(self._nodes.run(self._nodes_of_pods))

    def _nodes_of_pods(self) -> set[str]:
        return {each.node for stored in self._snapshots.values() for each in stored.views() if each.bound}

    async def _listed(self) -> None:
        for informer in tuple(self._informers.values()):
            await informer.synced.wait()

    async def _has_any(self, kind: Kind) -> bool:
        """Return whether children of an optional kind exist; they must be found even if no service needs the kind any more."""
        while True:
            try:
                found = await self._client.list(
                    kind, namespace=self._namespace, labels={MANAGED_BY_LABEL: MANAGED_BY}
                )
            except (NotFoundError, ForbiddenError):
                return False
            except ClusterError as exc:
                log.warning("kind not listed", kind=kind.kind, error=str(exc), retry_s=self._list_s)
                await asyncio.sleep(self._list_s)
            else:
                return bool(found.items)

    def problem(self) -> str | None:
        """Return why the in-memory view of the cluster may be outdated or incomplete; None if all watches work."""
        for kind, informer in self._informers.items():
            if informer.problem is not None:
                return f"{kind.plural}: {informer.problem}"
            if not informer.synced.is_set():
                return f"{kind.plural}: not listed yet"
        return None

    def known(self) -> list[Key]:
        """Return namespace and name of every graph of which any object exists: the GraphDeployment itself, an object created for it, or a pod."""
        return list(self._snapshots)

    def snapshot(self, key: Key) -> GraphSnapshot:
        """Return a graph's objects as the watches show them now; later changes do not alter the result. It is empty for an unknown graph."""
        stored = self._snapshots.get(key, GraphSnapshot())
        return GraphSnapshot(dict(stored.graphs), dict(stored.children), self._pods(stored))

    def _pods(self, stored: GraphSnapshot) -> dict[tuple[str, str], Object]:
        """Return a graph's pods with the state of their nodes.

        Pods on deleted nodes count as not serving, whatever their last kubelet reported.
        """
        return (
            {key: self._on_its_node(pod) for key, pod in stored.pods.items()}
            if len(self._nodes)
            else dict(stored.pods)
        )

    def _on_its_node(self, pod: Object) -> Object:
        view: PodView = pod["view"]
        if self._nodes.is_deleted(view.node):
            return {**pod, "view": on_deleted_node(view)}
        if view.node in self._nodes.cordoned:
            return {**pod, "view": on_cordoned_node(view)}
        return pod

    def _node_changed(self, node: str) -> None:
        """Enqueue the graphs with pods on ``node``, which was deleted, exists again, or was cordoned or uncordoned."""
        for key, stored in self._snapshots.items():
            if any(each.node == node for each in stored.views()):
                self._enqueue(key, False)

    async def serves(self, kind: Kind) -> bool:
        """Return whether the API server serves a kind of another project, such as LeaderWorkerSet.

        If the kind is LeaderWorkerSet or InferencePool and is served, its objects are watched from then on.

        Raises:
            UnavailableError: The first list of the kind did not finish within 5 wall-clock seconds (`LIST_S`).
        """
        if kind not in OPTIONAL_KINDS:
            return await self.has_kind(kind)
        async with self._optional_lock:
            if kind not in self._informers:
                if not await self.has_kind(kind):
                    return False
                self._watch(kind)
            informer = self._informers[kind]
            try:
                async with asyncio.timeout(self._list_s):
                    await informer.synced.wait()
            except TimeoutError as exc:
                # Do not wait longer: other graphs do not need these objects, but do need this reconcile worker.
                why = informer.problem or "not listed yet"
                raise UnavailableError(f"{kind.plural}: {why}") from exc
            return True

    async def has_kind(self, kind: Kind) -> bool:
        """Ask the API server whether it serves a kind, usually of another project's CustomResourceDefinition; nothing is watched."""
        try:
            found = await self._client.raw_get(f"/apis/{kind.api_version}")
        except NotFoundError:
            return False
        return any(each.get("name") == kind.plural for each in found.get("resources", ()))

    def report(self, graph: Object) -> None:
        """Store a GraphDeployment, as received from the API server, in the in-memory view, unless a newer version is stored."""
        obj = trim_graph(graph)
        stored = self.snapshot(key_of(obj)).graph
        if stored is None or stored[VERSION] <= obj[VERSION]:
            self._changed(GRAPH_DEPLOYMENT, "MODIFIED", obj)

    def remove(self, graph: Object) -> None:
        """Remove a deleted GraphDeployment from the in-memory view; a newer one that has its name but another UID remains."""
        obj = trim_graph(graph)
        stored = self.snapshot(key_of(obj)).graph
        if stored is None or stored["metadata"]["uid"] == obj["metadata"]["uid"]:
            self._changed(GRAPH_DEPLOYMENT, "DELETED", obj)

    def _watch(self, kind: Kind) -> None:
        """Start to watch an optional kind."""
        self._informers[kind] = self._informer(kind)
        self._group.create_task(self._informers[kind].run())
        log.info("watched from now on", kind=kind.kind)

    def _informer(self, kind: Kind) -> Informer:
        return Informer(
            self._client,
            kind,
            namespace=self._namespace,
            labels={MANAGED_BY_LABEL: MANAGED_BY},
            trim=self._trims[kind],
            on_change=partial(self._changed, kind),
        )

    def record_write(self, written: Object) -> None:
        """Store the object in the API server's answer to a write, before the watch shows it.

        The next reconcile then does not repeat the write. The answer can also include a change that another writer made
        just before; the watch does not report that as a change any more, so the graph is enqueued here. An object that
        the watch does not show within 30 wall-clock seconds (`CONFIRM_S`) is removed again.

        Args:
            written: Object in the API server's answer. Kinds that the view does not contain are ignored.
        """
        kind = kind_of(written)
        if kind not in self._trims or written["metadata"].get("resourceVersion") is None:
            return
        obj = self._trims[kind](written)
        metadata = obj["metadata"]
        identity = (kind.kind, metadata["namespace"], metadata["name"])
        deleted_at = self._tombstones.get(identity)
        if deleted_at is not None and deleted_at >= obj[VERSION]:
            return
        old = self._stored(kind, identity[2], self._owners.get(identity))
        if old is not None and old[VERSION] >= obj[VERSION]:
            return  # the watch has already reported this version or a newer one
        owner = self._store(kind, identity, obj)
        self._written_s[identity] = time.monotonic()
        if owner is not None and old is not None and _shows_other_changes(kind, old, obj):
            self._enqueue(owner, kind in _USER_KINDS)
        if identity not in self._reported:
            asyncio.get_running_loop().call_later(self._confirm_s, self._confirm, kind, identity, obj)

    def _confirm(self, kind: Kind, identity: tuple[str, str, str], obj: Object) -> None:
        owner = self._owners.get(identity)
        if owner is None or identity in self._reported:
            return
        if self._stored(kind, identity[2], owner) is obj:
            self._remove(kind, identity)
            self._enqueue(owner, False)

    def _changed(self, kind: Kind, change: str, obj: Object) -> None:
        metadata = obj["metadata"]
        identity = (kind.kind, metadata["namespace"], metadata["name"])
        owner = self._owners.get(identity)
        if change == "DELETED":
            self._reported.discard(identity)
            self._tombstones.put(identity, obj[VERSION])
            if owner is not None:
                self._remove(kind, identity)
                self._enqueue(owner, False)
            return
        self._reported.add(identity)
        old = self._stored(kind, metadata["name"], owner)
        written_s = self._written_s.pop(identity, None)
        is_recent = written_s is not None and time.monotonic() - written_s < self._confirm_s
        if written_s is not None and is_recent and old is not None and old[VERSION] > obj[VERSION]:
            self._written_s[identity] = written_s
            return  # the stored answer to the operator's own write is newer
        new_owner = self._store(kind, identity, obj)
        if owner is not None and owner != new_owner:
            self._enqueue(owner, False)
        if new_owner is not None and (owner != new_owner or old is None or not same(old, obj)):
            self._enqueue(new_owner, kind in _USER_KINDS and _generation(old) != _generation(obj))

    def _store(self, kind: Kind, identity: tuple[str, str, str], obj: Object) -> Key | None:
        """Store an object under the graph that it belongs to now, and return that graph; None if it belongs to none."""
        owner = _owning_graph(kind, obj)
        if self._owners.get(identity) not in {None, owner}:
            self._remove(kind, identity)
        if owner is not None:
            self._owners[identity] = owner
            self._snapshots.setdefault(owner, GraphSnapshot()).of(kind)[kind.kind, identity[2]] = obj
        return owner

    def _stored(self, kind: Kind, name: str, owner: Key | None) -> Object | None:
        stored = None if owner is None else self._snapshots.get(owner)
        return None if stored is None else stored.of(kind).get((kind.kind, name))

    def _remove(self, kind: Kind, identity: tuple[str, str, str]) -> None:
        self._written_s.pop(identity, None)
        owner = self._owners.pop(identity, None)
        if owner is None:
            return
        stored = self._snapshots[owner]
        stored.of(kind).pop((kind.kind, identity[2]), None)
        if not (stored.graphs or stored.children or stored.pods):
            self._snapshots.pop(owner, None)


def _owning_graph(kind: Kind, obj: Object) -> Key | None:
    """Return the graph that an object belongs to; None if it names none."""
    metadata = obj["metadata"]
    name = metadata["name"] if kind is GRAPH_DEPLOYMENT else metadata.get("labels", {}).get(GRAPH_LABEL)
    return (metadata["namespace"], name) if name else None


def _generation(obj: Object | None) -> object:
    """Return the fields of a graph that only users change: generation and deletion timestamp."""
    if obj is None:
        return None
    metadata = obj["metadata"]
    return metadata.get("generation"), metadata.get("deletionTimestamp")


def _shows_other_changes(kind: Kind, old: Object, new: Object) -> bool:
    """Return whether the answer to a write contains changes that the write did not make."""
    if kind is POD:
        return _without_own_fields(old["view"]) != _without_own_fields(new["view"])
    if kind in _USER_KINDS:
        return _generation(old) != _generation(new)
    was, now = ((each.get("status"), each["metadata"].get("deletionTimestamp")) for each in (old, new))
    return was != now


def _without_own_fields(view: PodView) -> PodView:
    """Return a pod's view without the fields that the operator itself writes on pods."""
    return replace(view, gates=(), serving="", drain_since_s=None, deletion_cost=0, conditions=())
