"""Drives the allocator of GPU pools: observes, allocates GPUs, writes the status, and only then lets the graphs use the grants.

Each reconcile of a graph uses the grant that was valid when it began: `GpuPools.grant` finds the grant,
`GpuPools.acknowledge` stores it. Only one reconcile of a graph runs at a time, so none still uses an older grant. The
status is written with the resource version that was read, so that after a restart, or next to a second operator, no
grant is based on an older state. The state in this module is only a cache; after a restart, nothing is allocated
until each graph that is new in the pool has been reconciled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import GraphDeployment, PoolObject
from penstock.core.errors import ClusterError, ConflictError, NotFoundError
from penstock.core.logs import get_logger
from penstock.gpu_pool.waiting import DrainTimes, holdings_from_status
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.informer import key_of
from penstock.kube.kinds import GPU_POOL, GRAPH_DEPLOYMENT
from penstock.kube.objects.names import OPERATOR, status_pool
from penstock_operator.cluster import Cluster, Enqueue
from penstock_operator.gates import Gates
from penstock_operator.plan.status import is_current
from penstock_operator.pools.grant import PoolGrant, is_bid_expired
from penstock_operator.pools.keys import graph_of, is_of_cluster, kind_of_pool, member_of, title_of
from penstock_operator.pools.observe import (
    PoolMember,
    PoolObservation,
    draining_gpus,
    gpus_of,
    has_planner,
    rows_of,
    shares_of,
    updated_drain_times,
)
from penstock_operator.pools.readings import PoolReadings
from penstock_operator.pools.share_out import PoolShares, grant_changes, share_out
from penstock_operator.pools.status import (
    MAX_SHOWN,
    allocation_of,
    listed_graphs,
    own_budget_message,
    pool_status,
    refused_status,
)
from penstock_operator.pools.watch import PoolWatch
from penstock_operator.queue import Key
from penstock_operator.trim import Object

MAX_INTERVAL_S: Final = 5.0
"""Maximum seconds between two allocations, because minimum times between changes of a grant end without an event.
Chosen."""

MIN_INTERVAL_S: Final = 0.1
"""Minimum seconds between two allocations, because changes come in groups. Chosen."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Report:
    """Result of a graph's last reconcile: its UID, its specification, and the GPUs of each desired worker replica."""

    graph_uid: str
    graph: GraphDeployment
    bid: tuple[int, ...]


@dataclass(slots=True)
class _Matched:
    """The graphs that a pool's entries match, in the form of `PoolObservation`."""

    members: dict[str, PoolMember] = field(default_factory=dict)
    in_other_pool: dict[str, str] = field(default_factory=dict)
    without_planner: list[str] = field(default_factory=list)


