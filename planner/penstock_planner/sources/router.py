"""Reads the routers' metrics pages: their prefill queues, the demand between two reads, and each worker's KV usage with its age."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from penstock.api import Role
from penstock.core import metric_names as names
from penstock.core.exposition import Sample, parse_samples
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.demand.reading import RANK, Reading, assess
from penstock_planner.sources.base import (
    DISPATCHED_TTFT,
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
from penstock_planner.sources.frontend import FrontendMetrics
from penstock_planner.sources.scrape import MetricsPages, unknown_queue

_COUNTERS: Final = {
    "arrivals": names.ROUTER_ARRIVALS + names.COUNTER_SUFFIX,
    "prompt_tokens": names.ROUTER_ARRIVED_TOKENS + names.COUNTER_SUFFIX,
    "routed_tokens": names.ROUTER_ROUTED_TOKENS + names.COUNTER_SUFFIX,
    "routed_uncached": names.ROUTER_ROUTED_UNCACHED_TOKENS + names.COUNTER_SUFFIX,
    "refused": names.ROUTER_REFUSED + names.COUNTER_SUFFIX,
    "timed_out": names.ROUTER_QUEUE_TIMEOUTS + names.COUNTER_SUFFIX,
    "completed": names.ROUTER_COMPLETED + names.COUNTER_SUFFIX,
    "output_tokens": names.ROUTER_COMPLETED_TOKENS + names.COUNTER_SUFFIX,
    "prefilled_tokens": names.ROUTER_COMPUTED_TOKENS + names.COUNTER_SUFFIX,
    "ttft_sum_s": f"{names.ROUTER_TTFT}_sum",
    "ttft_count": f"{names.ROUTER_TTFT}_count",
    "itl_sum_s": f"{names.ROUTER_ITL}_sum",
    "itl_count": f"{names.ROUTER_ITL}_count",
}
_GAUGES: Final = {
    "waiting": names.ROUTER_QUEUE_REQUESTS,
    "waiting_tokens": names.ROUTER_QUEUE_UNCACHED_TOKENS,
    "oldest_wait_s": names.ROUTER_QUEUE_OLDEST,
}
_ROLES: Final = frozenset(Role)
_TURNED_AWAY: Final = names.ROUTER_TURNED_AWAY + names.COUNTER_SUFFIX
_BY_ROLE: Final = (names.ROUTER_WORKER_INFLIGHT_REQUESTS, _TURNED_AWAY)
ROUTER_NAMES: Final = frozenset(
    {
        *_COUNTERS.values(),
        *_GAUGES.values(),
        *_BY_ROLE,
        names.ROUTER_WORKER_PENDING_TOKENS,
        names.PROCESS_START,
    }
)
"""Names of the samples that `read_router` reads."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Counters and gauges on the metrics page of one frontend.

    Attributes:
        counters: Counts since the frontend's process started, by name such as ``arrivals`` (mostly fields of `Demand`).
        gauges: Current values, by name such as ``waiting``.
        started_s: Start of the frontend's process, real seconds since 1970; None if unknown.
    """

    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    started_s: float | None = field(default=None, kw_only=True)

    def follows(self, before: PageCounts) -> bool:
        """Return whether ``before`` is an earlier metrics page of the same process.

        If it is, the counters were not reset in between, and their differences are meaningful.
        """
        return self.started_s == before.started_s and all(
            count >= before.counters[name] for name, count in self.counters.items()
        )


_PageT = TypeVar("_PageT", bound=PageCounts)


class CounterMeter(Generic[_PageT]):
    """Computes the increase of all frontends' counters between two complete reads of their metrics pages.

    A read is complete if it has every frontend's page.

    Attributes:
        newest: Pages of the last complete read, by URL.
        before: Pages of the complete read before it, by URL.
    """

    def __init__(self) -> None:
        self.newest: Mapping[str, _PageT] = {}
        self.before: Mapping[str, _PageT] = {}
        self._newest_s = 0.0

    def gained(
        self, pages: Mapping[str, _PageT], urls: Collection[str], now_s: float
    ) -> tuple[dict[str, float], float] | None:
        """Return the increase of each counter, summed over all frontends, since the last complete read of their metrics pages.

        Returns None at the first read, and if a frontend's page is missing or a frontend has joined, left or restarted.
        Counts during a read with a missing page are part of the next increase, which then covers a longer period.

        Args:
            pages: Pages by URL of the frontends that could be read.
            urls: URLs of all current frontends.
            now_s: Time of the read, simulated seconds.

        Returns:
            (increase by name of the counter, simulated seconds that it covers), or None.
        """
        if not urls or not pages.keys() >= set(urls) or (now_s <= self._newest_s and self.newest):
            return None
        self.before, self.newest = self.newest, {url: pages[url] for url in urls}
        period_s, self._newest_s = now_s - self._newest_s, now_s
        if self.before.keys() != self.newest.keys():
            return None
        if not all(page.follows(self.before[url]) for url, page in self.newest.items()):
            return None
        fields = next(iter(self.newest.values())).counters
        gains = {
            key: sum(page.counters[key] - self.before[url].counters[key] for url, page in self.newest.items())
            for key in fields
        }
        return gains, period_s

    def gauge(self, key: str) -> float:
        """Return the sum of a gauge over all frontends, as of the last read in which every frontend's metrics page was read.

        Args:
            key: Name of the gauge in `PageCounts.gauges`, such as ``waiting``.
        """
        return sum(page.gauges[key] for page in self.newest.values())


@dataclass(frozen=True, slots=True)
class RouterSample(PageCounts):
    """Counters and gauges on the metrics page of one router.

    Attributes:
        in_flight: Number of requests assigned to workers, by role.
        pending: Number of prompt tokens that are not computed yet, by name of the prefill (or aggregated) worker.
        turned_away: Number of requests refused for lack of a worker since the router started, by role of that worker.
    """

    in_flight: Mapping[Role, float]
    pending: Mapping[str, float]
    turned_away: Mapping[Role, float] = field(default_factory=dict)


def read_router(samples: Sequence[Sample]) -> RouterSample | None:
    """Return the counters and gauges on a router's metrics page; None if one is missing (an older router) or not a finite number.

    Args:
        samples: Samples on the page.
    """
    totals: dict[str, float] = {}
    by_role: dict[str, dict[Role, float]] = {name: {} for name in _BY_ROLE}
    pending: dict[str, float] = {}
    for sample in samples:
        if sample.name in by_role:
            role, counts = sample.labels.get("role", ""), by_role[sample.name]
            if role in _ROLES:
                counts[Role(role)] = counts.get(Role(role), 0.0) + sample.value
        elif sample.name == names.ROUTER_WORKER_PENDING_TOKENS:
            pending[sample.labels.get("worker", "")] = sample.value
        elif sample.name in ROUTER_NAMES:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    is_complete = totals.keys() >= {*_COUNTERS.values(), *_GAUGES.values()}
    if not is_complete or not all(map(math.isfinite, totals.values())):
        return None
    return RouterSample(
        {field: totals[name] for field, name in _COUNTERS.items()},
        {field: totals[name] for field, name in _GAUGES.items()},
        by_role[names.ROUTER_WORKER_INFLIGHT_REQUESTS],
        pending,
        by_role[_TURNED_AWAY],
        started_s=totals.get(names.PROCESS_START),
    )


class DemandMeter:
    """Computes the demand at the routers (such as arrivals and tokens) between two complete reads of all routers' metrics pages."""

    def __init__(self) -> None:
        self._counts: CounterMeter[RouterSample] = CounterMeter()

    def add(
        self, frontends: Mapping[str, RouterSample], routers: Collection[str], now_s: float
    ) -> Demand | None:
        """Return the demand at the routers since the last read in which every router's metrics page was read.

        Returns None at the first read, and if a router's page is missing or a router has joined, left or restarted.

        Args:
            frontends: Values by URL of the routers whose pages could be read.
            routers: URLs of all current routers.
            now_s: Time of the read, simulated seconds.
        """
        found = self._counts.gained(frontends, routers, now_s)
        if found is None:
            return None
        gained, period_s = found
        newest, before = self._counts.newest, self._counts.before
        turned_away: Counter[Role] = Counter()
        in_flight: Counter[Role] = Counter()
        for url, frontend in newest.items():
            in_flight.update(frontend.in_flight)
            turned_away.update(frontend.turned_away)
            turned_away.subtract(before[url].turned_away)
        # Requests that were never routed are assumed to have the same fraction of uncached tokens as the routed ones.
        routed, uncached = gained.pop("routed_tokens"), gained.pop("routed_uncached")
        unrouted = max(0.0, gained["prompt_tokens"] - routed)
        now = {field: self._counts.gauge(field) for field in _GAUGES}
        oldest_s = max(frontend.gauges["oldest_wait_s"] for frontend in newest.values())
        pending = [each for frontend in newest.values() for each in frontend.pending.items()]
        return Demand(
            period_s=period_s,
            unserved=dict(turned_away),
            uncached_tokens=uncached + unrouted * (uncached / routed if routed else 1.0),
            waiting=now["waiting"],
            waiting_tokens=now["waiting_tokens"],
            oldest_wait_s=oldest_s if now["waiting"] else None,
            in_flight=dict(in_flight),
            in_flight_tokens=sum(tokens for _, tokens in pending),
            prefilling_workers=len({name for name, tokens in pending if tokens > 0}),
            **gained,
        )


