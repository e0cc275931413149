"""What engines count, between two readings of a Prometheus: the demand that a planner takes from routers otherwise. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.assess.engine_metrics import present
from penstock.assess.observed import arrivals_of
from penstock.core.engine_metrics import EngineMetrics
from penstock.core.errors import ObservationError

Process = tuple[str, str]
"""Identity of a process that exports metrics: its target, and the number of its engine."""

Labelled = tuple[Mapping[str, str], float]
"""Labels and value of one sample."""

LENGTH_TAU_S: Final = 300.0
"""Time constant, simulated seconds, of the mean prompt length and of the prefix cache's hit rate.

Chosen: requests finish long after they arrived, and a scrape without a finished request must not leave lengths unknown."""


@dataclass(frozen=True, slots=True)
class CounterNames:
    """Names of the series of one runtime that a Prometheus has, as `Counts` reads them.

    Attributes:
        first_tokens: Count of requests with a first token.
        ttft_s: Sum of their TTFT.
        prompts, prompt_tokens: Count and sum of the prompt tokens of finished requests.
        answer_tokens: Sum of their generated tokens.
        gaps, gap_s: Count and sum of the gaps between tokens; None: not exported.
        running, waiting, kv_usage: Gauges; ``waiting`` None: not exported.
        cache: Counters of tokens looked up in the prefix cache, and found there; None: not exported.
        hit_rate: Gauge of the hit rate in place of these counters; None: not exported.
    """

    first_tokens: str
    ttft_s: str
    prompts: str
    prompt_tokens: str
    answer_tokens: str
    running: str
    kv_usage: str
    gaps: str | None = None
    gap_s: str | None = None
    waiting: str | None = None
    cache: tuple[str, str] | None = None
    hit_rate: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Return every name that is read."""
        optional = (self.gaps, self.gap_s, self.waiting, *(self.cache or ()), self.hit_rate)
        required = (
            *(self.first_tokens, self.ttft_s, self.prompts, self.prompt_tokens, self.answer_tokens),
            *(self.running, self.kv_usage),
        )
        return (*required, *(each for each in optional if each is not None))


