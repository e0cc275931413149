"""A planner process outside Kubernetes: creates sources, ledger, dashboard and metrics endpoint for one loop, and runs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.api import GraphDeployment
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError, unwritable
from penstock.core.http.client import ConnectionPool
from penstock.core.http.tls import files_of
from penstock.core.logs import get_logger
from penstock.performance.profile import PerformanceProfile
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.dashboard import Dashboard
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.state import Learned
from penstock_planner.files import FileObservers, FileThread
from penstock_planner.ledger import FILE_NAME, Ledger
from penstock_planner.loop import PlannerClock, PlannerLoop
from penstock_planner.metrics import PlannerMetrics, serve
from penstock_planner.observers import Observer, Observers
from penstock_planner.options import PlannerOptions
from penstock_planner.readiness import Readiness
from penstock_planner.sources.base import ReadingSource, SourceChain
from penstock_planner.sources.frontend import FrontendMetrics, sources_of
from penstock_planner.sources.prometheus import GraphLabels
from penstock_planner.sources.router import at
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource
from penstock_planner.stats import PlannerStats
from penstock_planner.targets.base import Target

MIN_MAX_AGE_S = 1.0
"""Minimum of the metrics' maximum age, in real seconds.

The router polls workers at intervals of 0.1 s or more, so with a large time factor even a recent value is many simulated seconds old.
"""

MIN_DEADLINE_S = 30.0
"""Minimum of the deadline for a new replica, in real seconds, since a process takes seconds to start at any time factor."""

LEDGER_BYTES = 32 << 20
"""Size (32 MiB) at which the ledger, the decision log, is rotated.

Chosen: half a day of mode adaptive in real time; the previous file holds as much again."""

CLOSE_GRACE_S = 1.0
"""Real seconds for which the metrics endpoint still serves a last scrape at shutdown."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannerService:
    """Settings and inputs of one planner process outside Kubernetes.

    Attributes:
        options: Options of the planner.
        graph: Graph to plan; None if ``--graph`` was not given, so that roles and bounds are the defaults.
        speed: Time factor, simulated seconds per real second.
        host: Address on which metrics are served.
        metrics_port: Port on which metrics are served; 0 serves none.
        graph_file: Path given as ``--graph``, recorded in the ledger (decision log) so that its readers find the graph;
            None if there is none.
        performance: Performance profile of mode sla; None in other modes.
        memory: Learned state of another graph's planner, used if the ledger holds none.
        about: Further facts for the ledger's header, by name.
    """

    options: PlannerOptions
    graph: GraphDeployment | None
    speed: float
    host: str
    metrics_port: int
    graph_file: Path | None = None
    performance: PerformanceProfile | None = None
    memory: Learned = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> PlannerSettings:
        """Return the settings of the planner, made from the options and the graph."""
        clock = SimulatedClock(self.speed)
        options = self.options
        return PlannerSettings(
            config=options.decide_config(self.graph, self.performance, speed=self.speed),
            max_age_s=max(options.metrics_max_age, clock.to_simulated_s(MIN_MAX_AGE_S)),
            adjustment_deadline_s=max(options.adjustment_deadline, clock.to_simulated_s(MIN_DEADLINE_S)),
            timeline=f"{boot_id()}@{self.speed:g}",
            about={
                "namespace": options.namespace,
                "environment": options.environment.value,
                "served_model_name": options.served_model_name,
                "speed": self.speed,
                "graph_file": None if self.graph_file is None else str(self.graph_file.absolute()),
                **self.about,
            },
            memory=self.memory,
        )


