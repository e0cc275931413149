"""Reads a graph of runtime dynamo: demand and latencies from its frontends' pages, KV usage and queues from its workers'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.api import Role
from penstock.core import metric_names as names
from penstock.core.errors import ObservationError
from penstock.core.exposition import Sample, parse_samples
from penstock.planner.decide.reading import Reading, assess, missing
from penstock.planner.sources.base import Buckets, Query, Readings, Urls, in_short
from penstock.planner.sources.dynamo_demand import FRONTEND_NAMES, Frontend, FrontendMeter, read_frontend
from penstock.planner.sources.frontend import FrontendMetrics
from penstock.planner.sources.latency import ITL, TTFT, LatencyTotals, buckets_of
from penstock.planner.sources.scrape import MetricsPages, ScrapeSource

_LATENCIES: Final = {TTFT: names.DYNAMO_TTFT, ITL: names.DYNAMO_ITL}
_WANTED: Final = FRONTEND_NAMES | {f"{name}_bucket" for name in _LATENCIES.values()}


@dataclass(frozen=True, slots=True)
class _Page:
    """What one frontend reports."""

    frontend: Frontend
    latency: Mapping[str, Buckets]


class DynamoSource:
    """All frontends and workers of one graph."""

    name = "dynamo"
    counts_demand = True

    def __init__(
        self,
        pages: MetricsPages,
        urls: Urls,
        *,
        workers: ScrapeSource,
        now_s: Callable[[], float],
        speed: float = 1.0,
    ) -> None:
        self._pages = pages
        self._urls = urls
        self._workers = workers
        self._now_s = now_s
        self._speed = speed
        self._meter = FrontendMeter(speed)
        self._latency = LatencyTotals()

    @classmethod
    def of(cls, frontend: FrontendMetrics) -> DynamoSource:
        """Return the source of a graph; the entry point."""
        clock = frontend.clock
        return cls(
            frontend.pages, frontend.urls, workers=frontend.workers, now_s=clock.now_s, speed=clock.speed
        )

    async def read(self, query: Query) -> Readings:
        """Return the workers' readings with the frontends' demand; what cannot be read is missing.

        The queue is what waits in the frontends and in prefill workers. Of workers that report no queue (a
        mocker's prefill worker does not) the frontends know what was assigned beyond one step.

        Raises:
            ObservationError: there is no frontend, or none gives a readable answer.
        """
        urls = tuple(self._urls())
        if not urls:
            raise ObservationError("no ready frontend")
        now_s = self._now_s()
        readings, answers = await asyncio.gather(
            self._workers.read(query), asyncio.gather(*map(self._page, urls))
        )
        pages = {url: each for url, each in zip(urls, answers, strict=True) if isinstance(each, _Page)}
        flaws = [each for each in answers if isinstance(each, ObservationError)]
        if not pages:
            raise flaws[0]
        frontends = {url: page.frontend for url, page in pages.items()}
        first = Role.PREFILL if query.prefill_workers or self._has_prefill(frontends) else Role.AGGREGATED
        return replace(
            readings,
            queue=self._queue(readings.queue, frontends, flaws, query.max_age_s),
            queue_is_complete=True,
            demand=self._meter.add(frontends, urls, now_s, first=first),
            latency=self._latency.add({url: page.latency for url, page in pages.items()}, urls),
        )

    @staticmethod
    def _has_prefill(frontends: Mapping[str, Frontend]) -> bool:
        return any(each.prefilling is not None for each in frontends.values())

    async def _page(self, url: str) -> _Page | ObservationError:
        try:
            samples = parse_samples(await self._pages.fetch(url), _WANTED)
        except ObservationError as exc:
            return exc
        frontend = read_frontend(samples)
        if frontend is None:
            return ObservationError(f"{url}/metrics: not the page of a Dynamo frontend")
        return _Page(frontend, {key: self._buckets(samples, name) for key, name in _LATENCIES.items()})

    def _buckets(self, samples: list[Sample], name: str) -> Buckets:
        found = buckets_of([each for each in samples if each.name == f"{name}_bucket"])
        return tuple((bound * self._speed, count) for bound, count in found)

    def _queue(
        self,
        workers: Reading,
        frontends: Mapping[str, Frontend],
        flaws: list[ObservationError],
        max_age_s: float,
    ) -> Reading:
        """Return what waits; the workers' own counts win over what the frontends conclude."""
        if flaws:
            why = f"{len(flaws)} of {len(flaws) + len(frontends)} frontends cannot be read: {in_short(flaws[0])}"
            return missing(why, source=self.name)
        if workers.value is None:
            waiting = sum(each.waiting for each in frontends.values())
        else:
            waiting = workers.value + sum(each.gauges["queued"] for each in frontends.values())
        return assess(waiting, age_s=0.0, max_age_s=max_age_s, source=self.name)
