"""Drives the allocator of GPU pools: what graphs may hold goes into a pool's status, and only then to the graphs.

A graph acts under the grant that its reconcile began with, which `grant` returns and remembers; one reconcile of a graph
runs at a time, so that nothing acts under an older one any more. The status is written at the version that was read: after a
restart, or beside a second operator, no grant is given from an older state. What this module remembers saves no truth; a
new process waits for each new graph's first reconcile before it shares out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import GraphDeployment, PoolObject
from penstock.core.errors import ClusterError, ConflictError, NotFoundError
from penstock.core.logs import get_logger
from penstock.gpu_pool.waiting import DrainTimes
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.informer import key_of
from penstock.kube.kinds import GPU_POOL, GRAPH_DEPLOYMENT
from penstock.kube.objects.names import OPERATOR, pool_drawn_from
from penstock_operator.cluster import Cluster, Enqueue
from penstock_operator.gates import Gates
from penstock_operator.plan.grant import PoolGrant, is_silent
from penstock_operator.plan.pool import (
    PoolMember,
    drains_after,
    gpus_of,
    lacking_in,
    leaving_gpus,
    moved,
    own_bound,
    pool_status,
    problems_of,
    refused_status,
    share_out,
    shares_of,
)
from penstock_operator.plan.pool_keys import graph_of, is_of_cluster, kind_of_pool, member_of, title_of
from penstock_operator.plan.status import is_current
from penstock_operator.pool_nodes import PoolNodeReader
from penstock_operator.pool_quotas import PoolQuotaReader
from penstock_operator.pool_watch import PoolWatch
from penstock_operator.queue import Key
from penstock_operator.trim import Object

TICK_S: Final = 5.0
"""Longest time between two allocations, as a hold ends without an event. Chosen."""

GAP_S: Final = 0.1
"""Least time between two allocations: changes come in groups. Chosen."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _ActiveGrant:
    """The grant of a pool under which a graph acts; ``gpus`` before it has a share."""

    pool_uid: str
    serial: int
    gpus: int


@dataclass(frozen=True, slots=True)
class _Report:
    """What a graph's last reconcile found."""

    graph_uid: str
    graph: GraphDeployment
    bid: tuple[int, ...]


@dataclass(slots=True)
class _Matched:
    """The graphs that a pool's entries match.

    Attributes:
        members: Those that draw from it, by their names in the pool.
        elsewhere: Those that an older pool has, with its kind and name.
        unbounded: Those without a planner.
    """

    members: dict[str, PoolMember] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    unbounded: list[str] = field(default_factory=list)


