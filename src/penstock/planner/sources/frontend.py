"""Which source reads what takes a graph's requests: its traits name it, and a distribution registers it.

An entry point of group ``penstock.metric_sources`` is a function that makes a `ReadingSource` of a `FrontendMetrics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

from penstock.api import GraphDeployment
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError
from penstock.core.plugins import plugin, registered
from penstock.planner.sources.base import ReadingSource, Urls
from penstock.planner.sources.pages import MetricsPages
from penstock.planner.sources.scrape import ScrapeSource

GROUP: Final = "penstock.metric_sources"
_ROUTER: Final = "router"


@dataclass(frozen=True, slots=True)
class FrontendMetrics:
    """What a source reads.

    Attributes:
        pages: Of Penstock's routers, or of a runtime's own frontends.
        urls: Of them, asked at each read.
        workers: Reads the workers, which not every frontend speaks for.
        clock: Simulated time.
    """

    pages: MetricsPages
    urls: Urls
    workers: ScrapeSource
    clock: SimulatedClock


def frontend_source(
    graph: GraphDeployment | None,
    pages: MetricsPages,
    urls: Urls,
    *,
    workers: ScrapeSource,
    clock: SimulatedClock,
) -> ReadingSource:
    """Return the source of a graph's routers or frontends.

    Args:
        graph: The graph; None: not known, so Penstock's routers.
        pages: See `FrontendMetrics`, as the others.
        urls: Of routers or frontends.
        workers: Reads the workers.
        clock: Simulated time.

    Raises:
        ConfigError: no distribution has the source that the runtime names.
    """
    name = _ROUTER if graph is None else graph.spec.traits.metric_source
    make = plugin(GROUP, name)
    if make is None:
        known = ", ".join(registered(GROUP)) or "none; install penstock again"
        raise ConfigError(f"{GROUP}: {name} is not installed; there is {known}")
    return cast(ReadingSource, make(FrontendMetrics(pages, urls, workers, clock)))
