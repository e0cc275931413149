"""The planner process on Kubernetes: leader election, watches, and for each graph its metrics sources, ledger, dashboard and loop."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.core.clock import SimulatedClock
from penstock.core.http.client import ConnectionPool
from penstock.core.http.loop import run_until
from penstock.core.http.tls import files_of
from penstock.core.local_state import state_dir
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage
from penstock.kube.lease import STOP_S, Election, election_of
from penstock.kube.objects.names import (
    DECISION_ANNOTATION,
    OPERATOR_CLASS,
    PLANNER,
    lease_name,
)
from penstock_planner.cluster.fleet import Fleet, PlannerJob, last_report
from penstock_planner.cluster.profiles import POLL_S, ConfigMapProfiles, EngineProfile, memory_of
from penstock_planner.cluster.status import (
    DecisionEventWriter,
    EventListener,
    PlannerReason,
    Report,
    StatusListener,
    StatusWriter,
    silent_after_s,
)
from penstock_planner.cluster.watch import GraphWatch, Key, Watch
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.decide.state import Learned
from penstock_planner.files import FileThread
from penstock_planner.ledger import FILE_NAME
from penstock_planner.loop import PlannerClock, PlannerLoop
from penstock_planner.metrics import PlannerMetrics, serve
from penstock_planner.observers import Observer, Observers
from penstock_planner.readiness import Readiness
from penstock_planner.service import boot_id, made_folder, recording
from penstock_planner.sources.base import ReadingSource, SourceChain
from penstock_planner.sources.frontend import FrontendMetrics, sources_of
from penstock_planner.sources.prometheus import GraphLabels, PrometheusSource
from penstock_planner.sources.router import RouterSource
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource
from penstock_planner.targets.kubernetes import UNSCHEDULABLE_S, KubernetesTarget

SPREAD_S: Final = 2.0
"""Real seconds (2) over which the starts of the planner loops are spread, so that they do not scrape and decide at the same time.

Chosen: two scrape intervals. A graph's offset is computed from its name, so it is the same after a restart.
"""

LEDGER_BYTES: Final = 8 << 20
"""Size (8 MiB) at which a ledger file, a graph's decision log, is rotated.

Chosen: it holds four hours at the default intervals, and the previous file as much again; the ledgers of 200 graphs fit into 4 GB.
"""

CLOSE_GRACE_S: Final = 1.0
"""Real seconds for which the metrics endpoint still serves a last scrape at shutdown."""

SPEED: Final = 1.0
"""Simulated seconds per real second; 1, since pods run in real time."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterService:
    """Settings of one planner process on Kubernetes.

    Attributes:
        overrides: Options by kebab-case name that replace the options of every graph.
        engine_profile: Function that computes the performance profile of a graph whose engines are simulated.
        namespace: Namespace to watch; None uses the default namespace of the Kubernetes client.
        all_namespaces: Whether all namespaces are watched.
        graph: Name of the only graph to plan; None plans all.
        operator_class: Name of the Penstock installation whose graphs are planned, as in their ``spec.operatorClass``.
        log_dir: Folder of ledgers (decision logs) and dashboards, in NAMESPACE/GRAPH below it. None disables dashboards
            and puts the ledgers into Penstock's state folder.
        host: Address on which metrics are served.
        metrics_port: Port on which metrics are served; 0 serves none.
        unschedulable_s: Real seconds after which an unschedulable pod counts as failed.
        profile_poll_s: Real seconds between two reads of a graph's performance profile.
    """

    overrides: Mapping[str, Any]
    engine_profile: EngineProfile
    namespace: str | None = None
    all_namespaces: bool = False
    graph: str | None = None
    operator_class: str = OPERATOR_CLASS
    log_dir: Path | None = None
    host: str = "127.0.0.1"
    metrics_port: int = 0
    unschedulable_s: float = UNSCHEDULABLE_S
    profile_poll_s: float = POLL_S

    def folder(self, key: Key) -> Path:
        """Return the folder of one graph's ledger (the planner's decision log), state file and dashboard.

        Args:
            key: Namespace and name of the graph.
        """
        base = self.log_dir if self.log_dir is not None else state_dir() / "planner"
        return base / key[0] / key[1]


