"""Drives the allocator of GPU pools: what graphs may hold goes into a GpuPool's status, and only then to the graphs.

A graph acts under the grant that its reconcile began with, which `standing` returns and remembers; one reconcile of a graph
runs at a time, so that nothing acts under an older one any more. The status is written at the version that was read: after a
restart, or beside a second operator, no grant is given from an older state. What this module remembers saves no truth; a
new process waits for each new graph's first reconcile before it shares out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import GpuPool, GraphDeployment
from penstock.core.errors import ClusterError, ConflictError, NotFoundError, UnavailableError
from penstock.core.logs import get_logger
from penstock.gpu_pool.waiting import DrainTimes
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.informer import Informer, key_of
from penstock.kube.kinds import GPU_POOL, GRAPH_DEPLOYMENT
from penstock.kube.objects.names import OPERATOR
from penstock_operator.cluster import Cluster, Enqueue
from penstock_operator.gates import Gates
from penstock_operator.plan.grant import is_silent
from penstock_operator.plan.pool import (
    PoolMember,
    drains_after,
    entry_of,
    lacking_in,
    leaving_gpus,
    moved,
    pool_gpus,
    pool_status,
    problems_of,
    refused_status,
    share_out,
    shares_of,
)
from penstock_operator.plan.status import is_current
from penstock_operator.pool_nodes import PoolNodeReader
from penstock_operator.pool_quotas import PoolQuotaReader
from penstock_operator.queue import Key
from penstock_operator.trim import Object, version_of
from penstock_operator.validity import message_of, validated

TICK_S: Final = 5.0
"""Longest time between two allocations, as a hold ends without an event. Chosen."""

GAP_S: Final = 0.1
"""Least time between two allocations: changes come in groups. Chosen."""

SERVED_S: Final = 30.0
"""Between two looks for the kind where the API server does not serve it. Chosen."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a graph's pool lets it hold.

    Attributes:
        pool: Name of the GpuPool.
        gpus: Most GPUs of its existing workers.
        most: GPUs of the entire pool; the budget of a graph that states none.
        reclaim_s: Longest drain of a worker of which the pool takes the GPU back; None: the worker's own.
        guaranteed: GPUs that the graph gets as soon as it wants them.
        is_planner_silent: What its planner last wanted of the pool counts no more.
        message: Who holds what the graph lacks, or what keeps its grant from changing; empty: nothing.
    """

    pool: str
    gpus: int
    most: int
    message: str = ""
    reclaim_s: float | None = None
    is_planner_silent: bool = False
    guaranteed: int = 0

    @property
    def status(self) -> dict[str, Any]:
        """As a graph's status has it."""
        gpus = {"grantedGpus": self.gpus, "guaranteedGpus": self.guaranteed}
        return {"name": self.pool, **gpus, "message": self.message}


@dataclass(frozen=True, slots=True)
class _Acting:
    """Under which grant of which pool a graph acts; ``gpus`` before it has a share."""

    pool_uid: str
    serial: int
    gpus: int


@dataclass(frozen=True, slots=True)
class _Report:
    """What a graph's last reconcile found."""

    graph_uid: str
    graph: GraphDeployment
    bid: tuple[int, ...]