async def run_until_stopped(
    service: PlannerService,
    target: Target,
    router_url: str | None,
    stop: asyncio.Event,
    *,
    observer: Observer | None = None,
    source: ReadingSource | None = None,
) -> None:
    """Run the planner until ``stop`` is set.

    Args:
        service: What the process runs with: options, graph, addresses.
        target: Backend that runs the workers, such as local processes.
        router_url: Base URL of the router; None if there is no router.
        stop: Event that ends the planner.
        observer: Additional observer of ticks (metrics scrapes) and decisions; None for none.
        source: Source of all metrics; None reads the router, the workers and Prometheus, as the options say.

    Raises:
        ConfigError: the log folder cannot be created, another planner has locked its ledger (decision log), or the
            metrics port is in use.
    """
    options = service.options
    folder = made_folder(options.log_folder())
    settings = service.settings()
    clock = SimulatedClock(service.speed)
    pool = ConnectionPool(tls=files_of(None if service.graph is None else service.graph.spec.engine.tls))
    metrics = PlannerMetrics()
    graph = service.graph.name if service.graph is not None else options.namespace
    stats, thread, server = metrics.of(options.namespace, graph), FileThread(), None
    readiness = Readiness()
    ticks = readiness.begin(
        options.namespace, graph, interval_s=clock.to_real_s(settings.config.metric_pulling_interval_s)
    )
    is_chosen = options.log_dir is not None
    log.info("planner options", **options.model_dump(mode="json"))
    try:
        with recording(
            folder,
            settings.config,
            stats,
            thread,
            graph=service.graph,
            is_chosen=is_chosen,
            rotate_bytes=LEDGER_BYTES,
        ) as (ledger, files):
            if service.metrics_port:
                server = await serve(metrics, service.host, service.metrics_port, unready=readiness.problem)
            loop = PlannerLoop(
                settings,
                target=target,
                source=_sources(service, pool, router_url, clock) if source is None else source,
                ledger=ledger,
                time=PlannerClock(clock),
                observers=Observers([stats, ticks, files, *([] if observer is None else [observer])]),
            )
            await loop.run(stop)
            log.info("planner stopped")
    finally:
        await asyncio.to_thread(thread.close)
        if server is not None:
            await server.close(grace_s=CLOSE_GRACE_S)
        await pool.close()


def _sources(
    service: PlannerService, pool: ConnectionPool, router_url: str | None, clock: SimulatedClock
) -> SourceChain:
    """Return the chain of metrics sources: the preferred one first, then the others as backups; Prometheus only if its URL is set."""
    pages = MetricsPages(pool, real_now_s=time.monotonic)
    urls = at(router_url or "")
    frontend = FrontendMetrics(pages, urls, ScrapeSource(pages), clock)
    labels = GraphLabels(service.options.served_model_name, service.graph.name if service.graph else None)
    sources = sources_of(service.options, service.graph, frontend, labels, has_router=router_url is not None)
    return SourceChain(sources, now_s=clock.now_s, real_now_s=time.monotonic)


@contextmanager
def recording(
    folder: Path,
    config: DecideConfig,
    stats: PlannerStats,
    thread: FileThread,
    *,
    graph: GraphDeployment | None,
    is_chosen: bool,
    rotate_bytes: int,
) -> Iterator[tuple[Ledger, FileObservers]]:
    """Open the ledger (decision log) of a folder, and the observer that writes the folder's other files; close both on exit.

    Args:
        folder: Folder of the ledger.
        config: Configuration of the planner's decisions.
        stats: Statistics of the planner loop.
        thread: Thread that writes files.
        graph: Graph whose manifest the dashboard shows; None shows none.
        is_chosen: Whether the user chose the folder. If not, a dashboard is only written in no-operation mode, into a
            subfolder.
        rotate_bytes: Size at which the ledger is rotated.
    """
    stats.begin(config)
    dashboard = Dashboard.of(folder, config, graph, is_chosen=is_chosen, draw=thread.draw)
    files = FileObservers(folder, config, dashboard, thread, stats)
    ledger = Ledger(folder / FILE_NAME, rotate_bytes=rotate_bytes)
    try:
        yield ledger, files
    finally:
        stats.restarted()
        ledger.close()
        files.close()


def made_folder(folder: Path) -> Path:
    """Create the folder if it does not exist, and return it.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--log-dir {folder}", exc)) from exc
    return folder


def boot_id() -> str:
    """Return an identifier of the host's current boot; times of different boots cannot be compared, since the clock restarts.

    Returns ``boot`` if the system provides none.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    except OSError:
        return "boot"
