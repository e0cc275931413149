"""What a worker's page says by vLLM's names: the requests that wait in it, and whether its engine gets on with its own.

An engine whose core hangs answers /health all the same. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.core import metric_names as names
from penstock.core.exposition import Sample

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
"""Real seconds with requests and without a token after which an engine hangs. Chosen: long against any step of an
engine, whose every chunk of a prompt changes the KV usage, short against a client's patience."""

_TOKENS: Final = frozenset(
    {names.VLLM_PROMPT_TOKENS + names.COUNTER_SUFFIX, names.VLLM_GENERATION_TOKENS + names.COUNTER_SUFFIX}
)
_MOVING: Final = _TOKENS | {names.VLLM_KV_USAGE, names.VLLM_RUNNING}
"""What only a living core changes; the requests that wait are left out, because arrivals alone change their number."""
PROGRESS_NAMES: Final = (*sorted(_MOVING), names.VLLM_WAITING_BY_REASON)
"""What `read_engine` reads."""
_DEFERRED: Final = "deferred"
"""The reason of requests that wait for KV of another worker."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What one page says of an engine.

    Attributes:
        figures: What only a living core changes; empty where the page counts no tokens.
        is_deferred: Requests wait in it for KV that another worker has.
    """

    figures: tuple[float, ...]
    running: float
    is_deferred: bool


def read_engine(samples: Iterable[Sample]) -> EngineReading:
    """Return what the samples of one page say; numbers that are none are left out."""
    known = [sample for sample in samples if math.isfinite(sample.value)]
    deferred = (
        sample.value
        for sample in known
        if sample.name == names.VLLM_WAITING_BY_REASON and sample.labels.get("reason") == _DEFERRED
    )
    counts_tokens = any(sample.name in _TOKENS for sample in known)
    return EngineReading(
        figures=tuple(sample.value for sample in known if counts_tokens and sample.name in _MOVING),
        running=sum(sample.value for sample in known if sample.name == names.VLLM_RUNNING),
        is_deferred=any(value > 0 for value in deferred),
    )


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """How an engine gets on; times are real seconds of a monotonic clock.

    Attributes:
        since_s: When they last changed, or when it last had nothing to do.
    """

    figures: tuple[float, ...]
    since_s: float
    is_stalled: bool = False

    def after(
        self, reading: EngineReading, now_s: float, *, inflight_requests: int, limit_s: float
    ) -> EngineProgress:
        """Return the progress after one more reading.

        A core that hung before it saw a request reports none, so what the caller knows to be there counts too. An
        engine that stalled and lost its requests is given another chance after twice the limit: one that was only
        slow may have had nothing to change its figures with since.
        """
        is_busy = reading.running > 0 or (inflight_requests > 0 and not reading.is_deferred)
        if not reading.figures or reading.figures != self.figures:
            return EngineProgress(reading.figures, now_s)
        stood_s = now_s - self.since_s
        if is_busy:
            return replace(self, is_stalled=self.is_stalled or stood_s >= limit_s)
        if self.is_stalled and stood_s < 2 * limit_s:
            return self
        return EngineProgress(self.figures, now_s)


NO_PROGRESS_KNOWN: Final = EngineProgress((), 0.0)
"""Before the first reading."""


def stall_problem(limit_s: float) -> str:
    """Return what is wrong with an engine that stalled, for people."""
    return f"its engine hangs: requests, but no token for {limit_s:g} s (real)"
