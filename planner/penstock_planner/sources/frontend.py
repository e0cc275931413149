"""A graph's sources in their order; its traits name the one of its frontends, and a distribution registers it.

An entry point of group ``penstock.metric_sources`` is a function that makes a `ReadingSource` of a `FrontendMetrics`.
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
    """What a source reads: pages of Penstock's routers or a runtime's own frontends, by URLs asked at each read; the workers."""

    pages: MetricsPages
    urls: Urls
    workers: ScrapeSource
    clock: SimulatedClock


def frontend_source(graph: GraphDeployment | None, frontend: FrontendMetrics) -> ReadingSource:
    """Return the source of a graph's routers or frontends; without a graph, of Penstock's routers.

    Raises:
        ConfigError: no distribution has the source that the runtime names.
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
    """Return a graph's sources: the preferred one first, backed up by the others; Prometheus only if its URL is known.

    Raises `ConfigError` if the preferred one cannot be read.
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
