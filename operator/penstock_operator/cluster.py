"""What the cluster looks like now, from watches alone: every graph with its children, adapters and pods.

One informer per kind, all narrowed to what carries `managed-by: penstock`, objects trimmed to what the plans
read. Changes mark the graph they belong to; what changes nothing that the plans read (a heartbeat, another's
part of a status) marks nothing. Reads nothing from the API server beyond the informers' lists and watches.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from penstock_core.errors import NotFoundError, UnavailableError
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
    kind_of,
)
from penstock_operator.plan.pods import PodView
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
"""Kinds of children that every cluster knows; LeaderWorkerSet is watched once its CRD is there."""

CONFIRM_S: Final = 30.0
"""How long an answered write counts without the watch's word; real seconds, chosen: longer than a reconnect."""

LIST_S: Final = 5.0
"""Longest wait for the first list of LeaderWorkerSets; real seconds, chosen: a graph that needs them tries again."""

MAX_TOMBS: Final = 10_000
"""Deleted objects remembered, so that a late answer does not revive them. Chosen: about two megabytes."""

Trim = Callable[[Object], Object]

_OF_USERS: Final = frozenset({GRAPH_DEPLOYMENT, SCALING_ADAPTER})
"""Kinds whose specification only users and autoscalers change."""

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
        self._noted: dict[tuple[str, str, str], float] = {}
        self._tombs: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self._trims: dict[Kind, Trim] = {
            GRAPH_DEPLOYMENT: trim_graph,
            **dict.fromkeys((*CHILD_KINDS, LEADER_WORKER_SET), trim_child),
            POD: trim_pod,
        }
        self._informers = {
            kind: self._informer(kind) for kind in self._trims if kind is not LEADER_WORKER_SET
        }
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

    def problem(self) -> str | None:
        """Return why the view may be old or incomplete; None while all watches work."""
        for kind, informer in self._informers.items():
            if informer.problem is not None:
                return f"{kind.plural}: {informer.problem}"
            if not informer.synced.is_set():
                return f"{kind.plural}: not listed yet"
        return None

    def known(self) -> list[Key]:
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
                informer = self._informer(LEADER_WORKER_SET)
                self._informers[LEADER_WORKER_SET] = informer
                self._group.create_task(informer.run())
                log.info("LeaderWorkerSets are watched from now on")
            informer = self._informers[LEADER_WORKER_SET]
            try:
                async with asyncio.timeout(LIST_S):
                    await informer.synced.wait()
            except TimeoutError as exc:
                # Other graphs need neither these sets nor the worker that would wait for them here.
                why = informer.problem or "not listed yet"
                raise UnavailableError(f"{LEADER_WORKER_SET.plural}: {why}") from exc
            return True

    async def _knows(self, kind: Kind) -> bool:
        try:
            found = await self._client.raw_get(f"/apis/{kind.api_version}")
        except NotFoundError:
            return False
        return any(each.get("name") == kind.plural for each in found.get("resources", ()))

    def _informer(self, kind: Kind) -> Informer:
        return Informer(
            self._client,
            kind,
            namespace=self._namespace,
            labels=None if kind is GRAPH_DEPLOYMENT else {MANAGED_BY_LABEL: MANAGED_BY},
            trim=self._trims[kind],
            on_change=partial(self._changed, kind),
        )

    def note(self, written: Object) -> None:
        """Take over an object as the API server answered a write, before the watch shows it.

        So the next look does not repeat the write. The answer may also hold what somebody else changed just
        before, which the watch then does not show as a change any more; that marks the graph here. What the
        watch does not confirm within `CONFIRM_S` is dropped again.
        """
        kind = kind_of(written)
        if kind not in self._trims or written["metadata"].get("resourceVersion") is None:
            return
        obj = self._trims[kind](written)
        metadata = obj["metadata"]
        identity = (kind.kind, metadata["namespace"], metadata["name"])
        if self._tombs.get(identity, -1) >= obj[VERSION]:
            return
        old = self._held(kind, identity[2], self._homes.get(identity))
        if old is not None and old[VERSION] >= obj[VERSION]:
            return  # the watch was quicker; its copy is the one that the informer keeps anyway
        home = self._take_over(kind, identity, obj)
        self._noted[identity] = time.monotonic()
        if home is not None and old is not None and _brings_news(kind, old, obj):
            self._mark(home, kind in _OF_USERS)
        if (metadata["namespace"], metadata["name"]) not in self._informers[kind].objects:
            asyncio.get_running_loop().call_later(CONFIRM_S, self._confirm, kind, identity, obj)

    def _confirm(self, kind: Kind, identity: tuple[str, str, str], obj: Object) -> None:
        home = self._homes.get(identity)
        if home is None or identity[1:] in self._informers[kind].objects:
            return
        if self._held(kind, identity[2], home) is obj:
            self._remove(kind, identity)
            self._mark(home, False)

    def _changed(self, kind: Kind, change: str, obj: Object) -> None:
        metadata = obj["metadata"]
        identity = (kind.kind, metadata["namespace"], metadata["name"])
        home = self._homes.get(identity)
        if change == "DELETED":
            self._bury(identity, obj[VERSION])
            if home is not None:
                self._remove(kind, identity)
                self._mark(home, False)
            return
        old = self._held(kind, metadata["name"], home)
        noted_s = self._noted.pop(identity, None)
        is_young = noted_s is not None and time.monotonic() - noted_s < CONFIRM_S
        if noted_s is not None and is_young and old is not None and old[VERSION] > obj[VERSION]:
            self._noted[identity] = noted_s
            return  # the answer to a write of ours was newer
        new_home = self._take_over(kind, identity, obj)
        if home is not None and home != new_home:
            self._mark(home, False)
        if new_home is not None and (home != new_home or old is None or not same(old, obj)):
            self._mark(new_home, kind in _OF_USERS and _generation(old) != _generation(obj))

    def _take_over(self, kind: Kind, identity: tuple[str, str, str], obj: Object) -> Key | None:
        """Keep an object where it belongs now; return that graph."""
        home = _home(kind, obj)
        if self._homes.get(identity) not in {None, home}:
            self._remove(kind, identity)
        if home is not None:
            self._homes[identity] = home
            self._put(kind, identity[2], home, obj)
        return home

    def _bury(self, identity: tuple[str, str, str], version: int) -> None:
        self._tombs[identity] = version
        self._tombs.move_to_end(identity)
        if len(self._tombs) > MAX_TOMBS:
            self._tombs.popitem(last=False)

    def _held(self, kind: Kind, name: str, home: Key | None) -> Object | None:
        sight = self._sights.get(home) if home is not None else None
        if sight is None:
            return None
        if kind is GRAPH_DEPLOYMENT:
            return sight.graph
        return sight.pods.get(name) if kind is POD else sight.children.get((kind.kind, name))

    def _put(self, kind: Kind, name: str, home: Key, obj: Object) -> None:
        sight = self._sights.setdefault(home, Sight())
        if kind is GRAPH_DEPLOYMENT:
            sight.graph = obj
        elif kind is POD:
            sight.pods[name] = obj
        else:
            sight.children[kind.kind, name] = obj

    def _remove(self, kind: Kind, identity: tuple[str, str, str]) -> None:
        self._noted.pop(identity, None)
        home = self._homes.pop(identity, None)
        sight = self._sights.get(home) if home is not None else None
        if home is None or sight is None:
            return
        if kind is GRAPH_DEPLOYMENT:
            sight.graph = None
        elif kind is POD:
            sight.pods.pop(identity[2], None)
        else:
            sight.children.pop((kind.kind, identity[2]), None)
        if sight.empty:
            del self._sights[home]


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


def _brings_news(kind: Kind, old: Object, new: Object) -> bool:
    """Return whether the answer to a write shows more than that write."""
    if kind is POD:
        return _but_for_ours(old["view"]) != _but_for_ours(new["view"])
    if kind in _OF_USERS:
        return _generation(old) != _generation(new)
    deleted = "deletionTimestamp"
    return bool(
        old.get("status") != new.get("status") or old["metadata"].get(deleted) != new["metadata"].get(deleted)
    )


def _but_for_ours(view: PodView) -> PodView:
    """Return a pod's view without what the operator itself writes on pods."""
    return replace(view, gates=(), serving="", drain_since_s=None, deletion_cost=0, conditions=())