class GpuPools:
    """All pools of an operator class, of a namespace or of the cluster."""

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
        self._watch = PoolWatch(
            client,
            cluster,
            namespace=namespace,
            operator_class=operator_class,
            on_change=self._wake_up,
            on_edit=self._edited,
        )
        self._grants: dict[Key, PoolGrant] = {}
        self._active: dict[Key, _ActiveGrant] = {}
        self._reports: dict[Key, _Report] = {}
        self._drains: dict[Key, DrainTimes] = {}
        self._gone: set[Key] = set()
        self._nodes = PoolNodeReader(client)
        self._quotas = PoolQuotaReader(client)
        self._wake = asyncio.Event()

    async def run(self, ready: asyncio.Event) -> None:
        """Share out until cancelled; ``ready`` is set once the pools are known, or there are no such kinds yet."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.run(ready), name="gpu pools")
            await ready.wait()
            while True:
                self._wake.clear()
                for key in self._watch.known():
                    await self._share_out(key)
                await asyncio.sleep(GAP_S)
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    def problem(self) -> str | None:
        """Return why pools may be seen late or not at all; None while all watches work."""
        return self._watch.problem()

    def all(self) -> list[Object]:
        """Return the pools as they are known now."""
        return [pool for key in self._watch.known() if (pool := self._watch.get(key)) is not None]

    def grant(self, raw: Object) -> PoolGrant | None:
        """Return what a graph may hold by its pool, and remember that it acts under that from now on; None: it is in none."""
        key = key_of(raw)
        found = self._grant(key, raw)
        if found is None:
            self._grants.pop(key, None)
        else:
            self._grants[key] = found
        self._wake.set()
        return found

    def status_of(self, key: Key) -> dict[str, Any]:
        """Return the part of a graph's status about its pool."""
        found = self._grants.get(key)
        return {} if found is None else {"pool": found.status}

    def report(self, key: Key, uid: str, graph: GraphDeployment, bid: tuple[int, ...]) -> None:
        """Take over what a graph wants: GPUs of each replica, in order of need."""
        known = _Report(uid, graph, bid)
        if self._reports.get(key) != known:
            self._reports[key] = known
            self._wake.set()

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        for each in (self._grants, self._active, self._reports, self._drains):
            each.pop(key, None)
        self._wake.set()

    def _grant(self, key: Key, raw: Object) -> PoolGrant | None:
        pools = list(self._watch.of(raw)) if _has_planner(raw) else []
        if not pools:
            self._active.pop(key, None)
            return self._orphaned(key[0], raw)
        pool, *younger = pools
        metadata, model = pool["metadata"], self._watch.model(pool)[0]
        member = member_of(key_of(pool), key)
        share = shares_of(pool.get("status")).get(member)
        active = self._active.get(key)
        if share is not None:
            active = _ActiveGrant(metadata["uid"], share.serial, share.gpus)
        elif active is None or active.pool_uid != metadata["uid"] or active.serial:
            active = _ActiveGrant(metadata["uid"], 0, self._held(key))
        self._active[key] = active
        lacking, guaranteed, wanted = _said_of(pool.get("status"), member)
        gpus = None if model is None else model.spec.gpus
        gpus = gpus_of(pool.get("status")) if gpus is None else gpus
        said = [lacking, own_bound(raw, wanted=wanted, pool_gpus=gpus or 0)]
        said += [f"{title_of(each)} matches it too and is younger, so it does not count" for each in younger]
        return PoolGrant(
            kind=kind_of_pool(key_of(pool)).kind,
            pool=metadata["name"],
            gpus=active.gpus,
            most=max(active.gpus, gpus or 0),
            message="; ".join(filter(None, said)),
            reclaim_s=None if model is None else model.spec.reclaim.grace_seconds,
            is_planner_silent=self._is_silent(raw),
            guaranteed=guaranteed,
        )

    def _orphaned(self, namespace: str, raw: Object) -> PoolGrant | None:
        """Return what a graph keeps of a pool that is gone; a pool of that name that does not match it releases it."""
        said = pool_drawn_from(raw)
        if said is None:
            return None
        kind, name, gpus = said.get("kind", GPU_POOL.kind), said["name"], said["grantedGpus"]
        if self._watch.get((namespace if kind == GPU_POOL.kind else "", name)) is not None:
            return None
        text = f"{kind} {name} is gone, so the graph keeps its {gpus} GPUs and gets no more; apply the pool again"
        return PoolGrant(kind, name, gpus, gpus, f"{text}, without an entry for this graph to release it")

    def _is_silent(self, raw: Object) -> bool:
        return is_silent((raw.get("status") or {}).get("planner") or {}, self._now_s())

    def _held(self, key: Key) -> int:
        return self._gates.held(key, self._cluster.snapshot(key).workers())

    def _wake_up(self) -> None:
        self._wake.set()

    def _edited(self, pool: Object, is_deleted: bool) -> None:  # noqa: FBT001 - the watch's callback
        if is_deleted:
            self._nodes.forget(pool["metadata"]["uid"])
        namespace = key_of(pool)[0]
        for graph in self._cluster.known():
            if not namespace or graph[0] == namespace:
                self._enqueue(graph, True)

    async def _share_out(self, key: Key) -> None:
        try:
            await self._step(key)
        except ConflictError:  # the watch brings what this process did not know, and with it the next try
            log.info("gpu pool changed meanwhile", namespace=key[0], name=key[1])
        except ClusterError as exc:
            log.warning("gpu pool not shared out", namespace=key[0], name=key[1], error=str(exc))

    async def _step(self, key: Key) -> None:
        pool, now_s = self._watch.get(key), self._now_s()
        if pool is None:
            return
        old, generation = pool.get("status"), pool["metadata"].get("generation", 0)
        model, wrong = self._watch.model(pool)
        if model is None:
            await self._write(key, pool, refused_status([wrong], old=old, generation=generation, now_s=now_s))
            return
        before = shares_of(old)
        matched = self._matched(pool, before, await self._unreported(key, before))
        members = matched.members
        nodes = await self._nodes.read(
            model,
            pool["metadata"]["uid"],
            generation=generation,
            graphs={graph_of(key, name) for name in members},
        )
        counted = ((old or {}).get("gpus") or {}).get("counted")
        found = share_out(model, members, before, now_s, nodes=nodes, counted=counted)
        if found is None:
            for name, each in members.items():
                if name not in before and each.arrived_with is None:
                    self._enqueue(graph_of(key, name), True)
            return
        problems = problems_of(model, members, matched.elsewhere, matched.unbounded, found.gpus)
        problems += await self._quota_problems(key, model, members, found.total)
        status = pool_status(
            model, members, found, problems, old=old, generation=generation, now_s=now_s, nodes=nodes
        )
        await self._write(key, pool, status)
        for name, share in found.shares.items():
            was = before.get(name)
            is_new = was is None or (was.gpus, was.serial) != (share.gpus, share.serial)
            if is_new or _said_of(old, name) != _said_of(status, name) or gpus_of(old) != found.gpus:
                self._enqueue(graph_of(key, name), True)
        for name, (lowered, text) in moved(before, found, model.title).items():
            graph = self._cluster.snapshot(graph_of(key, name)).graph
            if graph is not None:
                reason = "GpusReclaimed" if lowered else "GpusGranted"
                await self._recorder.emit(graph, EventMessage(reason, text, "ShareOut"))

    async def _quota_problems(
        self, key: Key, model: PoolObject, members: Mapping[str, PoolMember], total: int
    ) -> list[str]:
        resource = model.spec.resource
        if not is_of_cluster(key):
            return await self._quotas.problems(resource, key[0], total)
        guaranteed = Counter[str]()
        for name, each in members.items():
            if each.entry is not None:
                guaranteed[graph_of(key, name)[0]] += each.entry.guaranteed_gpus
        return await self._quotas.cluster_problems(resource, guaranteed)

    async def _unreported(self, pool: Key, members: Iterable[str]) -> dict[Key, Object]:
        """Return the graphs of which the watch has shown workers alone, as after a restart; those that are gone left out."""
        self._gone = {each for each in self._gone if self._cluster.snapshot(each).graph is None}
        missing = {
            graph for name in members if self._cluster.snapshot(graph := graph_of(pool, name)).graph is None
        }
        found: dict[Key, Object] = {}
        for namespace, name in missing - self._gone:
            try:
                found[namespace, name] = await self._client.get(GRAPH_DEPLOYMENT, name, namespace=namespace)
            except NotFoundError:
                self._gone.add((namespace, name))
        return found

    def _matched(self, pool: Object, shares: Mapping[str, Any], unreported: Mapping[Key, Object]) -> _Matched:
        key, found = key_of(pool), _Matched()
        for graph in self._cluster.known():
            if not is_of_cluster(key) and graph[0] != key[0]:
                continue
            name = member_of(key, graph)
            raw = self._cluster.snapshot(graph).graph or unreported.get(graph)
            if raw is None:
                if name in shares and (held := self._held(graph)):  # workers of a graph that is gone
                    found.members[name] = PoolMember(None, bid=(), held=held, leaving=held)
                continue
            if not self._watch.covers(pool, raw):
                continue
            if not _has_planner(raw):
                found.unbounded.append(name)
                continue
            first = next(self._watch.of(raw))
            if first["metadata"]["uid"] != pool["metadata"]["uid"]:
                found.elsewhere[name] = title_of(first)
                continue
            grant = self._grants.get(graph)
            if grant is not None and grant.is_planner_silent != self._is_silent(raw):
                self._enqueue(graph, True)
            found.members[name] = self._member(graph, name, raw, pool)
        return found

    def _member(self, key: Key, name: str, raw: Object, pool: Object) -> PoolMember:
        metadata, uid = raw["metadata"], pool["metadata"]["uid"]
        workers = self._cluster.snapshot(key).workers()
        rows = {row["name"]: row for row in (pool.get("status") or {}).get("graphs") or ()}
        drains = drains_after(self._drains.get(key), rows.get(name, {}), workers, self._now_s())
        self._drains[key] = drains
        active, report = self._active.get(key), self._reports.get(key)
        is_active = active is not None and active.pool_uid == uid
        if report is not None and report.graph_uid != metadata["uid"]:
            report = None
        bid = None if report is None else report.bid
        if metadata.get("deletionTimestamp"):
            bid = ()
        return PoolMember(
            entry=self._watch.entry(pool, raw),
            graph=None if report is None else report.graph,
            bid=bid,
            held=self._held(key),
            leaving=leaving_gpus(workers),
            serial=active.serial if active is not None and is_active else None,
            arrived_with=active.gpus if active is not None and is_active else None,
            drains=drains,
            created=metadata.get("creationTimestamp", ""),
        )

    async def _write(self, key: Key, pool: Object, status: dict[str, Any]) -> None:
        if is_current(status, pool.get("status")):
            return
        known = pool["metadata"]
        metadata = {
            each: known[each] for each in ("name", "namespace", "uid", "resourceVersion") if each in known
        }
        said = kind_of_pool(key).of(metadata, status=status)
        answer = await self._client.apply(said, field_manager=OPERATOR, subresource="status")
        self._watch.note(answer)


def _said_of(status: Mapping[str, Any] | None, name: str) -> tuple[str, int, int]:
    """Return what a graph's status repeats of its pool's."""
    rows = {row["name"]: row for row in (status or {}).get("graphs") or ()}
    row = rows.get(name, {})
    return lacking_in(status, name), row.get("guaranteed", 0), row.get("wanted", 0)


def _has_planner(raw: Object) -> bool:
    planner = raw["spec"].get("planner") or {}
    return bool(planner.get("enabled", True))
