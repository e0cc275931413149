"""What every source gives: readings of workers and prefill queue, demand, and latency histograms for the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Protocol
from urllib.parse import urlsplit

from penstock.api import Role
from penstock.core.errors import PenstockError
from penstock.core.exposition import Sample
from penstock.planner.decide.observation import Demand
from penstock.planner.decide.reading import Reading
from penstock.planner.targets.base import Endpoint

Urls = Callable[[], Sequence[str]]
"""Base URLs of the graph's ready routers now, without a trailing slash."""

Buckets = tuple[tuple[float, float], ...]
"""Cumulative histogram: (upper bound in simulated seconds, count), bounds rising, the last infinite."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Real seconds without asking what failed, doubling. Chosen: what hangs costs its time-out once per pause
instead of once per pull, and one that is back is noticed within half a minute."""


@dataclass(frozen=True, slots=True)
class Query:
    """What to read: of ready workers, as old as ``max_age_s`` simulated seconds at most."""

    endpoints: tuple[Endpoint, ...]
    max_age_s: float

    @property
    def kv_workers(self) -> tuple[Endpoint, ...]:
        """Return the workers whose KV usage counts: aggregated and decode ones."""
        return tuple(e for e in self.endpoints if e.role in (Role.DECODE, Role.AGGREGATED))

    @property
    def prefill_workers(self) -> tuple[Endpoint, ...]:
        """Return the prefill workers."""
        return tuple(e for e in self.endpoints if e.role is Role.PREFILL)


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of one source.

    Attributes:
        kv: KV usage fraction by worker name; exactly the query's KV workers.
        queue: Requests waiting for prefill.
        queue_is_complete: The queue includes what a router holds back; a source that asks only the workers
            cannot know.
        demand: At the routers' frontends since the last pull; None where it is unknown or the source cannot know.
        worker_waiting: Requests that wait inside each KV worker, by its name; None if the source does not say.
    """

    kv: Mapping[str, Reading]
    queue: Reading
    queue_is_complete: bool = True
    demand: Demand | None = None
    worker_waiting: Mapping[str, Reading] | None = None
    latency: Mapping[str, Buckets] = field(default_factory=dict)


class ReadingSource(Protocol):
    """One place to read metrics from; ``counts_demand``: whether it can know the demand."""

    counts_demand: bool

    @property
    def name(self) -> str:
        """Return the word that readings carry."""
        ...

    async def read(self, query: Query) -> Readings:
        """Return one reading for everything requested.

        Raises:
            ObservationError: the entire source gave nothing.
        """
        ...


@dataclass(slots=True)
class PullBackoff:
    """One source's or one page's failures in a row; not asked before ``retry_at_s``, real monotonic seconds."""

    failures: int = 0
    retry_at_s: float = 0.0
    why: str = ""

    def is_pausing(self, now_s: float) -> bool:
        """Return whether it is too early to query it again."""
        return now_s < self.retry_at_s

    def failed(self, why: str, now_s: float) -> None:
        """Count a failure and begin the next pause."""
        self.failures += 1
        self.retry_at_s = now_s + min(FIRST_PAUSE_S * 2 ** min(self.failures - 1, 16), LONGEST_PAUSE_S)
        self.why = why

    def succeeded(self) -> None:
        """Forget the failures."""
        self.failures, self.retry_at_s = 0, 0.0


def total_of(readings: Sequence[Reading]) -> Reading:
    """Return the sum of readings, one at least, as old as the oldest of them.

    The first one without a value is returned if there is one: the sum of a part would be too small.
    """
    unknown = next((reading for reading in readings if reading.value is None), None)
    if unknown is not None:
        return unknown
    oldest = max(readings, key=lambda reading: reading.age_s or 0.0)
    return replace(oldest, value=sum(reading.value or 0.0 for reading in readings))


def address(url: str) -> str:
    """Return ``host:port`` of a URL, Prometheus' ``instance``."""
    return urlsplit(url).netloc


def in_short(exc: PenstockError) -> str:
    """Return an error's first line, bounded, for a reading's ``why``."""
    lines = str(exc).splitlines()
    return lines[0][:160] if lines else type(exc).__name__


TTFT: Final = "ttft"
ITL: Final = "itl"


class LatencyTotals:
    """Histograms of several frontends as one that never falls, though frontends restart and leave."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Buckets]] = {}
        self._total: dict[str, dict[float, float]] = {key: {} for key in (TTFT, ITL)}

    def add(self, pages: Mapping[str, Mapping[str, Buckets]], urls: Sequence[str]) -> Mapping[str, Buckets]:
        """Return the sums after what each router counted since the last read."""
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


def buckets_of(samples: Sequence[Sample]) -> Buckets:
    """Return the sum of a histogram's series; samples without a bound are skipped."""
    totals: dict[float, float] = {}
    for sample in samples:
        try:
            bound = _bound(sample.labels.get("le", ""))
        except ValueError:
            continue
        totals[bound] = totals.get(bound, 0.0) + sample.value
    return tuple(sorted(totals.items()))


_bound = lru_cache(1024)(float)
"""The same few bounds come with every page."""


def gained(before: Buckets, after: Buckets) -> Buckets:
    """Return the cumulative counts gained since ``before``.

    A counter that fell (its process restarted) counts from 0, as in Prometheus.
    """
    earlier = dict(before)
    if any(count < earlier.get(bound, 0.0) for bound, count in after):
        return after
    return tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in after)
