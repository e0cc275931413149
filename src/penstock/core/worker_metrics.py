"""Reads a worker's metrics page by vLLM's metric names: waiting requests, and whether its engine makes progress.

An engine whose core hangs still answers /health. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.core import metric_names as names
from penstock.core.exposition import Sample, parse_samples

NOT_ON_PAGE: Final = f"its page has no {names.VLLM_KV_USAGE}"
"""Reason why a worker that answers has no reading."""


METRICS_PATH: Final = "/metrics"
"""Default path of a metrics page."""

OwnNames = Mapping[str, str | tuple[str, ...]]
"""A runtime's own metric names by vLLM's name, if they differ; if there are several for one, the gauges are added.
See `RuntimeTraits.metric_names`."""


def names_on_page(name: str, own: OwnNames) -> tuple[str, ...]:
    """Return the names under which a worker's page has the metric that vLLM calls ``name``, according to the runtime's names ``own``."""
    found = own.get(name, name)
    return (found,) if isinstance(found, str) else found


def worker_samples(page: str, wanted: Collection[str], *runtimes: OwnNames) -> list[Sample]:
    """Return a worker's samples with their names replaced by vLLM's, in the order of the page.

    Args:
        page: Metrics page in the text exposition format.
        wanted: vLLM's names of the metrics to read.
        runtimes: Metric names of each runtime that the worker may have; without any, vLLM's names are used.

    Raises:
        ObservationError: A line with such a name is malformed.
    """
    by_own = {each: name for own in runtimes or ({},) for name in wanted for each in names_on_page(name, own)}
    return [replace(each, name=by_own[each.name]) for each in parse_samples(page, by_own)]


WAITING_NAMES: Final = (names.VLLM_WAITING, names.VLLM_WAITING_BY_REASON)
"""Metric names that `waiting_by_engine` needs."""

_CAPACITY: Final = "capacity"
"""Reason label of requests that wait for capacity. Requests with reason ``deferred`` wait for a KV transfer and do
not count."""


def waiting_by_engine(samples: Sequence[Sample]) -> list[float]:
    """Return the number of requests that wait for capacity in each of a worker's engines.

    Older workers do not report reasons; all their waiting requests count.

    Returns:
        One number per engine, in the order of the page; empty if the page has no such metric.
    """
    return [
        sample.value
        for sample in samples
        if sample.name == names.VLLM_WAITING_BY_REASON and sample.labels.get("reason") == _CAPACITY
    ] or [sample.value for sample in samples if sample.name == names.VLLM_WAITING]


STALL_REAL_S: Final = 120.0
"""Wall-clock seconds with requests but without a token after which an engine counts as hanging, if its steps are
known to be short, such as a simulated one's. Chosen: short compared with a client's timeout."""
ENGINE_STALL_REAL_S: Final = 600.0
"""The same limit for a real engine. Chosen: twice the 300 s after which vLLM 0.32 itself aborts a step; an engine may
compile for minutes, without a token, at the first request of a kind."""

_TOKENS: Final = frozenset(
    {names.VLLM_PROMPT_TOKENS + names.COUNTER_SUFFIX, names.VLLM_GENERATION_TOKENS + names.COUNTER_SUFFIX}
)
_MOVING: Final = _TOKENS | {names.VLLM_KV_USAGE, names.VLLM_RUNNING}
"""Metrics that change only if the engine core works. Waiting requests are not included, because arrivals alone change
their number."""
PROGRESS_NAMES: Final = (*sorted(_MOVING), names.VLLM_WAITING_BY_REASON)
"""Metric names that `read_engine` needs."""
_DEFERRED: Final = "deferred"
"""Reason label of requests that wait for KV from another worker."""
_RANK: Final = "engine"
"""vLLM's label with the data-parallel rank."""


@dataclass(frozen=True, slots=True)
class RankReading:
    """Values of one engine on a metrics page; a worker has one engine per data-parallel rank.

    Attributes:
        figures: Token counters, KV usage and running requests, which change only if the engine core works; empty if the
            page has no token counters.
        running: Number of requests that the engine runs.
        is_deferred: Whether requests wait in it for KV from another worker.
    """

    figures: tuple[float, ...]
    running: float
    is_deferred: bool


EngineReading = Mapping[str, RankReading]
"""Values of a worker's engines on one page, by data-parallel rank."""


def read_engine(samples: Iterable[Sample]) -> EngineReading:
    """Return the values of a worker's engines from the samples of one page; values that are not finite are ignored."""
    by_rank: dict[str, list[Sample]] = {}
    for sample in samples:
        if math.isfinite(sample.value):
            by_rank.setdefault(sample.labels.get(_RANK, ""), []).append(sample)
    return {rank: _read_rank(known) for rank, known in by_rank.items()}


def _read_rank(known: list[Sample]) -> RankReading:
    deferred = (
        sample.value
        for sample in known
        if sample.name == names.VLLM_WAITING_BY_REASON and sample.labels.get("reason") == _DEFERRED
    )
    counts_tokens = any(sample.name in _TOKENS for sample in known)
    return RankReading(
        figures=tuple(sample.value for sample in known if counts_tokens and sample.name in _MOVING),
        running=sum(sample.value for sample in known if sample.name == names.VLLM_RUNNING),
        is_deferred=any(value > 0 for value in deferred),
    )


