"""Which source reads what stands at a graph's door."""

from __future__ import annotations

from penstock.api import GraphDeployment, Runtime
from penstock.core.clock import SimulatedClock
from penstock.planner.sources.base import ReadingSource, Urls
from penstock.planner.sources.dynamo import DynamoSource
from penstock.planner.sources.pages import MetricsPages
from penstock.planner.sources.router import RouterSource
from penstock.planner.sources.scrape import ScrapeSource


def door_source(
    graph: GraphDeployment | None,
    pages: MetricsPages,
    urls: Urls,
    *,
    workers: ScrapeSource,
    clock: SimulatedClock,
) -> ReadingSource:
    """Return the source for Dynamo's frontends under runtime dynamo, else the one for Penstock's routers.

    Args:
        graph: The graph; None: not known, so Penstock's.
        pages: Of what stands at the door.
        urls: Of it, asked at each read.
        workers: Reads the workers, which Dynamo's frontends do not speak for.
        clock: Simulated time.
    """
    if graph is not None and graph.spec.runtime is Runtime.DYNAMO:
        return DynamoSource(pages, urls, workers=workers, now_s=clock.now_s, speed=clock.speed)
    return RouterSource(pages, urls, now_s=clock.now_s)
