"""The interface of metrics sources (worker and queue readings, demand, latency histograms), and a chain of sources.

The chain queries each source only for values that the earlier ones could not provide. A value from a backup names both sources in its
``source``. A queue from a backup that sees only the workers' own queues is a lower bound. If no source answers, the last fresh value is
repeated with its increasing age until it is too old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Protocol
from urllib.parse import urlsplit

from penstock.api import Role
from penstock.core.backoff import Backoff
from penstock.core.errors import ObservationError, PenstockError
from penstock.core.exposition import Sample
from penstock.core.histogram import share_within
from penstock.core.logs import get_logger
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.demand.reading import RANK, Quality, Reading, assess, missing
from penstock_planner.targets.base import Endpoint

Urls = Callable[[], Sequence[str]]
"""Function that returns the base URLs of the graph's ready routers, without a trailing slash."""

Buckets = tuple[tuple[float, float], ...]
"""Cumulative histogram: (upper bound in simulated seconds, count), in increasing order of bounds; the last bound is infinite."""

PAUSES = Backoff(first_s=1.0, limit_s=30.0)
"""Backoff, in real seconds, before a failed source is queried again.

Chosen: a source that hangs delays a read by its timeout only once per pause, and its recovery is noticed within half a
minute.
"""


@dataclass(frozen=True, slots=True)
class Query:
    """Request to a metrics source: the workers whose values it is to read, and the age above which a value is stale.

    Attributes:
        endpoints: Addresses of the ready workers.
        max_age_s: Age above which a value counts as stale, simulated seconds.
    """

    endpoints: tuple[Endpoint, ...]
    max_age_s: float

    @property
    def kv_workers(self) -> tuple[Endpoint, ...]:
        """Ready workers whose KV usage is read: the decode and aggregated workers."""
        return tuple(e for e in self.endpoints if e.role in (Role.DECODE, Role.AGGREGATED))

    @property
    def prefill_workers(self) -> tuple[Endpoint, ...]:
        """Ready prefill workers, whose queues are read."""
        return tuple(e for e in self.endpoints if e.role is Role.PREFILL)


@dataclass(frozen=True, slots=True)
class Readings:
    """Values from one metrics source or from a chain of sources.

    Attributes:
        kv: KV usage, 0-1, by worker name, for exactly the workers in `Query.kv_workers`.
        queue: Number of requests that wait for prefill.
        queue_is_complete: Whether ``queue`` includes requests that wait in routers, which a source that reads only
            workers does not see.
        demand: Demand at the routers since the last read; None if unknown, or if the source cannot know it.
        worker_waiting: Number of requests that wait inside each decode or aggregated worker, by worker name; None if
            the source does not provide it.
        latency: Cumulative latency histograms by name (`TTFT`, `ITL`, `DISPATCHED_TTFT`); empty if the source has none.
        gone: In a chain of sources, the error of each source that did not answer, by name of the source.
    """

    kv: Mapping[str, Reading]
    queue: Reading
    queue_is_complete: bool = True
    demand: Demand | None = None
    worker_waiting: Mapping[str, Reading] | None = None
    latency: Mapping[str, Buckets] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)


class ReadingSource(Protocol):
    """A source of metrics, such as routers, workers or Prometheus.

    Attributes:
        counts_demand: Whether the source can provide the demand at the routers.
    """

    counts_demand: bool

    @property
    def name(self) -> str:
        """Name of the source, as in the ``source`` field of its readings."""
        ...

    async def read(self, query: Query) -> Readings:
        """Return a reading for each value in the query; a value that is not available is marked as missing in its reading.

        Raises:
            ObservationError: the source provided no value at all.
        """
        ...


@dataclass(slots=True)
class PullBackoff:
    """Backoff of one metrics source or page: how long it is not queried after failures.

    Attributes:
        failures: Number of consecutive failures.
        retry_at_s: Time of the next try, real monotonic seconds.
        why: Error of the last failure.
    """

    failures: int = 0
    retry_at_s: float = 0.0
    why: str = ""

    def is_pausing(self, now_s: float) -> bool:
        """Return whether the source or page must not be queried now, because the pause after its last failure has not ended.

        Args:
            now_s: Present time, in real monotonic seconds.
        """
        return now_s < self.retry_at_s

    def failed(self, why: str, now_s: float) -> None:
        """Count one more failure of the source or page, and start the next pause, which is longer than the last one.

        Args:
            why: Error of the failure.
            now_s: Present time, in real monotonic seconds.
        """
        self.failures += 1
        self.retry_at_s = now_s + PAUSES.pause_s(self.failures)
        self.why = why

    def succeeded(self) -> None:
        """Reset the failures, so that the source or page can be queried at once."""
        self.failures, self.retry_at_s = 0, 0.0