async def run_until_stopped(service: ClusterService, client: KubeClient, stop: asyncio.Event) -> None:
    """Plan the graphs of a cluster whenever this process is the leader (holds the Kubernetes Lease), until ``stop`` is set.

    Args:
        service: Settings of the process.
        client: Kubernetes client.
        stop: Event that ends the process.

    Raises:
        ConfigError: the metrics port is in use.
    """
    namespace = client.namespace if service.all_namespaces else service.namespace or client.namespace
    lease = lease_name(
        PLANNER,
        cluster_wide=service.all_namespaces,
        graph=service.graph,
        operator_class=service.operator_class,
    )
    election = election_of(
        client, "planner", namespace=namespace, name=lease, operator_class=service.operator_class
    )
    metrics = PlannerMetrics()
    planner = _Candidate(service, client, election, metrics)
    server = None
    log.info(
        "planner for Kubernetes",
        identity=election.identity,
        namespace="all" if service.all_namespaces else namespace,
        graph_name=service.graph,
        overrides=dict(service.overrides),
    )
    try:
        if service.metrics_port:
            server = await serve(
                metrics,
                service.host,
                service.metrics_port,
                unready=planner.unready,
                fault=lambda: election.overdue,
            )
        is_complete = await run_until(stop, election.lead(planner.run), grace_s=STOP_S)
        log.info("planner stopped", is_complete=is_complete)
    finally:
        if server is not None:
            await server.close(grace_s=CLOSE_GRACE_S)


class _Candidate:
    """This process as a candidate of the leader election: leader or standby."""

    def __init__(
        self, service: ClusterService, client: KubeClient, election: Election, metrics: PlannerMetrics
    ) -> None:
        self._service, self._client, self._election, self._metrics = service, client, election, metrics
        self._session: LeaderSession | None = None

    async def run(self) -> None:
        """Plan as the leader until cancelled."""
        session = LeaderSession(self._service, self._client, self._election, metrics=self._metrics)
        self._session = session
        try:
            await session.run()
        finally:
            self._session = None

    def unready(self) -> str | None:
        """Return the reason for which this process is neither a working leader nor a working standby; None if it is one."""
        return self._election.problem if self._session is None else self._session.problem()