_LATENCIES = {
    TTFT: names.ROUTER_TTFT,
    DISPATCHED_TTFT: names.ROUTER_DISPATCHED_TTFT,
    ITL: names.ROUTER_ITL,
}
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
    """Values on one router's page, by worker: KV usage, waiting requests, and the age of both in simulated seconds."""

    kv: Mapping[str, float]
    waiting: Mapping[str, float]
    ages: Mapping[str, float]
    queue: float | None
    latency: Mapping[str, Buckets]
    frontend: RouterSample | None


class RouterSource:
    """Metrics source that reads the metrics pages of all routers of one graph; routers can join and leave.

    Attributes:
        ages_s: Age of the newest values that any router has of a worker, simulated seconds, by worker name, as of the
            last read.
    """

    name = "router"
    counts_demand = True

    def __init__(self, pages: MetricsPages, urls: Urls, *, now_s: Callable[[], float]) -> None:
        """Create a source.

        Args:
            pages: Reader of metrics pages.
            urls: Function that returns the URLs of the ready routers.
            now_s: Simulated clock.
        """
        self._pages = pages
        self._urls = urls
        self._now_s = now_s
        self._latency = LatencyTotals()
        self._demand = DemandMeter()
        self.ages_s: Mapping[str, float] = {}

    @classmethod
    def of(cls, frontend: FrontendMetrics) -> RouterSource:
        """Create the source from a graph's frontend inputs; this is the entry point of the group ``penstock.metric_sources``."""
        return cls(frontend.pages, frontend.urls, now_s=frontend.clock.now_s)

    async def read(self, query: Query) -> Readings:
        """Return the routers' values. Values of a worker that no router reaches are marked as missing, and old values as stale.

        A worker's KV usage is the most recent value of any router. The queue is the sum over all routers; it is unknown
        if one of them cannot be read.

        Raises:
            ObservationError: there is no router, or no router's page can be read.
        """
        urls, now_s = tuple(self._urls()), self._now_s()
        pages, flaws = await self._pages.fetch_all(urls, _page)
        unknown = unknown_queue(len(pages), flaws, kind="router", source=self.name)
        found, max_age_s = list(pages.values()), query.max_age_s
        frontends = {url: page.frontend for url, page in pages.items() if page.frontend is not None}
        workers = [worker.name for worker in query.kv_workers]
        known = {name: [p.ages[name] for p in found if name in p.ages] for name in workers}
        self.ages_s = {name: min(ages_s) for name, ages_s in known.items() if ages_s}
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
        """Return the best of the routers' values for one worker, each given as (value, age); None for values that a router lacks."""
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
    """Return a function that always returns a list of only this URL, for a single router that never changes."""
    fixed = (url.rstrip("/"),)
    return lambda: fixed


def _by_worker(by_name: Mapping[str, Sequence[Sample]], name: str) -> dict[str, float]:
    return {sample.labels.get("worker", ""): sample.value for sample in by_name.get(name, ())}
