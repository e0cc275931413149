"""Reads the routers' /metrics: their prefill queues, and each worker's KV usage with its age."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.core import metric_names as names
from penstock.core.exposition import Sample, parse_samples
from penstock.planner.decide.reading import RANK, Reading, assess
from penstock.planner.sources.base import (
    ITL,
    TTFT,
    Buckets,
    LatencyTotals,
    Query,
    Readings,
    Urls,
    buckets_of,
    total_of,
)
from penstock.planner.sources.demand import ROUTER_NAMES, DemandMeter, RouterSample, read_router
from penstock.planner.sources.frontend import FrontendMetrics
from penstock.planner.sources.scrape import MetricsPages, unknown_queue

_LATENCIES = {TTFT: names.ROUTER_TTFT, ITL: names.ROUTER_ITL}
_WANTED = frozenset(
    {
        *ROUTER_NAMES,
        names.ROUTER_WORKER_WAITING,
        names.ROUTER_WORKER_KV_USAGE,
        names.ROUTER_WORKER_METRICS_AGE,
        *(f"{name}_bucket" for name in _LATENCIES.values()),
    }
)


@dataclass(frozen=True, slots=True)
class _Page:
    """What one router reports, by worker: KV usage, waiting requests, age of both in simulated seconds; None: it does not say."""

    kv: Mapping[str, float]
    waiting: Mapping[str, float]
    ages: Mapping[str, float]
    queue: float | None
    latency: Mapping[str, Buckets]
    frontend: RouterSample | None


class RouterSource:
    """All routers of one graph; replicas come and go."""

    name = "router"
    counts_demand = True

    def __init__(self, pages: MetricsPages, urls: Urls, *, now_s: Callable[[], float]) -> None:
        self._pages = pages
        self._urls = urls
        self._now_s = now_s
        self._latency = LatencyTotals()
        self._demand = DemandMeter()

    @classmethod
    def of(cls, frontend: FrontendMetrics) -> RouterSource:
        """Return the source of a graph; the entry point."""
        return cls(frontend.pages, frontend.urls, now_s=frontend.clock.now_s)

    async def read(self, query: Query) -> Readings:
        """Return the routers' view; a worker that none of them reaches is missing, an old value stale.

        A worker's KV usage is the freshest that any router knows. The queue is the sum of all routers' and
        unknown if one of them cannot be read.

        Raises:
            ObservationError: there is no router, or none gives a readable answer.
        """
        urls, now_s = tuple(self._urls()), self._now_s()
        pages, flaws = await self._pages.fetch_all(urls, _page)
        unknown = unknown_queue(len(pages), flaws, kind="router", source=self.name)
        found, max_age_s = list(pages.values()), query.max_age_s
        frontends = {url: page.frontend for url, page in pages.items() if page.frontend is not None}
        workers = [worker.name for worker in query.kv_workers]
        waiting = {
            name: self._freshest([(p.waiting.get(name), p.ages.get(name)) for p in found], max_age_s)
            for name in workers
        }
        return Readings(
            kv={
                name: self._freshest(
                    [(p.kv.get(name), p.ages.get(name)) for p in found], max_age_s, upper=1.0
                )
                for name in workers
            },
            queue=unknown
            or total_of([assess(p.queue, age_s=0.0, max_age_s=max_age_s, source=self.name) for p in found]),
            demand=self._demand.add(frontends, urls, now_s),
            worker_waiting=waiting if any(page.waiting for page in found) else None,
            latency=self._latency.add({url: page.latency for url, page in pages.items()}, urls),
        )

    def _freshest(
        self,
        values: Sequence[tuple[float | None, float | None]],
        max_age_s: float,
        *,
        upper: float | None = None,
    ) -> Reading:
        """Return the best of the routers' reports of one worker: (value, age) of each, None where there is none."""
        readings = [
            assess(
                value,
                age_s=math.nan if age_s is None else age_s,
                max_age_s=max_age_s,
                source=self.name,
                upper=upper,
            )
            for value, age_s in values
        ]
        return max(readings, key=lambda r: (RANK[r.quality], -(r.age_s or 0.0)))


def _page(_url: str, text: str) -> _Page:
    by_name: dict[str, list[Sample]] = {}
    for sample in parse_samples(text, _WANTED):
        by_name.setdefault(sample.name, []).append(sample)
    queues = by_name.get(names.ROUTER_QUEUE_REQUESTS)
    return _Page(
        kv=_by_worker(by_name, names.ROUTER_WORKER_KV_USAGE),
        waiting=_by_worker(by_name, names.ROUTER_WORKER_WAITING),
        ages=_by_worker(by_name, names.ROUTER_WORKER_METRICS_AGE),
        queue=sum(sample.value for sample in queues) if queues else None,
        latency={key: buckets_of(by_name.get(f"{name}_bucket", ())) for key, name in _LATENCIES.items()},
        frontend=read_router([s for name, found in by_name.items() if name in ROUTER_NAMES for s in found]),
    )


def at(url: str) -> Urls:
    """Return the URLs of a single router that stays."""
    fixed = (url.rstrip("/"),)
    return lambda: fixed


def _by_worker(by_name: Mapping[str, Sequence[Sample]], name: str) -> dict[str, float]:
    return {sample.labels.get("worker", ""): sample.value for sample in by_name.get(name, ())}