class LeaderSession:
    """One term of leadership of this process. All state is created at its start, so that none is left from an earlier term.

    Attributes:
        status: Writer of the graphs' statuses.
        fleet: Planner loops of the graphs.
    """

    def __init__(
        self,
        service: ClusterService,
        client: KubeClient,
        election: Election,
        *,
        metrics: PlannerMetrics,
    ) -> None:
        """Create the state of a term; `run` starts it.

        Args:
            service: Settings of the process.
            client: Kubernetes client. The session writes through a wrapper of the client, whose writes fail while this
                process is not the leader.
            election: Leader election that this process has won.
            metrics: Metrics of the process.
        """
        self._service = service
        self._metrics = metrics
        self._pool = ConnectionPool()
        self._pages = MetricsPages(self._pool, real_now_s=time.monotonic)
        self._clock = SimulatedClock(SPEED)
        self._files = FileThread()
        self._readiness = Readiness()
        namespace = None if service.all_namespaces else service.namespace or client.namespace
        fenced = client.fenced(lambda: election.is_leading)
        self._watch = Watch(
            fenced, namespace=namespace, graph=service.graph, operator_class=service.operator_class
        )
        self._events = DecisionEventWriter(fenced, instance=election.identity)
        self._client = fenced
        self.status = StatusWriter(self._client, self._watch.live)
        self.fleet = Fleet(
            self._watch,
            overrides=dict(service.overrides),
            profiles=ConfigMapProfiles(
                fenced, overrides=service.overrides, engine_profile=service.engine_profile
            ),
            work=self._plan,
            say=self.status.say,
            forget=self._forget,
            poll_s=service.profile_poll_s,
        )
        self._watch.subscribe(self.fleet.enqueue)

    def problem(self) -> str | None:
        """Return the reason for which this process, the leader, cannot plan; None if it can.

        A graph without metrics does not count as such a reason.
        """
        return self._watch.problem() or self._readiness.problem()

    async def run(self) -> None:
        """Watch the cluster and plan its graphs until cancelled, which happens when leadership is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch.run())
                group.create_task(self._events.run())
                group.create_task(self.status.run())
                await self._watch.synced()
                group.create_task(self.fleet.run())
        finally:
            await asyncio.to_thread(self._files.close)
            await self._pool.close()

    async def _plan(self, job: PlannerJob, stop: asyncio.Event) -> None:
        """Plan one graph until ``stop`` is set."""
        async with self._pages_of(job) as pages:
            await self._plan_by(pages, job, stop)

    async def _plan_by(self, pages: MetricsPages, job: PlannerJob, stop: asyncio.Event) -> None:
        folder = made_folder(self._service.folder(job.key))
        memory = await memory_of(
            self._client,
            job.key[0],
            job.plan.options,
            job.graph,
            has_ledger=(folder / FILE_NAME).exists(),
        )
        view = self._watch.of(job.key)
        sources = self._sources(job, view, pages)
        stats = self._metrics.of(*job.key)
        is_chosen = self._service.log_dir is not None
        try:
            with recording(
                folder,
                job.plan.config,
                stats,
                self._files,
                graph=job.graph,
                is_chosen=is_chosen,
                rotate_bytes=LEDGER_BYTES,
            ) as (ledger, files):
                await self._spread(job.key, stop)
                interval_s = self._clock.to_real_s(job.plan.config.metric_pulling_interval_s)
                ticks = self._readiness.begin(*job.key, interval_s=interval_s)
                loop = PlannerLoop(
                    self._settings(job, memory),
                    target=KubernetesTarget(
                        self._client,
                        job.graph,
                        view,
                        emit=lambda message: self._emit(job.key, message),
                        unschedulable_s=self._service.unschedulable_s,
                    ),
                    source=SourceChain(sources, now_s=self._clock.now_s, real_now_s=time.monotonic),
                    ledger=ledger,
                    time=PlannerClock(self._clock),
                    observers=Observers([stats, ticks, *self._listeners(job, sources), files]),
                )
                await loop.run(stop)
        finally:
            self._readiness.end(*job.key)
            for source in sources:
                if isinstance(source, PrometheusSource):
                    source.close()

    def _settings(self, job: PlannerJob, memory: Learned) -> PlannerSettings:
        options = job.plan.options
        return PlannerSettings(
            config=job.plan.config,
            max_age_s=options.metrics_max_age,
            adjustment_deadline_s=options.adjustment_deadline,
            timeline=f"{boot_id()}@{SPEED:g}",
            about={
                "namespace": job.key[0],
                "graph": job.key[1],
                "environment": "kubernetes",
                "served_model_name": options.served_model_name,
                "speed": SPEED,
            },
            first_sequence=self._newest_sequence(job),
            memory=memory,
        )

    def _newest_sequence(self, job: PlannerJob) -> int:
        """Return the number of the newest decision that the cluster's objects name, in case the ledger was lost."""
        ids = [last_report(job.live, PlannerReason.OBSERVING, "").decision_id]
        for service in job.plan.services.values():
            adapter = self._watch.of(job.key).adapter(service.name)
            ids.append(
                ((adapter or {}).get("metadata", {}).get("annotations") or {}).get(DECISION_ANNOTATION, "")
            )
        return max((int(each[1:]) for each in ids if each[:1] == "d" and each[1:].isdigit()), default=0)

    def _listeners(self, job: PlannerJob, sources: Sequence[ReadingSource]) -> list[Observer]:
        routers = [each for each in sources if isinstance(each, RouterSource)]
        limit_s = silent_after_s(job.graph.spec.router.health.interval_seconds)
        status = StatusListener(
            last_report(job.live, PlannerReason.OBSERVING, ""),
            job.plan.config,
            say=lambda report: self._say(job, report),
            paused=job.plan.paused,
            unused=job.plan.unused,
            silent=lambda: [
                name for each in routers for name, age_s in each.ages_s.items() if age_s > limit_s
            ],
        )
        return [status, EventListener(lambda message: self._emit(job.key, message))]

    @asynccontextmanager
    async def _pages_of(self, job: PlannerJob) -> AsyncIterator[MetricsPages]:
        """Yield the metrics reader for a graph's processes; it verifies https workers by the CAs in the graph's ``engine.tls``."""
        tls = job.graph.spec.engine.tls
        if tls is None:
            yield self._pages
            return
        pool = ConnectionPool(tls=files_of(tls))
        try:
            yield MetricsPages(pool, real_now_s=time.monotonic)
        finally:
            await pool.close()

    def _sources(self, job: PlannerJob, view: GraphWatch, pages: MetricsPages) -> list[ReadingSource]:
        frontend = FrontendMetrics(pages, view.routers, ScrapeSource(pages), self._clock)
        labels = GraphLabels(job.plan.options.served_model_name, graph=job.key[1], namespace=job.key[0])
        return sources_of(job.plan.options, job.graph, frontend, labels)

    async def _spread(self, key: Key, stop: asyncio.Event) -> None:
        offset_s = SPREAD_S * zlib.crc32("/".join(key).encode()) / 2**32
        await PlannerClock(self._clock).sleep_until(self._clock.now_s() + offset_s, stop)

    def _say(self, job: PlannerJob, report: Report) -> None:
        live = self._watch.live(job.key) or job.live
        generation = live["metadata"].get("generation", 0)
        wants = report.wants if self._watch.of(job.key).grant() is not None else {}
        self.status.say(job.key, replace(report, generation=generation, wants=wants))

    def _emit(self, key: Key, message: EventMessage) -> None:
        live = self._watch.live(key)
        if live is not None:
            self._events.emit(live, message)

    def _forget(self, key: Key) -> None:
        self.status.forget(key)
        self._metrics.forget(*key)
