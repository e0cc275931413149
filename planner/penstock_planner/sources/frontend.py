"""Selects a graph's metrics sources in order of preference. Plugins can provide the source for a runtime's own frontends.

An entry point of the group ``penstock.metric_sources`` is a function that creates a `ReadingSource` from a `FrontendMetrics`. The traits
of a graph's runtime name the entry point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

from penstock.api import GraphDeployment, MetricsSource
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError
from penstock.core.plugins import plugin, registered
from penstock.core.worker_metrics import METRICS_PATH
from penstock_planner.options import PlannerOptions
from penstock_planner.sources.base import ReadingSource, Urls
from penstock_planner.sources.prometheus import GraphLabels, PrometheusSource, connect
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource

GROUP: Final = "penstock.metric_sources"
_ROUTER: Final = "router"


@dataclass(frozen=True, slots=True)
class FrontendMetrics:
    """Inputs from which a metrics source for a graph's frontends (processes that receive the requests) is made.

    Attributes:
        pages: Reader of metrics pages.
        urls: Function that returns the URLs of Penstock's routers or of the runtime's own frontends.
        workers: Source that reads the workers' own pages.
        clock: Simulated clock, for the age of values.
    """

    pages: MetricsPages
    urls: Urls
    workers: ScrapeSource
    clock: SimulatedClock


def frontend_source(graph: GraphDeployment | None, frontend: FrontendMetrics) -> ReadingSource:
    """Return the metrics source for the graph's routers or the frontends of its runtime; without a graph, for Penstock's routers.

    Args:
        graph: The graph; its runtime (the serving software of its workers) can name the source. None for no graph.
        frontend: Inputs of the source.

    Raises:
        ConfigError: the source that the runtime names is not installed.
    """
    name = _ROUTER if graph is None else graph.spec.traits.metric_source
    make = plugin(GROUP, name)
    if make is None:
        known = ", ".join(registered(GROUP)) or "none; install penstock again"
        raise ConfigError(f"{GROUP}: {name} is not installed; installed: {known}")
    return cast(ReadingSource, make(frontend))


def sources_of(
    options: PlannerOptions,
    graph: GraphDeployment | None,
    frontend: FrontendMetrics,
    labels: GraphLabels,
    *,
    has_router: bool = True,
) -> list[ReadingSource]:
    """Return a graph's metrics sources: the preferred one first, then the others as backups.

    Prometheus is included only if its URL is set.

    Args:
        options: Options of the planner, which name the preferred source.
        graph: The graph; None if none was given.
        frontend: Inputs of the sources.
        labels: Labels that select the graph's series in Prometheus.
        has_router: Whether the URLs of the graph's routers are known. If not, the sources do not include routers.

    Raises:
        ConfigError: the preferred source is not available.
    """
    known: dict[MetricsSource, ReadingSource] = {}
    if has_router:
        known[MetricsSource.ROUTER] = frontend_source(graph, frontend)
    own_names = {} if graph is None else graph.spec.traits.metric_names
    path = METRICS_PATH if graph is None else graph.spec.traits.metrics_path
    known[MetricsSource.SCRAPE] = frontend.workers.of_runtime(own_names, path)
    if options.prometheus_url is not None:
        known[MetricsSource.PROMETHEUS] = PrometheusSource(
            connect(options.prometheus_url, options.prometheus_credentials),
            labels,
            clock=frontend.clock,
            routers=frontend.urls if has_router else None,
            own_names=own_names,
        )
    if options.metrics_source not in known:
        raise ConfigError(
            "--router-url: not given and not in the statefile, but --metrics-source is router; give "
            "http://host:port"
        )
    first = known.pop(options.metrics_source)
    return [first, *known.values()]