class GpuPools:
    """All GpuPools of a namespace, or of the cluster."""

    def __init__(
        self,
        client: KubeClient,
        cluster: Cluster,
        recorder: EventRecorder,
        gates: Gates,
        *,
        namespace: str | None,
        enqueue: Enqueue,
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._recorder = recorder
        self._gates = gates
        self._enqueue = enqueue
        self._informer = Informer(client, GPU_POOL, namespace=namespace, on_change=self._changed)
        self._answers: dict[Key, Object] = {}
        self._generations: dict[Key, Any] = {}
        self._models: dict[tuple[str, Any], tuple[GpuPool | None, str]] = {}
        self._standings: dict[Key, Standing] = {}
        self._acting: dict[Key, _Acting] = {}
        self._reports: dict[Key, _Report] = {}
        self._drains: dict[Key, DrainTimes] = {}
        self._gone: set[Key] = set()
        self._nodes = PoolNodeReader(client)
        self._quotas = PoolQuotaReader(client)
        self._wake = asyncio.Event()

    async def run(self, ready: asyncio.Event) -> None:
        """Share out until cancelled; ``ready`` is set once the pools are known, or there is no such kind yet."""
        while not await self._is_served():
            ready.set()
            await asyncio.sleep(SERVED_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run(), name="gpu pools")
            await self._informer.synced.wait()
            ready.set()
            while True:
                self._wake.clear()
                for key in list(self._informer.objects):
                    await self._share_out(key)
                await asyncio.sleep(GAP_S)
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _is_served(self) -> bool:
        while True:
            try:
                return await self._cluster.knows(GPU_POOL)
            except UnavailableError as exc:
                log.warning("kind not looked up", kind=GPU_POOL.kind, error=str(exc), retry_s=TICK_S)
                await asyncio.sleep(TICK_S)

    def all(self) -> list[Object]:
        """Return the pools as they are known now."""
        return [self._newest(key) for key in self._informer.objects]

    def standing(self, raw: Object) -> Standing | None:
        """Return what a graph may hold by its pool, and remember that it acts under that from now on; None: it is in none."""
        key = key_of(raw)
        found = self._standing(key, raw)
        if found is None:
            self._standings.pop(key, None)
        else:
            self._standings[key] = found
        self._wake.set()
        return found

    def status_of(self, key: Key) -> dict[str, Any]:
        """Return the part of a graph's status about its pool."""
        found = self._standings.get(key)
        return {} if found is None else {"pool": found.status}

    def report(self, key: Key, uid: str, graph: GraphDeployment, bid: tuple[int, ...]) -> None:
        """Take over what a graph wants: GPUs of each replica, in order of need."""
        known = _Report(uid, graph, bid)
        if self._reports.get(key) != known:
            self._reports[key] = known
            self._wake.set()

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        for each in (self._standings, self._acting, self._reports, self._drains):
            each.pop(key, None)
        self._wake.set()

    def _standing(self, key: Key, raw: Object) -> Standing | None:
        pool = self._pool_of(key[0], raw)
        if pool is None:
            self._acting.pop(key, None)
            return self._orphaned(key[0], raw)
        metadata = pool["metadata"]
        model, _ = self._model(pool)
        share = shares_of(pool.get("status")).get(key[1])
        acting = self._acting.get(key)
        if share is not None:
            acting = _Acting(metadata["uid"], share.serial, share.gpus)
        elif acting is None or acting.pool_uid != metadata["uid"] or acting.serial:
            acting = _Acting(metadata["uid"], 0, self._held(key))
        self._acting[key] = acting
        most = acting.gpus if model is None else model.spec.gpus
        reclaim_s = None if model is None else model.spec.reclaim.grace_seconds
        message = lacking_in(pool.get("status"), key[1])
        entry = None if model is None else entry_of(model, key[1], raw["metadata"].get("labels") or {})
        guaranteed = 0 if entry is None else entry.guaranteed_gpus
        return Standing(metadata["name"], acting.gpus, most, message, reclaim_s, _is_silent(raw), guaranteed)

    def _orphaned(self, namespace: str, raw: Object) -> Standing | None:
        """Return what a graph keeps of a pool that is gone; a pool of that name that does not match it releases it."""
        said = (raw.get("status") or {}).get("pool")
        if not said or (namespace, said["name"]) in self._informer.objects:
            return None
        name, gpus = said["name"], said["grantedGpus"]
        text = f"GpuPool {name} is gone, so the graph keeps its {gpus} GPUs and gets no more; apply the pool again"
        return Standing(name, gpus, gpus, f"{text}, without an entry for this graph to release it")

    def _pools(self, namespace: str) -> Iterator[Object]:
        """Yield a namespace's pools, the oldest first."""
        found = [self._newest(key) for key in self._informer.objects if key[0] == namespace]
        yield from sorted(
            found, key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"])
        )

    def _pool_of(self, namespace: str, raw: Object) -> Object | None:
        if not _has_planner(raw):
            return None
        return next((each for each in self._pools(namespace) if self._covers(each, raw)), None)

    def _covers(self, pool: Object, raw: Object) -> bool:
        """Return whether a pool is for a graph; one whose manifest is wrong keeps the graphs that it has."""
        model, _ = self._model(pool)
        metadata = raw["metadata"]
        if model is None:
            return metadata["name"] in shares_of(pool.get("status"))
        return entry_of(model, metadata["name"], metadata.get("labels") or {}) is not None

    def _newest(self, key: Key) -> Object:
        """Return a pool as the watch shows it, or as the answer to a later write of this process does."""
        shown, answer = self._informer.objects[key], self._answers.get(key)
        if answer is not None and answer["metadata"]["uid"] == shown["metadata"]["uid"]:
            return max((shown, answer), key=lambda each: version_of(each["metadata"]))
        return shown

    def _model(self, pool: Object) -> tuple[GpuPool | None, str]:
        """Return a pool as its model, or what is wrong with it."""
        identity = (pool["metadata"]["uid"], pool["metadata"].get("generation"))
        if identity not in self._models:
            model, problems = validated(GpuPool, pool)
            self._models[identity] = (model, message_of(problems))
        return self._models[identity]

    def _held(self, key: Key) -> int:
        return self._gates.held(key, self._cluster.snapshot(key).workers())

    def _changed(self, change: str, pool: Object) -> None:
        key = key_of(pool)
        generation = None if change == "DELETED" else pool["metadata"].get("generation")
        if change == "DELETED":
            self._answers.pop(key, None)
            self._nodes.forget(pool["metadata"]["uid"])
            for each in [each for each in self._models if each[0] == pool["metadata"]["uid"]]:
                del self._models[each]
        if self._generations.get(key) != generation:
            self._generations[key] = generation
            for graph in self._cluster.known():
                if graph[0] == key[0]:
                    self._enqueue(graph, True)
        self._wake.set()

    async def _share_out(self, key: Key) -> None:
        try:
            await self._step(key)
        except ConflictError:  # the watch brings what this process did not know, and with it the next try
            log.info("gpu pool changed meanwhile", namespace=key[0], name=key[1])
        except ClusterError as exc:
            log.warning("gpu pool not shared out", namespace=key[0], name=key[1], error=str(exc))

    async def _step(self, key: Key) -> None:
        if key not in self._informer.objects:
            return
        pool, now_s = self._newest(key), time.time()
        old, generation = pool.get("status"), pool["metadata"].get("generation", 0)
        model, wrong = self._model(pool)
        if model is None:
            await self._write(key, pool, refused_status([wrong], old=old, generation=generation, now_s=now_s))
            return
        before = shares_of(old)
        unreported = await self._unreported(key[0], before)
        members, elsewhere, unbounded = self._members(pool, model, before, unreported)
        nodes = await self._nodes.read(
            model, pool["metadata"]["uid"], generation=generation, namespace=key[0], graphs=members
        )
        found = share_out(model, members, before, now_s, nodes=nodes)
        if found is None:
            for name, each in members.items():
                if name not in before and each.arrived_with is None:
                    self._enqueue((key[0], name), True)
            return
        problems = problems_of(model, members, elsewhere, unbounded)
        problems += await self._quotas.problems(model, key[0], pool_gpus(model, nodes))
        status = pool_status(
            model, members, found, problems, old=old, generation=generation, now_s=now_s, nodes=nodes
        )
        await self._write(key, pool, status)
        for name, share in found.shares.items():
            was = before.get(name)
            is_new = was is None or (was.gpus, was.serial) != (share.gpus, share.serial)
            if is_new or lacking_in(old, name) != lacking_in(status, name):
                self._enqueue((key[0], name), True)
        for name, (lowered, text) in moved(before, found, model.name).items():
            graph = self._cluster.snapshot((key[0], name)).graph
            if graph is not None:
                reason = "GpusReclaimed" if lowered else "GpusGranted"
                await self._recorder.emit(graph, EventMessage(reason, text, "ShareOut"))

    async def _unreported(self, namespace: str, names: Iterable[str]) -> dict[Key, Object]:
        """Return the graphs of which the watch has shown workers alone, as after a restart; those that are gone left out."""
        found: dict[Key, Object] = {}
        missing = {key for name in names if self._cluster.snapshot(key := (namespace, name)).graph is None}
        self._gone = {key for key in self._gone if key[0] != namespace or key in missing}
        for key in missing - self._gone:
            try:
                found[key] = await self._client.get(GRAPH_DEPLOYMENT, key[1], namespace=key[0])
            except NotFoundError:
                self._gone.add(key)
        return found

    def _members(
        self,
        pool: Object,
        model: GpuPool,
        shares: Mapping[str, Any],
        unreported: Mapping[Key, Object],
    ) -> tuple[dict[str, PoolMember], dict[str, str], list[str]]:
        """Return a pool's graphs, those that an older pool has, and those without a planner."""
        namespace, uid = pool["metadata"]["namespace"], pool["metadata"]["uid"]
        members: dict[str, PoolMember] = {}
        elsewhere: dict[str, str] = {}
        unbounded: list[str] = []
        for key in self._cluster.known():
            if key[0] != namespace:
                continue
            raw = self._cluster.snapshot(key).graph or unreported.get(key)
            held = self._held(key)
            if raw is None:
                if key[1] in shares and held:  # workers of a graph that is gone
                    members[key[1]] = PoolMember(None, bid=(), held=held, leaving=held)
                continue
            if not self._covers(pool, raw):
                continue
            if not _has_planner(raw):
                unbounded.append(key[1])
                continue
            first = self._pool_of(namespace, raw)
            if first is not None and first["metadata"]["uid"] != uid:
                elsewhere[key[1]] = first["metadata"]["name"]
                continue
            standing = self._standings.get(key)
            if standing is not None and standing.is_planner_silent != _is_silent(raw):
                self._enqueue(key, True)
            members[key[1]] = self._member(key, raw, model, pool, held)
        return members, elsewhere, unbounded

    def _member(self, key: Key, raw: Object, model: GpuPool, pool: Object, held: int) -> PoolMember:
        metadata, uid, workers = (
            raw["metadata"],
            pool["metadata"]["uid"],
            self._cluster.snapshot(key).workers(),
        )
        rows = {row["name"]: row for row in (pool.get("status") or {}).get("graphs") or ()}
        drains = drains_after(self._drains.get(key), rows.get(key[1], {}), workers, time.time())
        self._drains[key] = drains
        acting, report = self._acting.get(key), self._reports.get(key)
        is_acting = acting is not None and acting.pool_uid == uid
        if report is not None and report.graph_uid != metadata["uid"]:
            report = None
        bid = None if report is None else report.bid
        if metadata.get("deletionTimestamp"):
            bid = ()
        return PoolMember(
            entry=entry_of(model, key[1], metadata.get("labels") or {}),
            graph=None if report is None else report.graph,
            bid=bid,
            held=held,
            leaving=leaving_gpus(workers),
            serial=acting.serial if acting is not None and is_acting else None,
            arrived_with=acting.gpus if acting is not None and is_acting else None,
            drains=drains,
        )

    async def _write(self, key: Key, pool: Object, status: dict[str, Any]) -> None:
        if is_current(status, pool.get("status")):
            return
        metadata = {each: pool["metadata"][each] for each in ("name", "namespace", "uid", "resourceVersion")}
        said = GPU_POOL.of(metadata, status=status)
        self._answers[key] = await self._client.apply(said, field_manager=OPERATOR, subresource="status")


def _is_silent(raw: Object) -> bool:
    return is_silent((raw.get("status") or {}).get("planner") or {}, time.time())


def _has_planner(raw: Object) -> bool:
    planner = raw["spec"].get("planner") or {}
    return bool(planner.get("enabled", True))
