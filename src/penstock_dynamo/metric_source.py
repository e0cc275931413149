"""Reads a graph of runtime dynamo: demand and latencies from its frontends' pages, KV usage and queues from its workers'.

A frontend does not say how long the oldest request has waited. It counts a request when it comes, and the tokens of its
prompt when its first token leaves. So the tokens of what has come and is not answered yet are estimated: each request has
as many as the newest answered ones had on average, and before any was, as those have that wait for prefill now.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.api import Role
from penstock.core.errors import ObservationError
from penstock.core.exposition import Sample, parse_samples
from penstock_dynamo import metric_names as names
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.demand.reading import Reading, assess
from penstock_planner.sources.base import (
    ITL,
    TTFT,
    Buckets,
    LatencyTotals,
    Query,
    Readings,
    Urls,
    buckets_of,
)
from penstock_planner.sources.frontend import FrontendMetrics
from penstock_planner.sources.router import CounterMeter, PageCounts
from penstock_planner.sources.scrape import MetricsPages, ScrapeSource, unknown_queue

_HISTOGRAMS: Final = {
    "input": names.INPUT_TOKENS,
    "cached": names.CACHED_TOKENS,
    "output": names.OUTPUT_TOKENS,
    "ttft": names.TTFT,
    "itl": names.ITL,
}
_COUNTERS: Final = {
    "started": names.STARTED,
    "finished": names.FINISHED,
    "rejected": names.REJECTED,
    **{f"{key}_sum": f"{name}_sum" for key, name in _HISTOGRAMS.items()},
    **{f"{key}_count": f"{name}_count" for key, name in _HISTOGRAMS.items()},
}
_GAUGES: Final = {
    "inflight": names.INFLIGHT,
    "unanswered": names.UNANSWERED,
    "queued": names.QUEUE_REQUESTS,
    "queued_tokens": names.QUEUE_TOKENS,
}
FRONTEND_NAMES: Final = frozenset(
    {
        *_COUNTERS.values(),
        *_GAUGES.values(),
        names.STAGE_REQUESTS,
        names.PENDING_TOKENS,
        names.BATCH_TOKENS,
    }
)
_SUCCESS: Final = "success"
_PREFILL: Final = "prefill"


@dataclass(frozen=True, slots=True)
class FrontendCounts(PageCounts):
    """One frontend's counts at one moment; a metric that nothing has been counted by yet is not on its page.

    Attributes:
        prefilling: Requests that prefill workers have and have not answered; None in an aggregated graph.
        pending: Prompt tokens assigned to each first-stage worker and not computed, by Dynamo's number of it; None
            where the frontend's mode does not count them.
        batch_tokens: Most prompt tokens that a worker computes in one step; None where no worker has said.
    """

    prefilling: float | None = None
    pending: Mapping[str, float] | None = None
    batch_tokens: float | None = None

    @property
    def waiting(self) -> float:
        """Requests that wait for prefill: queued here, or assigned beyond what their workers compute in one step.

        A mocker's prefill worker reports no queue of its own.
        """
        tokens = sum((self.pending or {}).values())
        if not tokens or self.batch_tokens is None or not self.prefilling:
            return self.gauges["queued"]
        beyond = sum(max(0.0, each - self.batch_tokens) for each in (self.pending or {}).values())
        return self.gauges["queued"] + self.prefilling * beyond / tokens


def read_frontend(samples: Sequence[Sample]) -> FrontendCounts | None:
    """Return a frontend's counts; None if the page is none of a frontend's, or holds what is not a number."""
    totals: dict[str, float] = {}
    pending: dict[str, dict[str, float]] = {}
    prefilling: float | None = None
    for sample in samples:
        if not math.isfinite(sample.value):
            return None
        if sample.name == names.FINISHED and sample.labels.get("status") != _SUCCESS:
            continue
        if sample.name == names.STAGE_REQUESTS:
            if sample.labels.get("phase") == _PREFILL:
                prefilling = (prefilling or 0.0) + sample.value
        elif sample.name == names.PENDING_TOKENS:
            of_type = pending.setdefault(sample.labels.get("worker_type", ""), {})
            worker = sample.labels.get("worker_id", "")
            of_type[worker] = of_type.get(worker, 0.0) + sample.value  # one series per data-parallel rank
        else:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    if names.INFLIGHT not in totals:
        return None
    return FrontendCounts(
        {key: totals.get(name, 0.0) for key, name in _COUNTERS.items()},
        {key: totals.get(name, 0.0) for key, name in _GAUGES.items()},
        prefilling,
        pending.get(_PREFILL) or next(iter(pending.values()), None),
        totals.get(names.BATCH_TOKENS),
    )


@dataclass(slots=True)
class FrontendMeter:
    """Differences of the frontends' counters between two pulls at which all of them could be read.

    Frontends measure latencies in real seconds; ``speed`` simulated ones pass in each.
    """

    speed: float = 1.0
    _counts: CounterMeter[FrontendCounts] = field(default_factory=CounterMeter)
    _input_mean: float | None = None
    _uncached_share: float = 1.0

    def add(
        self, frontends: Mapping[str, FrontendCounts], urls: Collection[str], now_s: float, *, first: Role
    ) -> Demand | None:
        """Return what arrived since the last pull that was complete.

        None also as long as requests have come but the size of their prompts is unknown; else as of
        `CounterMeter.gained`. ``first`` is the role of the workers that prefill.
        """
        found = self._counts.gained(frontends, urls, now_s)
        if self._input_mean is None:
            self._input_mean = _first_mean(list(self._counts.newest.values()))
        if found is None:
            return None
        gained, period_s = found
        self._learn(gained)
        now = {key: self._counts.gauge(key) for key in _GAUGES}
        if self._input_mean is None and (gained["started"] or now["inflight"]):
            return None
        return self._demand(gained, now, period_s, first)

    def _learn(self, gained: Mapping[str, float]) -> None:
        if gained["input_count"]:
            self._input_mean = gained["input_sum"] / gained["input_count"]
        if gained["input_sum"] and gained["cached_count"]:
            self._uncached_share = min(1.0, max(0.0, 1.0 - gained["cached_sum"] / gained["input_sum"]))

    def _demand(
        self, gained: Mapping[str, float], now: Mapping[str, float], period_s: float, first: Role
    ) -> Demand:
        mean = self._input_mean or 0.0
        share = self._uncached_share
        frontends = list(self._counts.newest.values())
        pending = [each.pending for each in frontends if each.pending is not None]
        in_prefill = sum(
            max(0.0, each.gauges["unanswered"] - each.gauges["queued"])
            if each.prefilling is None
            else each.prefilling
            for each in frontends
        )
        busy = {worker for each in pending for worker, tokens in each.items() if tokens > 0}
        return Demand(
            period_s=period_s,
            arrivals=gained["started"],
            prompt_tokens=gained["started"] * mean,
            uncached_tokens=gained["started"] * mean * share,
            refused=gained["rejected"],
            completed=gained["finished"],
            output_tokens=gained["output_sum"],
            prefilled_tokens=gained["input_sum"] * share,
            ttft_sum_s=gained["ttft_sum"] * self.speed,
            ttft_count=gained["ttft_count"],
            itl_sum_s=gained["itl_sum"] * self.speed,
            itl_count=gained["itl_count"],
            waiting=now["queued"],
            waiting_tokens=now["queued_tokens"] * share,
            in_flight=_in_flight(now, in_prefill, first),
            in_flight_tokens=sum(sum(each.values()) for each in pending)
            if pending
            else in_prefill * mean * share,
            prefilling_workers=len(busy) if pending else float(in_prefill > 0),
        )


def _first_mean(frontends: Sequence[FrontendCounts]) -> float | None:
    """Return the tokens of a prompt since the frontends' start, else of those in prefill now."""
    answered = sum(each.counters["input_count"] for each in frontends)
    if answered:
        return sum(each.counters["input_sum"] for each in frontends) / answered
    counting = [each for each in frontends if each.pending is not None and each.prefilling]
    prefilling = sum(each.prefilling or 0.0 for each in counting)
    return sum(sum((each.pending or {}).values()) for each in counting) / prefilling if prefilling else None