def running(reading: EngineReading) -> float:
    """Return the number of requests that all engines of a worker run."""
    return sum(rank.running for rank in reading.values())


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of one engine; times are wall-clock seconds of a monotonic clock.

    Attributes:
        figures: Values of the last reading, as in `RankReading`.
        since_s: Time at which the values last changed, or at which the engine last had no requests.
        is_stalled: Whether the engine counts as hanging.
    """

    figures: tuple[float, ...]
    since_s: float
    is_stalled: bool = False

    def after(
        self, reading: RankReading, now_s: float, *, is_busy: bool, worked_s: float, limit_s: float
    ) -> RankProgress:
        """Return the progress after one more reading.

        An engine that hangs and has lost its requests counts as working again after twice the limit: if it was only
        slow, it may have had no request to make progress with.

        Args:
            reading: The new reading.
            now_s: Time of the reading, monotonic seconds.
            is_busy: Whether the engine has requests.
            worked_s: Time up to which the worker counts as making progress because its processes use CPU, monotonic
                seconds.
            limit_s: Seconds without progress after which a busy engine counts as hanging.
        """
        if not reading.figures or reading.figures != self.figures:
            return RankProgress(reading.figures, now_s)
        stalled_for_s = now_s - max(self.since_s, worked_s)
        if is_busy:
            return replace(self, is_stalled=self.is_stalled or stalled_for_s >= limit_s)
        if self.is_stalled and stalled_for_s < 2 * limit_s:
            return self
        return RankProgress(self.figures, now_s)


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """Progress of a worker's engines; times are wall-clock seconds of a monotonic clock.

    Attributes:
        ranks: Progress by data-parallel rank.
        worked_s: Time at which the worker's processes were last seen to use CPU; None if never, or if that is not
            observed.
    """

    ranks: Mapping[str, RankProgress]
    worked_s: float | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether any of the engines hangs."""
        return any(rank.is_stalled for rank in self.ranks.values())

    def stalled_for_s(self, now_s: float) -> float:
        """Return the seconds since the last progress of the rank whose progress is longest ago; 0 without ranks."""
        return now_s - min((rank.since_s for rank in self.ranks.values()), default=now_s)

    def after(
        self,
        reading: EngineReading,
        now_s: float,
        *,
        inflight_requests: int,
        limit_s: float,
        compile_s: float = 0.0,
        is_working: bool = False,
    ) -> EngineProgress:
        """Return the progress after one more reading.

        A rank is busy if it reports running requests. A core that hung before it saw a request reports none;
        therefore the requests that the caller has sent count if no rank runs a request, changes its values, or waits
        for another worker.

        Args:
            reading: Values of the newest page.
            now_s: Time at which the page was read, monotonic seconds.
            inflight_requests: Number of requests that the caller has sent to the worker and that are not finished.
            limit_s: Seconds without tokens and without computing after which a busy engine counts as hanging.
            compile_s: Maximum seconds for which computing without tokens counts as progress. An engine that compiles
                at a first request takes no longer than at its start, but one that spins in a collective call of a
                lost peer computes forever.
            is_working: Whether the worker's processes have used CPU since the previous reading.
        """
        before = {name: self.ranks.get(name, _UNKNOWN) for name in reading}
        is_quiet = not running(reading) and not any(
            rank.is_deferred or rank.figures != before[name].figures for name, rank in reading.items()
        )
        is_sent = inflight_requests > 0 and is_quiet
        worked_s = now_s if is_working else self.worked_s

        def after(rank: RankReading, was: RankProgress) -> RankProgress:
            work_s = was.since_s if worked_s is None else min(worked_s, was.since_s + compile_s)
            return was.after(
                rank, now_s, is_busy=rank.running > 0 or is_sent, worked_s=work_s, limit_s=limit_s
            )

        return EngineProgress({name: after(rank, before[name]) for name, rank in reading.items()}, worked_s)

    def problem(self, limit_s: float) -> str | None:
        """Return a sentence about a worker with a hanging engine; None if none hangs.

        Args:
            limit_s: Wall-clock seconds without progress after which an engine counts as hanging, for the sentence.
        """
        stalled = sorted(name for name, rank in self.ranks.items() if rank.is_stalled)
        if not stalled:
            return None
        ranks = f" of data-parallel rank {', '.join(stalled)}" if len(self.ranks) > 1 else ""
        return f"{_HANGS}: requests, but no token{ranks} for {limit_s:g} s (real)"


_UNKNOWN: Final = RankProgress((), 0.0)
NO_PROGRESS_KNOWN: Final = EngineProgress({})
"""Progress before the first reading."""
_HANGS: Final = "its engine hangs"


def says_hangs(problem: str | None) -> bool:
    """Return whether ``problem``, a sentence about a worker, is from `EngineProgress.problem`, so that an engine hangs; False for None."""
    return problem is not None and problem.startswith(_HANGS)
