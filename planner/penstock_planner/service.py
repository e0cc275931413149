"""One planner process: builds sources, ledger, dashboard and metrics endpoint around the loop and runs it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from penstock_core.clock import ModelClock
from penstock_core.errors import ConfigError
from penstock_core.logs import get_logger
from penstock_graph.models import GraphDeployment, MetricsSource
from penstock_planner.dashboard import Dashboard
from penstock_planner.ledger import FILE_NAME, Ledger
from penstock_planner.loop import LoopSettings, PlannerLoop
from penstock_planner.metrics import PlannerMetrics, serve
from penstock_planner.options import PlannerOptions
from penstock_planner.snapshot import SnapshotWriter
from penstock_planner.sources.base import Source
from penstock_planner.sources.chain import SourceChain
from penstock_planner.sources.prometheus import PrometheusSource, connect
from penstock_planner.sources.router import RouterSource, at
from penstock_planner.sources.scrape import ScrapeSource
from penstock_planner.targets.base import Target
from penstock_planner.timing import ModelTime
from penstock_planner.view import Audience, Listener
from penstock_wire.client import ConnectionPool

MIN_MAX_AGE_S = 1.0
"""Real seconds below which no metric counts as stale: the router looks at a worker every 0.1 s or more, so
at a high speed a young value is many modelled seconds old."""

MIN_DEADLINE_S = 30.0
"""Real seconds below which no new replica is withdrawn: a process takes seconds to start at any speed."""

CLOSE_GRACE_S = 1.0
"""Real seconds for the last scrape of the planner's own metrics."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """What one process is told.

    Attributes:
        options: Joined and checked.
        graph: For bounds and rules beyond the options; None without ``--graph``.
        speed: Modelled seconds per real second.
        host: Address of the planner's own metrics.
        metrics_port: Its port; 0: off.
    """

    options: PlannerOptions
    graph: GraphDeployment | None
    speed: float
    host: str
    metrics_port: int

    def settings(self) -> LoopSettings:
        """Return the loop's settings."""
        clock = ModelClock(self.speed)
        options = self.options
        return LoopSettings(
            config=options.decide_config(self.graph),
            max_age_s=max(options.metrics_max_age, clock.to_model_s(MIN_MAX_AGE_S)),
            adjustment_deadline_s=max(options.adjustment_deadline, clock.to_model_s(MIN_DEADLINE_S)),
            timeline=f"{boot_id()}@{self.speed:g}",
            about={
                "namespace": options.namespace,
                "environment": options.environment.value,
                "served_model_name": options.served_model_name,
                "speed": self.speed,
            },
        )


async def run_until_stopped(
    service: Service, target: Target, router_url: str | None, stop: asyncio.Event
) -> None:
    """Plan until ``stop`` is set.

    Raises:
        ConfigError: the log folder cannot be made, another planner holds its ledger, or the metrics port
            is taken.
    """
    options = service.options
    folder = made_folder(options.log_folder())
    settings = service.settings()
    clock = ModelClock(service.speed)
    pool = ConnectionPool()
    metrics = PlannerMetrics()
    dashboard = Dashboard(folder, settings.config) if options.log_dir is not None else None
    graph = service.graph.name if service.graph is not None else options.namespace
    listeners: list[Listener] = [
        metrics.of(options.namespace, graph),
        SnapshotWriter(folder, now_s=time.monotonic),
    ]
    if dashboard is not None:
        listeners.append(dashboard)
    else:
        log.info("no --log-dir: no dashboard", ledger=str(folder / FILE_NAME))
    ledger = Ledger(folder / FILE_NAME)
    server = None
    log.info("planner options", **options.model_dump(mode="json"))
    try:
        if service.metrics_port:
            server = await serve(metrics, service.host, service.metrics_port)
        loop = PlannerLoop(
            settings,
            target=target,
            source=_sources(options, pool, router_url, clock),
            ledger=ledger,
            time=ModelTime(clock),
            audience=Audience(listeners),
        )
        await loop.run(stop)
        log.info("planner stopped")
    finally:
        ledger.close()
        if dashboard is not None:
            await asyncio.to_thread(dashboard.close)
        if server is not None:
            await server.close(grace_s=CLOSE_GRACE_S)
        await pool.close()


def _sources(
    options: PlannerOptions, pool: ConnectionPool, router_url: str | None, clock: ModelClock
) -> SourceChain:
    """Return the preferred source first; the others back it up, Prometheus only if its URL is known."""
    known: dict[MetricsSource, Source] = {}
    if router_url is not None:
        known[MetricsSource.ROUTER] = RouterSource(pool, at(router_url))
    known[MetricsSource.SCRAPE] = ScrapeSource(pool)
    if options.prometheus_url is not None:
        known[MetricsSource.PROMETHEUS] = PrometheusSource(
            connect(options.prometheus_url), served_model_name=options.served_model_name, clock=clock
        )
    if options.metrics_source not in known:
        raise ConfigError(
            "--router-url: not given and not in the statefile, yet --metrics-source is router; give http://host:port"
        )
    first = known.pop(options.metrics_source)
    return SourceChain([first, *known.values()], now_s=clock.now_s, real_now_s=time.monotonic)


def made_folder(folder: Path) -> Path:
    """Return the folder, made if it was not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"--log-dir: {folder} cannot be made: {exc.strerror}; choose a writable folder"
        ) from exc
    return folder


def boot_id() -> str:
    """Return what names this boot of the host: its monotonic clock starts anew with it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    except OSError:
        return "boot"