def _in_flight(now: Mapping[str, float], in_prefill: float, first: Role) -> Mapping[Role, float]:
    assigned = max(0.0, now["inflight"] - now["queued"])
    if first is Role.AGGREGATED:
        return {first: assigned}
    return {first: in_prefill, Role.DECODE: max(0.0, assigned - in_prefill)}


_LATENCIES: Final = {TTFT: names.TTFT, ITL: names.ITL}
_WANTED: Final = FRONTEND_NAMES | {f"{name}_bucket" for name in _LATENCIES.values()}


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
        urls, now_s = tuple(self._urls()), self._now_s()
        readings, (pages, flaws) = await asyncio.gather(
            self._workers.read(query), self._pages.fetch_all(urls, self._page)
        )
        unknown = unknown_queue(len(pages), flaws, kind="frontend", source=self.name)
        frontends = {url: frontend for url, (frontend, _) in pages.items()}
        has_prefill = any(each.prefilling is not None for each in frontends.values())
        first = Role.PREFILL if query.prefill_workers or has_prefill else Role.AGGREGATED
        return replace(
            readings,
            queue=unknown or self._queue(readings.queue, frontends, query.max_age_s),
            queue_is_complete=True,
            demand=self._meter.add(frontends, urls, now_s, first=first),
            latency=self._latency.add({url: latency for url, (_, latency) in pages.items()}, urls),
        )

    def _page(self, url: str, page: str) -> tuple[FrontendCounts, Mapping[str, Buckets]]:
        samples = parse_samples(page, _WANTED)
        frontend = read_frontend(samples)
        if frontend is None:
            raise ObservationError(f"{url}/metrics: not the page of a Dynamo frontend")
        return frontend, {key: self._buckets(samples, name) for key, name in _LATENCIES.items()}

    def _buckets(self, samples: list[Sample], name: str) -> Buckets:
        found = buckets_of([each for each in samples if each.name == f"{name}_bucket"])
        return tuple((bound * self._speed, count) for bound, count in found)

    def _queue(self, workers: Reading, frontends: Mapping[str, FrontendCounts], max_age_s: float) -> Reading:
        """Return what waits; the workers' own counts win over what the frontends conclude."""
        if workers.value is None:
            waiting = sum(each.waiting for each in frontends.values())
        else:
            waiting = workers.value + sum(each.gauges["queued"] for each in frontends.values())
        return assess(waiting, age_s=0.0, max_age_s=max_age_s, source=self.name)
