"""Reads the routers' /metrics: their prefill queues, and each worker's KV usage with its age."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock_core import metric_names as names
from penstock_core.errors import ObservationError
from penstock_core.exposition import Sample, parse_samples
from penstock_planner.decide.reading import Quality, Reading, judge, missing
from penstock_planner.histogram import gained
from penstock_planner.sources.base import Buckets, Query, Readings, fetch_page, in_short
from penstock_wire.client import ConnectionPool

_LATENCIES = {"ttft": names.ROUTER_TTFT, "itl": names.ROUTER_ITL}
_WANTED = frozenset(
    {
        names.ROUTER_QUEUE_REQUESTS,
        names.ROUTER_WORKER_KV_USAGE,
        names.ROUTER_WORKER_METRICS_AGE,
        *(f"{name}_bucket" for name in _LATENCIES.values()),
    }
)
_RANK = {Quality.FRESH: 2, Quality.STALE: 1, Quality.MISSING: 0}

Urls = Callable[[], Sequence[str]]
"""Base URLs of the graph's ready routers now, without a trailing slash."""


@dataclass(frozen=True, slots=True)
class _Page:
    """What one router says.

    Attributes:
        kv: KV usage fraction by worker.
        ages: Age of the same in modelled seconds.
        queue: Requests that wait for prefill in this router; None if it does not say.
        latency: Histograms since its start.
    """

    kv: Mapping[str, float]
    ages: Mapping[str, float]
    queue: float | None
    latency: Mapping[str, Buckets]


class RouterSource:
    """All routers of one graph; replicas come and go."""

    name = "router"

    def __init__(self, pool: ConnectionPool, urls: Urls) -> None:
        """Build the source.

        Args:
            pool: Connections.
            urls: Asked at each read.
        """
        self._pool = pool
        self._urls = urls
        self._latency = _Latency()

    async def read(self, query: Query) -> Readings:
        """Return the routers' view; a worker that none of them reaches is missing, an old value stale.

        A worker's KV usage is the freshest that any router knows. The queue is the sum of all routers' and
        unknown if one of them cannot be read.

        Raises:
            ObservationError: there is no router, or none gives a readable answer.
        """
        urls = tuple(self._urls())
        if not urls:
            raise ObservationError("no ready router")
        answers = dict(zip(urls, await asyncio.gather(*map(self._page, urls)), strict=True))
        pages = {url: answer for url, answer in answers.items() if isinstance(answer, _Page)}
        flaws = [answer for answer in answers.values() if isinstance(answer, ObservationError)]
        if not pages:
            raise flaws[0]
        return Readings(
            kv={
                worker.name: self._freshest(worker.name, pages.values(), query.max_age_s)
                for worker in query.kv_workers
            },
            queue=self._queue(pages, flaws, query.max_age_s),
            latency=self._latency.add({url: page.latency for url, page in pages.items()}, urls),
        )

    async def _page(self, url: str) -> _Page | ObservationError:
        try:
            samples = parse_samples(await fetch_page(self._pool, url + "/metrics"), _WANTED)
        except ObservationError as exc:
            return exc
        queues = [s.value for s in samples if s.name == names.ROUTER_QUEUE_REQUESTS]
        return _Page(
            kv=_by_worker(samples, names.ROUTER_WORKER_KV_USAGE),
            ages=_by_worker(samples, names.ROUTER_WORKER_METRICS_AGE),
            queue=sum(queues) if queues else None,
            latency={key: _buckets(samples, f"{name}_bucket") for key, name in _LATENCIES.items()},
        )

    def _freshest(self, worker: str, pages: Iterable[_Page], max_age_s: float) -> Reading:
        readings = [
            judge(
                page.kv.get(worker),
                age_s=page.ages.get(worker, math.nan),
                max_age_s=max_age_s,
                source=self.name,
                upper=1.0,
            )
            for page in pages
        ]
        return max(readings, key=lambda r: (_RANK[r.quality], -(r.age_s or 0.0)))

    def _queue(
        self, pages: Mapping[str, _Page], flaws: Sequence[ObservationError], max_age_s: float
    ) -> Reading:
        if flaws:
            why = f"{len(flaws)} of {len(flaws) + len(pages)} routers cannot be read: {in_short(flaws[0])}"
            return missing(why, source=self.name)
        queues = [judge(p.queue, age_s=0.0, max_age_s=max_age_s, source=self.name) for p in pages.values()]
        unknown = [queue for queue in queues if queue.value is None]
        total = sum(queue.value or 0.0 for queue in queues)
        return unknown[0] if unknown else judge(total, age_s=0.0, max_age_s=max_age_s, source=self.name)


def at(url: str) -> Urls:
    """Return the URLs of a single router that stays."""
    fixed = (url.rstrip("/"),)
    return lambda: fixed


class _Latency:
    """The routers' histograms as one that never falls, though routers restart and leave."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Buckets]] = {}
        self._total: dict[str, dict[float, float]] = {key: {} for key in _LATENCIES}

    def add(self, pages: Mapping[str, Mapping[str, Buckets]], urls: Sequence[str]) -> Mapping[str, Buckets]:
        """Return the sums after what each router counted since the last look."""
        for url, latency in pages.items():
            before = self._before.get(url, {})
            for key, buckets in latency.items():
                if buckets == before.get(key):
                    continue
                total = self._total[key]
                for bound, count in gained(before.get(key, ()), buckets):
                    total[bound] = total.get(bound, 0.0) + count
        self._before = {url: pages.get(url) or self._before.get(url, {}) for url in urls}
        return {key: tuple(sorted(total.items())) for key, total in self._total.items()}


def _by_worker(samples: list[Sample], name: str) -> dict[str, float]:
    return {s.labels.get("worker", ""): s.value for s in samples if s.name == name}


def _buckets(samples: list[Sample], name: str) -> Buckets:
    totals: dict[float, float] = {}
    for sample in samples:
        if sample.name == name and "le" in sample.labels:
            try:
                bound = float(sample.labels["le"])
            except ValueError:
                continue
            totals[bound] = totals.get(bound, 0.0) + sample.value
    return tuple(sorted(totals.items()))
