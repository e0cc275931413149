"""What a worker's page says by vLLM's names: the requests that wait in it, and whether its engine gets on with its own.

An engine whose core hangs answers /health all the same. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.core import metric_names as names
from penstock.core.exposition import Sample, parse_samples

NOT_ON_PAGE: Final = f"its page has no {names.VLLM_KV_USAGE}"
"""Why a worker that answers has no reading."""


METRICS_PATH: Final = "/metrics"
"""Path of a metrics page, where its runtime has no other."""

OwnNames = Mapping[str, str | tuple[str, ...]]
"""A runtime's own names by vLLM's, where they differ; the gauges of several are added. See `RuntimeTraits.metric_names`."""


def names_on_page(name: str, own: OwnNames) -> tuple[str, ...]:
    """Return the names under which a worker's page has what vLLM calls ``name``."""
    found = own.get(name, name)
    return (found,) if isinstance(found, str) else found


def worker_samples(page: str, wanted: Collection[str], *runtimes: OwnNames) -> list[Sample]:
    """Return a worker's samples by vLLM's names, in page order.

    Args:
        page: Text exposition format.
        wanted: vLLM's names.
        runtimes: The names of each runtime that the worker may be of; none given: vLLM's.

    Raises:
        ObservationError: a line of such a name cannot be read.
    """
    by_own = {each: name for own in runtimes or ({},) for name in wanted for each in names_on_page(name, own)}
    return [replace(each, name=by_own[each.name]) for each in parse_samples(page, by_own)]


WAITING_NAMES: Final = (names.VLLM_WAITING, names.VLLM_WAITING_BY_REASON)
"""What `waiting_by_engine` reads."""

_CAPACITY: Final = "capacity"
"""The reason that counts: ``deferred`` requests wait for a KV transfer, not for room."""


def waiting_by_engine(samples: Sequence[Sample]) -> list[float]:
    """Return the requests that wait for room in each of a worker's engines.

    Older workers do not report why a request waits; all of theirs count.

    Returns:
        As written, one number per engine; empty if the page does not say.
    """
    return [
        sample.value
        for sample in samples
        if sample.name == names.VLLM_WAITING_BY_REASON and sample.labels.get("reason") == _CAPACITY
    ] or [sample.value for sample in samples if sample.name == names.VLLM_WAITING]


STALL_REAL_S: Final = 120.0
"""Real seconds with requests and without a token after which an engine hangs whose steps are known to be short, as
simulated ones. Chosen: short against a client's patience."""
ENGINE_STALL_REAL_S: Final = 600.0
"""The same of a real engine. Chosen: twice the 300 s after which vLLM 0.32 itself gives up a step; one may compile for
minutes at the first request of its kind, with no token meanwhile."""

_TOKENS: Final = frozenset(
    {names.VLLM_PROMPT_TOKENS + names.COUNTER_SUFFIX, names.VLLM_GENERATION_TOKENS + names.COUNTER_SUFFIX}
)
_MOVING: Final = _TOKENS | {names.VLLM_KV_USAGE, names.VLLM_RUNNING}
"""What only a living core changes; the requests that wait are left out, because arrivals alone change their number."""
PROGRESS_NAMES: Final = (*sorted(_MOVING), names.VLLM_WAITING_BY_REASON)
"""What `read_engine` reads."""
_DEFERRED: Final = "deferred"
"""The reason of requests that wait for KV of another worker."""
_RANK: Final = "engine"
"""vLLM's label of a data-parallel rank."""


@dataclass(frozen=True, slots=True)
class RankReading:
    """What one page says of one engine; a worker has one for each data-parallel rank.

    Attributes:
        figures: What only a living core changes; empty where the page counts no tokens.
        is_deferred: Requests wait in it for KV that another worker has.
    """

    figures: tuple[float, ...]
    running: float
    is_deferred: bool


EngineReading = Mapping[str, RankReading]
"""What one page says of a worker's engines, by the label that tells ranks apart."""


def read_engine(samples: Iterable[Sample]) -> EngineReading:
    """Return what the samples of one page say; numbers that are none are left out."""
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
    """Return the requests that all engines of a worker run."""
    return sum(rank.running for rank in reading.values())


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How one engine gets on.

    Attributes:
        since_s: When its figures last changed, or when it last had nothing to do.
    """

    figures: tuple[float, ...]
    since_s: float
    is_stalled: bool = False

    def after(
        self, reading: RankReading, now_s: float, *, is_busy: bool, worked_s: float, limit_s: float
    ) -> RankProgress:
        """Return the progress after one more reading.

        An engine that stalled and lost its requests is given another chance after twice the limit: one that was only
        slow may have had nothing to change its figures with since.
        """
        if not reading.figures or reading.figures != self.figures:
            return RankProgress(reading.figures, now_s)
        stood_s = now_s - max(self.since_s, worked_s)
        if is_busy:
            return replace(self, is_stalled=self.is_stalled or stood_s >= limit_s)
        if self.is_stalled and stood_s < 2 * limit_s:
            return self
        return RankProgress(self.figures, now_s)


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """How the engines of a worker get on, by rank; times are real seconds of a monotonic clock.

    Attributes:
        worked_s: When its processes were last seen to compute; None: never, or it is not watched.
    """

    ranks: Mapping[str, RankProgress]
    worked_s: float | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether one of them hangs, though others may not."""
        return any(rank.is_stalled for rank in self.ranks.values())

    def stood_s(self, now_s: float) -> float:
        """Return for how long the figures of the slowest rank stand, or it has had nothing to do."""
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

        A rank is busy by its own count. A core that hung before it saw a request reports none, so what the caller knows
        to be in the worker counts where no rank runs, moves or waits for another worker.

        Args:
            reading: Of the newest page.
            now_s: When it was read.
            inflight_requests: What the caller has sent to the worker.
            limit_s: Time without a token and without work after which a busy engine hangs.
            compile_s: For this long work without a token is progress: an engine that compiles at a first request does no
                more than at its start, one that spins in a collective call of a lost peer computes for ever.
            is_working: The worker's processes have computed since the reading before.
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
        """Return what is wrong with a worker of which an engine hangs, for people; None: nothing."""
        stalled = sorted(name for name, rank in self.ranks.items() if rank.is_stalled)
        if not stalled:
            return None
        ranks = f" of data-parallel rank {', '.join(stalled)}" if len(self.ranks) > 1 else ""
        return f"{_HANGS}: requests, but no token{ranks} for {limit_s:g} s (real)"


_UNKNOWN: Final = RankProgress((), 0.0)
NO_PROGRESS_KNOWN: Final = EngineProgress({})
"""Before the first reading."""
_HANGS: Final = "its engine hangs"


def says_hangs(problem: str | None) -> bool:
    """Return whether a worker's problem is one of `EngineProgress.problem`."""
    return problem is not None and problem.startswith(_HANGS)