def counter_names(engine: EngineMetrics, known: Collection[str]) -> CounterNames:
    """Return the names to read of a runtime, of those that the server has.

    Raises:
        ObservationError: the server lacks a series without which a planner cannot decide.
    """

    def required(candidates: tuple[str, ...], what: str, suffix: str = "") -> str:
        name = present(candidates, known, suffix=suffix)
        if name is None:
            wanted = " or ".join(f"{each}{suffix}" for each in candidates)
            raise ObservationError(
                f"prometheus: {engine.runtime} has no {what} ({wanted or 'it does not export it'}), which a shadow planner needs;"
                " keep it in the scrape's relabelling"
            )
        return name

    ttft = required(engine.ttft, "time to first token", "_count")
    prompts = required(engine.prompt_tokens, "prompt tokens of requests", "_count")
    answers = required(engine.answer_tokens, "generated tokens of requests", "_sum")
    gap = present(engine.gap, known, suffix="_count")
    return CounterNames(
        first_tokens=f"{ttft}_count",
        ttft_s=f"{ttft}_sum",
        prompts=f"{prompts}_count",
        prompt_tokens=f"{prompts}_sum",
        answer_tokens=f"{answers}_sum",
        running=required(engine.running, "running requests"),
        kv_usage=required(engine.kv_usage, "KV usage"),
        gaps=None if gap is None else f"{gap}_count",
        gap_s=None if gap is None else f"{gap}_sum",
        waiting=present(engine.waiting, known),
        cache=next((pair for pair in engine.cache_tokens if set(pair) <= set(known)), None),
        hit_rate=present(engine.hit_rate, known),
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """One reading of a role's engines.

    Attributes:
        at_s: Time of each process' newest sample, real seconds since 1970 by the server's clock.
        values: Value of each process by name of the series.
    """

    at_s: Mapping[Process, float]
    values: Mapping[str, Mapping[Process, float]]

    def since(self, before: Counts) -> float:
        """Return the real seconds from the samples of ``before`` to these, the mean over the processes in both.

        Processes are scraped at times of their own, so that the newest sample of all would move by more or less than counters do.
        """
        spans = [at_s - before.at_s[process] for process, at_s in self.at_s.items() if process in before.at_s]
        if spans:
            return sum(spans) / len(spans)
        return max(self.at_s.values(), default=0.0) - max(before.at_s.values(), default=0.0)

    def processes(self, name: str) -> int:
        """Return the number of processes that export a series."""
        return len(self.values.get(name, {}))

    def total(self, name: str | None) -> float:
        """Return the sum of a gauge over the processes; 0 of one that is not exported."""
        return 0.0 if name is None else sum(self.values.get(name, {}).values())

    def gained(self, before: Counts, name: str | None) -> float:
        """Return the increase of a counter since ``before``, summed over the processes; 0 of one that is not exported.

        A process that restarted, or that is new, has counted from zero. What a process that is gone has counted since
        ``before`` is lost.
        """
        if name is None:
            return 0.0
        earlier = before.values.get(name, {})
        total = 0.0
        for process, value in self.values.get(name, {}).items():
            last = earlier.get(process, 0.0)
            total += value - last if value >= last else value
        return total


def counts_of(samples: Iterable[Labelled], times: Iterable[Labelled]) -> Counts:
    """Return a reading; of two scrape jobs that read one page, the larger value and the newer sample count.

    Args:
        samples: Samples of all series, with their names.
        times: Time of each process' newest sample, real seconds since 1970.
    """
    at_s: dict[Process, float] = {}
    for labels, value in times:
        at_s[_process(labels)] = max(value, at_s.get(_process(labels), value))
    values: dict[str, dict[Process, float]] = {}
    for labels, value in samples:
        if not math.isfinite(value):
            continue
        process = _process(labels)
        own = values.setdefault(labels.get("__name__", ""), {})
        own[process] = max(value, own.get(process, value))
    return Counts(at_s, values)


def _process(labels: Mapping[str, str]) -> Process:
    return labels.get("instance") or labels.get("pod", ""), labels.get("engine", "")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt lengths of finished requests and the hit rate of the prefix cache, as decayed sums.

    Attributes:
        prompts, tokens: Finished requests and their prompt tokens.
        looked_up, found: Tokens looked up in the prefix cache, and found there.
    """

    prompts: float = 0.0
    tokens: float = 0.0
    looked_up: float = 0.0
    found: float = 0.0

    @property
    def prompt(self) -> float | None:
        """Return the mean prompt length, tokens; None before the first finished request."""
        return self.tokens / self.prompts if self.prompts > 0 else None

    @property
    def uncached(self) -> float | None:
        """Return the mean prompt tokens that no prefix cache held; None before the first finished request."""
        if self.prompt is None:
            return None
        hit_rate = min(1.0, self.found / self.looked_up) if self.looked_up > 0 else 0.0
        return self.prompt * (1.0 - hit_rate)

    def followed(self, before: Counts, after: Counts, names: CounterNames, dt_s: float) -> Lengths:
        """Return the sums after one more reading, ``dt_s`` simulated seconds later."""
        kept = math.exp(-dt_s / LENGTH_TAU_S)
        looked_up = found = 0.0
        if names.cache is not None:
            looked_up, found = (after.gained(before, name) for name in names.cache)
        elif names.hit_rate is not None and after.processes(names.hit_rate):
            looked_up = after.gained(before, names.prompt_tokens)
            found = looked_up * after.total(names.hit_rate) / after.processes(names.hit_rate)
        return Lengths(
            self.prompts * kept + after.gained(before, names.prompts),
            self.tokens * kept + after.gained(before, names.prompt_tokens),
            self.looked_up * kept + looked_up,
            self.found * kept + found,
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """What the engines of one role did between two readings.

    Attributes:
        period_s: Simulated seconds between the newest samples of both readings.
        arrivals: First tokens, and by how many the waiting requests have grown.
        first_tokens, ttft_s: Requests with a first token, and the sum of their TTFT.
        completed, output_tokens: Finished requests and their generated tokens.
        gaps, gap_s: Gaps between tokens, and their sum in seconds.
        waiting, running: Requests that wait and that run at the second reading.
        prefilling: Requests whose prompt was being computed, on average: all that had no first token yet, less those that
            waited (by Little's law).
        kv: Sum of the processes' KV usage, 1.0 for a full one.
        processes: Processes at the second reading.
    """

    period_s: float
    arrivals: float
    first_tokens: float
    ttft_s: float
    completed: float
    output_tokens: float
    gaps: float
    gap_s: float
    waiting: float
    running: float
    prefilling: float
    kv: float
    processes: int


def interval_of(before: Counts, after: Counts, names: CounterNames, speed: float) -> Interval:
    """Return what happened between two readings, the second of which has newer samples."""
    period_s = after.since(before) * speed
    waiting_before, waiting = before.total(names.waiting), after.total(names.waiting)
    first_tokens, ttft_s = (after.gained(before, name) for name in (names.first_tokens, names.ttft_s))
    waited = (waiting_before + waiting) / 2
    return Interval(
        period_s=period_s,
        arrivals=float(arrivals_of(np.array([0.0, first_tokens]), np.array([waiting_before, waiting]))[1]),
        first_tokens=first_tokens,
        ttft_s=ttft_s,
        completed=after.gained(before, names.prompts),
        output_tokens=after.gained(before, names.answer_tokens),
        gaps=after.gained(before, names.gaps),
        gap_s=after.gained(before, names.gap_s),
        waiting=waiting,
        running=after.total(names.running),
        prefilling=max(0.0, ttft_s / period_s - waited),
        kv=after.total(names.kv_usage),
        processes=after.processes(names.running),
    )