def total_of(readings: Sequence[Reading]) -> Reading:
    """Return the sum of the readings, with the age of the oldest reading. There must be at least one reading.

    If a reading has no value, the first such reading is returned instead, since a partial sum would be too small.
    """
    unknown = next((reading for reading in readings if reading.value is None), None)
    if unknown is not None:
        return unknown
    oldest = max(readings, key=lambda reading: reading.age_s or 0.0)
    return replace(oldest, value=sum(reading.value or 0.0 for reading in readings))


def address(url: str) -> str:
    """Return ``host:port`` of a URL, which is the label ``instance`` in Prometheus."""
    return urlsplit(url).netloc


def first_line(exc: PenstockError) -> str:
    """Return the first line of an error's message, at most 160 characters."""
    lines = str(exc).splitlines()
    return lines[0][:160] if lines else type(exc).__name__


TTFT: Final = "ttft"
ITL: Final = "itl"
DISPATCHED_TTFT: Final = "dispatched_ttft"
"""Histogram of the seconds from the dispatch of a prompt to its first token."""


class LatencyTotals:
    """Sums the latency histograms of several frontends into totals that never decrease, although frontends restart or are removed."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Buckets]] = {}
        self._total: dict[str, dict[float, float]] = {key: {} for key in (TTFT, ITL, DISPATCHED_TTFT)}

    def add(self, pages: Mapping[str, Mapping[str, Buckets]], urls: Sequence[str]) -> Mapping[str, Buckets]:
        """Add the latencies that each frontend measured since the last call to the totals, and return the totals by name.

        The names are those of the histograms, such as ``ttft``. A histogram is a tuple of pairs (upper bound in
        simulated seconds, number of samples up to the bound).

        Args:
            pages: For each frontend whose page could be read, by URL: its cumulative histograms by name.
            urls: URLs of all current frontends.
        """
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
    """Return the sum of a histogram's series as (upper bound in simulated seconds, number of samples up to it), in order.

    Samples without a bucket bound are skipped.

    Args:
        samples: Samples of the histogram's buckets, of one or several series.
    """
    totals: dict[float, float] = {}
    for sample in samples:
        try:
            bound = _bound(sample.labels.get("le", ""))
        except ValueError:
            continue
        totals[bound] = totals.get(bound, 0.0) + sample.value
    return tuple(sorted(totals.items()))


_bound = lru_cache(1024)(float)
"""Parses a bucket bound; cached, since the same few bounds occur on every page."""


def gained(before: Buckets, after: Buckets) -> Buckets:
    """Return the histogram of the samples that were added between ``before`` and ``after``, as pairs (upper bound, number of samples).

    If a count decreased, because the process restarted, ``after`` is returned, as in Prometheus.

    Args:
        before: Earlier histogram of the same process.
        after: Later histogram.
    """
    earlier = dict(before)
    if any(count < earlier.get(bound, 0.0) for bound, count in after):
        return after
    return tuple((bound, count - earlier.get(bound, 0.0)) for bound, count in after)


def later_than(buckets: Buckets, bound_s: float) -> float:
    """Return the number of samples above ``bound_s`` (simulated seconds) in a latency histogram.

    Interpolates linearly within the bucket that contains the bound.

    Args:
        buckets: Pairs (upper bound in simulated seconds, number of samples up to it), in order.
        bound_s: The bound, such as a TTFT target.
    """
    share = share_within(buckets, bound_s)
    return 0.0 if share is None else (1.0 - share) * buckets[-1][1]


Key = tuple[str, str]
"""Kind of a reading, and the name of its worker (empty for the queue)."""

_KV, _WAITING = "kv", "waiting"
_QUEUE: Key = ("queue", "")

log = get_logger(__name__)


class SourceChain:
    """Metrics source that combines several sources: each is queried only for values that the preferred ones before it lack."""

    name = "chain"
    counts_demand = True

    def __init__(
        self, sources: Sequence[ReadingSource], *, now_s: Callable[[], float], real_now_s: Callable[[], float]
    ) -> None:
        """Create a chain.

        Args:
            sources: Sources, the preferred one first; at least one.
            now_s: Simulated clock, for the age of values.
            real_now_s: Monotonic clock in real seconds, for the backoff.
        """
        self._sources = tuple(sources)
        self._now_s = now_s
        self._real_now_s = real_now_s
        self._health = {source.name: PullBackoff() for source in sources}
        self._last: dict[Key, tuple[float, Reading]] = {}
        self._serving = sources[0].name

    async def read(self, query: Query) -> Readings:
        """Return a reading for each value in the query, from the first source that has the value.

        Never raises because a source failed.

        The demand (requests at the routers) is taken from the first source that knows the demand. A source that cannot
        provide demand is not queried if only the demand is missing.
        """
        workers = [worker.name for worker in query.kv_workers]
        wanted: list[Key] = [(_KV, name) for name in workers]
        if query.prefill_workers or not workers:
            wanted.append(_QUEUE)
        found: dict[Key, Reading] = {}
        latency: Mapping[str, Buckets] = {}
        demand: Demand | None = None
        gone: dict[str, str] = {}
        for position, source in enumerate(self._sources):
            is_complete = all(key in found and found[key].is_known for key in wanted)
            if is_complete and (demand is not None or not source.counts_demand):
                continue
            answer = await self._ask(source, query)
            if isinstance(answer, str):
                gone[source.name] = answer
                known = [(_WAITING, name) for name in workers if (_WAITING, name) in self._last]
                readings = dict.fromkeys([*wanted, *known], missing(answer, source=source.name))
            else:
                readings = _by_key(answer, is_backup=position > 0)
                latency = latency or answer.latency
                demand = demand or answer.demand
            _merge(found, readings, is_backup=position > 0)
        self._remember(found)
        kept = {key: self._kept(key, reading, query.max_age_s) for key, reading in found.items()}
        self._note([kept[key] for key in wanted if key in kept])
        waiting = {name: kept[_WAITING, name] for name in workers if (_WAITING, name) in kept}
        return Readings(
            {name: kept[_KV, name] for name in workers},
            kept.get(_QUEUE) or missing("not asked", source="none"),
            demand=demand,
            worker_waiting=waiting or None,
            latency=latency,
            gone=gone,
        )

    async def _ask(self, source: ReadingSource, query: Query) -> Readings | str:
        """Return the source's readings, or its error as text."""
        health = self._health[source.name]
        if health.is_pausing(self._real_now_s()):
            return health.why
        try:
            answer = await source.read(query)
        except ObservationError as exc:
            health.failed(first_line(exc), self._real_now_s())
            if health.failures == 1:
                log.warning("metrics source unavailable", source=source.name, why=health.why)
            return health.why
        if health.failures:
            log.info("metrics source back", source=source.name, failures=health.failures)
        health.succeeded()
        return answer

    def _remember(self, found: Mapping[Key, Reading]) -> None:
        now_s = self._now_s()
        self._last = {key: self._last[key] for key in found if key in self._last}
        for key, reading in found.items():
            if reading.is_known:
                self._last[key] = (now_s - (reading.age_s or 0.0), reading)

    def _kept(self, key: Key, reading: Reading, max_age_s: float) -> Reading:
        if reading.quality is not Quality.MISSING or key not in self._last:
            return reading
        measured_s, last = self._last[key]
        aged = assess(last.value, age_s=self._now_s() - measured_s, max_age_s=max_age_s, source=last.source)
        return aged if aged.is_known else replace(aged, why=f"{aged.why}; {reading.why}")

    def _note(self, readings: Sequence[Reading]) -> None:
        known = [reading.source.split(" ")[0] for reading in readings if reading.is_known]
        serving = known[-1] if known else "none"
        if serving != self._serving:
            log.warning("metrics now come from another source", source=serving, before=self._serving)
            self._serving = serving


def _by_key(answer: Readings, *, is_backup: bool) -> dict[Key, Reading]:
    # A router that is too busy to answer may have a long queue that no worker sees.
    is_part = answer.queue.at_least or (is_backup and not answer.queue_is_complete)
    waiting = answer.worker_waiting or {}
    return {
        **{(_KV, name): reading for name, reading in answer.kv.items()},
        **{(_WAITING, name): reading for name, reading in waiting.items()},
        _QUEUE: replace(answer.queue, at_least=is_part),
    }


def _merge(found: dict[Key, Reading], readings: Mapping[Key, Reading], *, is_backup: bool) -> None:
    """Replace readings by better ones: fresh before stale before missing. The reasons of missing ones are joined."""
    for key, reading in readings.items():
        before = found.get(key)
        if before is None:
            found[key] = reading
        elif RANK[reading.quality] > RANK[before.quality]:
            source = f"{reading.source} (backup of {before.source})" if is_backup else reading.source
            why = f"{before.source}: {before.why}" + (f"; {reading.why}" if reading.why else "")
            found[key] = replace(reading, source=source, why="" if reading.is_known else why)
        elif not before.is_known:
            why = f"{before.why}; {reading.source}: {reading.why}"
            found[key] = replace(before, why=why)