class GpuPools:
    """Allocates the GPUs of all GPU pools of an operator class, in a namespace or in the cluster, to the graphs that share them.

    Graphs report what they request (`report`) and which limit they use (`acknowledge`); `grant` returns their limit.

    Attributes:
        changed: Event that is set if something changed on which an allocation depends; `run` waits for it, and then
            allocates again.
    """

    def __init__(
        self,
        client: KubeClient,
        cluster: Cluster,
        recorder: EventRecorder,
        gates: Gates,
        *,
        namespace: str | None,
        operator_class: str,
        enqueue: Enqueue,
        now_s: Callable[[], float],
    ) -> None:
        self._client = client
        self._now_s = now_s
        self._cluster = cluster
        self._recorder = recorder
        self._gates = gates
        self._enqueue = enqueue
        self.changed = asyncio.Event()
        self._watch = PoolWatch(
            client,
            cluster,
            namespace=namespace,
            operator_class=operator_class,
            on_change=self.changed.set,
            on_edit=self._edited,
        )
        self._active: dict[Key, PoolGrant] = {}
        self._views: dict[Key, tuple[str, PoolMember | None]] = {}
        self._reports: dict[Key, _Report] = {}
        self._drains: dict[Key, DrainTimes] = {}
        self._deleted: set[Key] = set()
        self._readings = PoolReadings(client)

    async def run(self, ready: asyncio.Event) -> None:
        """Allocate the GPUs of all pools to their graphs until cancelled.

        Args:
            ready: Event that this method sets when it has read all pools, or when the API server does not serve the
                kinds of pools yet.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.run(ready), name="gpu pools")
            await ready.wait()
            while True:
                self.changed.clear()
                for key in self._watch.known():
                    await self._share_out(key)
                await asyncio.sleep(MIN_INTERVAL_S)
                try:
                    async with asyncio.timeout(MAX_INTERVAL_S):
                        await self.changed.wait()
                except TimeoutError:
                    continue

    def problem(self) -> str | None:
        """Return why the in-memory view of the GPU pools may be outdated or incomplete; None if all watches work."""
        return self._watch.problem()

    def all(self) -> list[Object]:
        """Return all GPU pools whose ``spec.operatorClass`` is this operator's, as the API server returned them."""
        return [pool for key in self._watch.known() if (pool := self._watch.get(key)) is not None]

    def grant(self, raw: Object) -> PoolGrant | None:
        """Return the maximum number of GPUs that a graph's GPU pool grants it now; None if the graph is in no pool.

        Args:
            raw: The GraphDeployment.
        """
        key = key_of(raw)
        pools = list(self._watch.of(raw)) if has_planner(raw) else []
        if not pools:
            return self._grant_of_deleted_pool(key[0], raw)
        pool, *newer = pools
        uid, model = pool["metadata"]["uid"], self._watch.model(pool)[0]
        member = member_of(key_of(pool), key)
        share, active = shares_of(pool.get("status")).get(member), self._active.get(key)
        if share is not None:
            gpus, serial = share.gpus, share.serial
        elif active is not None and (active.uid, active.serial) == (uid, 0):
            gpus, serial = active.gpus, 0
        else:
            gpus, serial = self._held(key), 0
        shortage, guaranteed, wanted = allocation_of(pool.get("status"), member)
        total = None if model is None else model.spec.gpus
        total = gpus_of(pool.get("status")) if total is None else total
        messages = [shortage, own_budget_message(raw, wanted=wanted, pool_gpus=total or 0)]
        messages += [
            f"{title_of(each)} also matches this graph but is newer, so it has no effect" for each in newer
        ]
        return PoolGrant(
            kind=kind_of_pool(key_of(pool)).kind,
            pool=pool["metadata"]["name"],
            gpus=gpus,
            max_gpus=max(gpus, total or 0),
            message="; ".join(filter(None, messages)),
            reclaim_s=None if model is None else model.spec.reclaim.grace_seconds,
            is_bid_expired=self._is_bid_expired(raw),
            guaranteed=guaranteed,
            uid=uid,
            serial=serial,
            pool_gpus=total,
            pool_held_gpus=((pool.get("status") or {}).get("gpus") or {}).get("held"),
            graphs=listed_graphs(pool.get("status"), member),
        )

    def acknowledge(self, raw: Object, grant: PoolGrant | None) -> None:
        """Record that a graph now keeps to ``grant``, the maximum GPUs that its pool grants, since a reconcile has used it.

        The pool gives GPUs to another graph only when the graph that had them has acknowledged a lower grant and no
        longer holds them. Triggers a new allocation if the GPUs that the graph holds, or the grant that it has
        acknowledged, changed.

        Args:
            raw: The GraphDeployment.
            grant: Result of `grant` for this graph; None if the graph is in no pool.
        """
        key = key_of(raw)
        if grant is None:
            self._active.pop(key, None)
        else:
            self._active[key] = grant
        view = self._view(key, raw)
        if view != self._views.get(key):
            self.changed.set()
        if view is None:
            self._views.pop(key, None)
        else:
            self._views[key] = view

    def report(self, raw: Object, graph: GraphDeployment, bid: tuple[int, ...]) -> None:
        """Store the GPUs that a graph requests from its GPU pool (its bid) for the next allocation; triggers one if they changed.

        Args:
            raw: The GraphDeployment.
            graph: The validated specification that the operator applies: the one in ``raw`` or, if this is invalid,
                the last one that was applied.
            bid: Number of GPUs of each desired worker replica, the most needed first; empty if none is desired.
        """
        key, metadata = key_of(raw), raw["metadata"]
        labelled = graph.metadata.model_copy(update={"labels": metadata.get("labels") or {}})
        known = _Report(metadata["uid"], graph.model_copy(update={"metadata": labelled}), bid)
        if self._reports.get(key) != known:
            self._reports[key] = known
            if key in self._views:
                self.changed.set()

    def forget(self, key: Key) -> None:
        """Drop the grant (maximum GPUs) and the bid (requested GPUs) stored for a deleted graph.

        The GPUs of its workers still count as held in its GPU pool until the workers are gone.
        """
        is_in_pool = key in self._views or any(
            member_of(key_of(pool), key) in rows_of(pool.get("status")) for pool in self.all()
        )
        for each in (self._active, self._views, self._reports, self._drains):
            each.pop(key, None)
        if is_in_pool:
            self.changed.set()

    def _view(self, key: Key, raw: Object) -> tuple[str, PoolMember | None] | None:
        """Return the pool's UID and the member data with which a graph takes part in the allocation; None if it is in no pool."""
        is_planned = has_planner(raw)
        active = self._active.get(key)
        if is_planned and (active is None or not active.uid):
            return None
        pools = list(self._watch.of(raw))
        if not pools:
            return None
        return pools[0]["metadata"]["uid"], self._member(key, raw, pools[0]) if is_planned else None

    def _grant_of_deleted_pool(self, namespace: str, raw: Object) -> PoolGrant | None:
        """Return the grant that a graph keeps after its pool was deleted; None if a pool of that name exists but does not match the graph."""
        last = status_pool(raw)
        if last is None:
            return None
        kind, name, gpus = last.get("kind", GPU_POOL.kind), last["name"], last["grantedGpus"]
        if self._watch.get((namespace if kind == GPU_POOL.kind else "", name)) is not None:
            return None
        text = f"{kind} {name} was deleted, so the graph keeps its {gpus} GPUs and gets no more; create the pool again"
        return PoolGrant(kind, name, gpus, gpus, f"{text}, without an entry for this graph to release it")

    def _is_bid_expired(self, raw: Object) -> bool:
        return is_bid_expired((raw.get("status") or {}).get("planner") or {}, self._now_s())

    def _held(self, key: Key) -> int:
        return self._gates.held(key, self._cluster.snapshot(key).workers())

    def _edited(self, pool: Object, is_deleted: bool) -> None:  # noqa: FBT001 - the watch's callback
        if is_deleted:
            self._readings.forget(pool["metadata"]["uid"])
        namespace = key_of(pool)[0]
        for graph in self._cluster.known():
            if not namespace or graph[0] == namespace:
                self._enqueue(graph, True)

    async def _share_out(self, key: Key) -> None:
        try:
            await self._allocate(key)
        except ConflictError:  # the watch will deliver the other writer's change, which triggers the next try
            log.info("gpu pool changed meanwhile", namespace=key[0], name=key[1])
        except ClusterError as exc:
            log.warning("gpu pool not allocated", namespace=key[0], name=key[1], error=str(exc))

    async def _allocate(self, key: Key) -> None:
        pool, now_s = self._watch.get(key), self._now_s()
        if pool is None:
            return
        model, problem = self._watch.model(pool)
        if model is None:
            old, generation = pool.get("status"), pool["metadata"].get("generation", 0)
            await self._write(key, pool, refused_status(problem, old=old, generation=generation, now_s=now_s))
            return
        observed = await self._observe(pool, model, now_s)
        shares = share_out(observed)
        if shares is None:
            for name, each in observed.members.items():
                if name not in observed.shares and each.initial_gpus is None:
                    self._enqueue(graph_of(key, name), True)
            return
        status = pool_status(observed, shares)
        await self._write(key, pool, status)
        await self._deliver(key, observed, shares, status)

    async def _observe(self, pool: Object, model: PoolObject, now_s: float) -> PoolObservation:
        key, status, metadata = key_of(pool), pool.get("status"), pool["metadata"]
        shares = rows_of(status)
        matched = self._matched(pool, shares, await self._unknown_graphs(key, shares))
        graphs = {graph_of(key, name) for name in matched.members}
        generation = metadata.get("generation", 0)
        nodes = await self._readings.nodes(model, metadata["uid"], generation=generation, graphs=graphs)
        namespaces = {each[0] for each in graphs} if is_of_cluster(key) else {key[0]}
        return PoolObservation(
            model,
            matched.members,
            now_s,
            status=status,
            generation=generation,
            in_other_pool=matched.in_other_pool,
            without_planner=matched.without_planner,
            nodes=nodes,
            quotas={each: await self._readings.quotas(each) for each in sorted(namespaces)},
        )

    async def _deliver(
        self, key: Key, observed: PoolObservation, shares: PoolShares, status: Mapping[str, Any]
    ) -> None:
        """Enqueue the graphs whose grants changed, and emit Events about the changes."""
        old, before = observed.status, observed.shares
        is_shown = len(shares.shares) <= MAX_SHOWN and holdings_from_status(old) != holdings_from_status(
            status
        )
        for name, share in shares.shares.items():
            was = before.get(name)
            is_new = was is None or (was.gpus, was.serial) != (share.gpus, share.serial)
            is_other = allocation_of(old, name) != allocation_of(status, name) or gpus_of(old) != shares.gpus
            if is_new or is_shown or is_other:
                self._enqueue(graph_of(key, name), True)
        for name, (lowered, text) in grant_changes(observed, shares).items():
            graph = self._cluster.snapshot(graph_of(key, name)).graph
            if graph is not None:
                reason = "GpusReclaimed" if lowered else "GpusGranted"
                await self._recorder.emit(graph, EventMessage(reason, text, "ShareOut"))

    async def _unknown_graphs(self, pool: Key, members: Iterable[str]) -> dict[Key, Object]:
        """Read the graphs of which only workers are known, as after a restart; deleted graphs are left out."""
        self._deleted = {each for each in self._deleted if self._cluster.snapshot(each).graph is None}
        missing = {
            graph for name in members if self._cluster.snapshot(graph := graph_of(pool, name)).graph is None
        }
        found: dict[Key, Object] = {}
        for namespace, name in missing - self._deleted:
            try:
                found[namespace, name] = await self._client.get(GRAPH_DEPLOYMENT, name, namespace=namespace)
            except NotFoundError:
                self._deleted.add((namespace, name))
        return found

    def _matched(self, pool: Object, shares: Collection[str], unknown: Mapping[Key, Object]) -> _Matched:
        key, found = key_of(pool), _Matched()
        for graph in self._cluster.known():
            if not is_of_cluster(key) and graph[0] != key[0]:
                continue
            name = member_of(key, graph)
            raw = self._cluster.snapshot(graph).graph or unknown.get(graph)
            if raw is None:
                if name in shares and (held := self._held(graph)):  # workers of a deleted graph
                    found.members[name] = PoolMember(None, bid=(), held=held, draining=held)
                continue
            if not self._watch.covers(pool, raw):
                continue
            if not has_planner(raw):
                found.without_planner.append(name)
                continue
            first = next(self._watch.of(raw))
            if first["metadata"]["uid"] != pool["metadata"]["uid"]:
                found.in_other_pool[name] = title_of(first)
                continue
            active = self._active.get(graph)
            if active is not None and active.is_bid_expired != self._is_bid_expired(raw):
                self._enqueue(graph, True)
            found.members[name] = member = self._member(graph, raw, pool)
            self._drains[graph] = member.drains
        return found

    def _member(self, key: Key, raw: Object, pool: Object) -> PoolMember:
        metadata, workers = raw["metadata"], self._cluster.snapshot(key).workers()
        row = rows_of(pool.get("status")).get(member_of(key_of(pool), key), {})
        active, report = self._active.get(key), self._reports.get(key)
        if active is not None and active.uid != pool["metadata"]["uid"]:
            active = None
        if report is not None and report.graph_uid != metadata["uid"]:
            report = None
        bid = None if report is None else report.bid
        return PoolMember(
            entry=self._watch.entry(pool, raw),
            graph=None if report is None else report.graph,
            bid=() if metadata.get("deletionTimestamp") else bid,
            held=self._held(key),
            draining=draining_gpus(workers),
            serial=None if active is None else active.serial,
            initial_gpus=None if active is None else active.gpus,
            drains=updated_drain_times(self._drains.get(key), row, workers, self._now_s()),
            created=metadata.get("creationTimestamp", ""),
        )

    async def _write(self, key: Key, pool: Object, status: dict[str, Any]) -> None:
        if is_current(status, pool.get("status")):
            return
        known = pool["metadata"]
        metadata = {
            each: known[each] for each in ("name", "namespace", "uid", "resourceVersion") if each in known
        }
        body = kind_of_pool(key).of(metadata, status=status)
        answer = await self._client.apply(body, field_manager=OPERATOR, subresource="status")
        self._watch.record_write(answer)
