"""What the cluster looks like now, from watches alone: every graph with its children, adapters and pods.

One informer per kind, all narrowed to what carries `managed-by: penstock`, objects trimmed to what the plans
read. Changes mark the graph they belong to; what changes nothing that the plans read (a heartbeat, another's
part of a status) marks nothing. Reads nothing from the API server beyond the informers' lists and watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock_core.errors import NotFoundError
from penstock_core.logs import get_logger
from penstock_graph.cluster_names import GRAPH_LABEL, MANAGED_BY, MANAGED_BY_LABEL
from penstock_kube.client import KubeClient
from penstock_kube.informer import Informer
from penstock_kube.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    GRAPH_DEPLOYMENT,
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
)
from penstock_operator.plan.pods import PodView
from penstock_operator.queue import Key
from penstock_operator.trim import Object, trim_child, trim_graph, trim_pod

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
"""Kinds of children that every cluster knows; LeaderWorkerSet is watched once its CRD is there."""

Mark = Callable[[Key, bool], None]
"""Asks for a look at a graph; the flag says that a user changed it."""

log = get_logger(__name__)


@dataclass(slots=True)
class Sight:
    """All that is known of one graph; objects are shared with the informers and must not be changed.

    Attributes:
        graph: The GraphDeployment, trimmed; None if there is none.
        children: By kind's name and object's name, ScalingAdapters included.
        pods: Its pods by name, as `trim_pod` leaves them.
    """

    graph: Object | None = None
    children: dict[tuple[str, str], Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing of the graph is left."""
        return self.graph is None and not self.children and not self.pods

    def views(self) -> list[PodView]:
        """Return its pods as the plans read them."""
        return [each["view"] for each in self.pods.values()]

    def adapters(self) -> Iterator[Object]:
        """Yield its ScalingAdapters."""
        return (each for (kind, _), each in self.children.items() if kind == SCALING_ADAPTER.kind)


class Cluster:
    """The operator's view of one namespace, or of all."""

    def __init__(self, client: KubeClient, *, namespace: str | None, mark: Mark) -> None:
        """Prepare the informers; `run` starts them.

        Args:
            client: Reads.
            namespace: None watches all.
            mark: Called for every change that the plans would see.
        """
        self._client = client
        self._namespace = namespace
        self._mark = mark
        self._sights: dict[Key, Sight] = {}
        self._homes: dict[tuple[str, str, str], Key] = {}
        self._informers = {GRAPH_DEPLOYMENT: self._informer(GRAPH_DEPLOYMENT, trim=trim_graph, labels=None)}
        for kind in CHILD_KINDS:
            self._informers[kind] = self._informer(kind, trim=trim_child)
        self._informers[POD] = self._informer(POD, trim=trim_pod)
        self._group: asyncio.TaskGroup | None = None
        self._lws_lock = asyncio.Lock()

    async def run(self) -> None:
        """Keep the view fresh until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for informer in self._informers.values():
                group.create_task(informer.run())

    async def synced(self) -> None:
        """Wait until every informer has listed once."""
        for informer in tuple(self._informers.values()):
            await informer.synced.wait()

    async def relist_pods(self) -> None:
        """List pods afresh, so that nothing released before a restart is missed.

        Raises:
            ClusterError: the API server refused or failed.
        """
        await self._informers[POD].relist()

    def problem(self) -> str | None:
        """Return why the view may be old or incomplete; None while all watches work."""
        for kind, informer in self._informers.items():
            if informer.problem is not None:
                return f"{kind.plural}: {informer.problem}"
            if not informer.synced.is_set():
                return f"{kind.plural}: not listed yet"
        return None

    def keys(self) -> list[Key]:
        """Return every graph of which something is there."""
        return list(self._sights)

    def sight(self, key: Key) -> Sight:
        """Return what is known of a graph now."""
        return self._sights.get(key, Sight())

    async def has_leader_worker_sets(self) -> bool:
        """Return whether the cluster knows LeaderWorkerSet, and watch them from then on.

        Raises:
            ClusterError: the API server refused or failed.
        """
        async with self._lws_lock:
            if LEADER_WORKER_SET not in self._informers:
                if not await self._knows(LEADER_WORKER_SET) or self._group is None:
                    return False
                informer = self._informer(LEADER_WORKER_SET, trim=trim_child)
                self._informers[LEADER_WORKER_SET] = informer
                self._group.create_task(informer.run())
                log.info("LeaderWorkerSets are watched from now on")
            await self._informers[LEADER_WORKER_SET].synced.wait()
            return True

    async def _knows(self, kind: Kind) -> bool:
        try:
            found = await self._client.raw_get(f"/apis/{kind.api_version}")
        except NotFoundError:
            return False
        return any(each.get("name") == kind.plural for each in found.get("resources", ()))

    def _informer(
        self,
        kind: Kind,
        *,
        trim: Callable[[Object], Object],
        labels: Mapping[str, str] | None = {MANAGED_BY_LABEL: MANAGED_BY},
    ) -> Informer:
        return Informer(
            self._client,
            kind,
            namespace=self._namespace,
            labels=labels,
            trim=trim,
            on_change=lambda change, obj: self._changed(kind, change, obj),
        )

    def _changed(self, kind: Kind, change: str, obj: Object) -> None:
        metadata = obj["metadata"]
        identity = (kind.kind, metadata["namespace"], metadata["name"])
        home = None if change == "DELETED" else _home(kind, obj)
        old_home = self._homes.get(identity)
        old = None if old_home is None else self._take(kind, metadata["name"], old_home)
        if home is None:
            self._homes.pop(identity, None)
        else:
            self._homes[identity] = home
            self._put(kind, metadata["name"], home, obj)
        if old_home is not None and old_home != home:
            self._drop_if_empty(old_home)
            self._mark(old_home, False)
        if home is not None and (old_home != home or old != obj):
            self._mark(home, kind is GRAPH_DEPLOYMENT and _generation(old) != _generation(obj))

    def _put(self, kind: Kind, name: str, home: Key, obj: Object) -> None:
        sight = self._sights.setdefault(home, Sight())
        if kind is GRAPH_DEPLOYMENT:
            sight.graph = obj
        elif kind is POD:
            sight.pods[name] = obj
        else:
            sight.children[kind.kind, name] = obj

    def _take(self, kind: Kind, name: str, home: Key) -> Object | None:
        """Remove an object from its graph's sight and return it."""
        sight = self._sights.get(home)
        if sight is None:
            return None
        if kind is GRAPH_DEPLOYMENT:
            old, sight.graph = sight.graph, None
            return old
        return sight.pods.pop(name, None) if kind is POD else sight.children.pop((kind.kind, name), None)

    def _drop_if_empty(self, key: Key) -> None:
        if key in self._sights and self._sights[key].empty:
            del self._sights[key]


def _home(kind: Kind, obj: Object) -> Key | None:
    """Return the graph that an object belongs to; None if it names none."""
    metadata = obj["metadata"]
    name = metadata["name"] if kind is GRAPH_DEPLOYMENT else metadata.get("labels", {}).get(GRAPH_LABEL)
    return (metadata["namespace"], name) if name else None


def _generation(obj: Object | None) -> object:
    """Return what only users change of a graph."""
    if obj is None:
        return None
    metadata = obj["metadata"]
    return metadata.get("generation"), metadata.get("deletionTimestamp")
