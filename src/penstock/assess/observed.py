"""What a Prometheus says of a fleet, step by step: load, lengths, latencies, replicas. NaN is missing, never zero. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.assess.autoscaler import Autoscaler

Floats = NDArray[np.float64]

COLD_START_S: Final = 120.0
"""Default of the time from requesting a replica until it serves, in seconds, because a history does not show it."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram over time.

    Attributes:
        bounds: Upper bounds, inclusive, rising; the last is infinite.
        counts: Samples that fell into each bucket, shape (steps, bounds), not cumulative; NaN where unknown.
        sums: Sum of all samples of a step, shape (steps,); NaN where unknown.
    """

    bounds: tuple[float, ...]
    counts: Floats
    sums: Floats

    def cut(self, first: int, end: int) -> Buckets:
        """Return the steps from ``first`` to before ``end``."""
        return Buckets(self.bounds, self.counts[first:end], self.sums[first:end])

    @property
    def samples(self) -> Floats:
        """Samples of each step; NaN where unknown."""
        return np.asarray(self.counts.sum(axis=1))

    def total(self) -> Floats:
        """Return the samples of all known steps by bucket."""
        return np.asarray(np.nansum(self.counts, axis=0))

    def mean(self) -> float | None:
        """Return the mean over all steps whose counts and sums are known; None without a sample."""
        samples = self.samples
        is_known = ~np.isnan(samples) & ~np.isnan(self.sums)
        count = float(samples[is_known].sum())
        return float(self.sums[is_known].sum()) / count if count > 0 else None

    def cumulative(self) -> list[tuple[float, float]]:
        """Return (bound, samples at or below it) over all known steps, as `penstock.core.histogram` reads it."""
        return list(zip(self.bounds, np.cumsum(self.total()).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Observed:
    """A fleet over time, in steps of equal length.

    Attributes:
        start_s: Real seconds since 1970 at which the first step begins.
        arrivals: Requests of each step.
        prompts: Prompt tokens of finished requests.
        answers: Generated tokens of finished requests.
        ttft: Seconds; None: the runtime does not export it.
        gaps: Seconds between tokens; None likewise.
        replicas: By ``replica_step_s``, at its end; a step holds a whole number of these.
        waiting: Requests that waited at the end of each step; None: unknown.
        running: Requests in engines at the end of each step; None: unknown.
        hit_rate: Fraction of the prompt tokens found in the prefix cache; None: unknown.
        fine: Requests by ``fine_step_s`` in the busiest hour, for the burstiness; empty: unknown.
        kv_tokens: KV capacity of one replica; None: unknown.
        autoscaler: HPA that scaled it; None: unknown, or nothing did.
        notes: What is missing, and what follows from it.
    """

    model: str
    runtime: str
    start_s: float
    step_s: float
    arrivals: Floats
    prompts: Buckets
    answers: Buckets
    ttft: Buckets | None
    gaps: Buckets | None
    replicas: Floats
    replica_step_s: float
    waiting: Floats | None = None
    running: Floats | None = None
    hit_rate: Floats | None = None
    fine: Floats | None = None
    fine_step_s: float = 0.0
    kv_tokens: int | None = None
    autoscaler: Autoscaler | None = None
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.arrivals)

    @property
    def duration_s(self) -> float:
        """Length of all steps."""
        return self.steps * self.step_s

    @property
    def requests(self) -> float:
        """All known arrivals."""
        return float(np.nansum(self.arrivals))

    @property
    def replica_hours(self) -> float:
        """Hours of all replicas; of a step without a number, the number before counts."""
        return float(filled(self.replicas).sum()) * self.replica_step_s / 3600

    def mean_replicas(self) -> Floats:
        """Return the mean number of replicas of each step, at least one."""
        by_step = filled(self.replicas).reshape(self.steps, -1).mean(axis=1)
        return np.asarray(np.maximum(1.0, by_step))

    def cut(self, first: int, end: int) -> Observed:
        """Return the steps from ``first`` to before ``end``."""

        def part(values: Floats | None) -> Floats | None:
            return None if values is None else values[first:end]

        return replace(
            self,
            start_s=self.start_s + first * self.step_s,
            arrivals=self.arrivals[first:end],
            prompts=self.prompts.cut(first, end),
            answers=self.answers.cut(first, end),
            ttft=None if self.ttft is None else self.ttft.cut(first, end),
            gaps=None if self.gaps is None else self.gaps.cut(first, end),
            replicas=self.replicas.reshape(self.steps, -1)[first:end].reshape(-1),
            waiting=part(self.waiting),
            running=part(self.running),
            hit_rate=part(self.hit_rate),
        )


def filled(values: Floats) -> Floats:
    """Return the values with each unknown one replaced by the one before it, or by the first known one at the beginning."""
    is_known = ~np.isnan(values)
    if not is_known.any():
        return np.zeros_like(values)
    places = np.maximum.accumulate(np.where(is_known, np.arange(len(values)), -1))
    return np.asarray(values[np.where(places < 0, int(np.argmax(is_known)), places)])


def buckets_of(cumulative: dict[str, Floats], sums: Floats) -> Buckets | None:
    """Return a histogram from its series by ``le``; None without a bucket.

    Bounds that only some steps have (a release with other buckets) are taken as empty where they are missing, so that their
    samples count in the next one. A count below zero, of an extrapolated rate, is zero.
    """
    if not cumulative:
        return None
    by_bound = {math.inf if le in {"+Inf", "Inf"} else float(le): each for le, each in cumulative.items()}
    bounds = tuple(sorted(by_bound))
    if not math.isinf(bounds[-1]):
        bounds = (*bounds, math.inf)
        by_bound[math.inf] = by_bound[bounds[-2]]
    table = np.stack([by_bound[bound] for bound in bounds], axis=1)
    is_missing = np.isnan(table).all(axis=1)
    table = np.maximum.accumulate(np.nan_to_num(table, nan=0.0), axis=1)
    counts = np.diff(table, axis=1, prepend=0.0)
    counts[is_missing] = np.nan
    return Buckets(bounds, counts, sums)


def arrivals_of(first_tokens: Floats, waiting: Floats | None) -> Floats:
    """Return the arrivals of each step: first tokens, and by how many the waiting requests have grown."""
    if waiting is None:
        return first_tokens
    grown = np.diff(waiting, prepend=waiting[:1])
    return np.asarray(np.maximum(0.0, first_tokens + np.nan_to_num(grown, nan=0.0)))


def gaps_in(values: Floats) -> list[tuple[int, int]]:
    """Return the runs of unknown steps as (first, end), end not included."""
    is_missing = np.isnan(values).astype(np.int8)
    edges = np.flatnonzero(np.diff(is_missing, prepend=0, append=0))
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]


LONG_GAP_S = 600.0
"""Unknown time that no simulated window crosses. Chosen: a scrape target that was moved is back within minutes."""


def window_around(observed: Observed, middle: int, most_requests: int) -> tuple[int, int]:
    """Return (first, end) of the steps around one that hold at most that many requests and no long gap."""
    arrivals = np.nan_to_num(observed.arrivals, nan=0.0)
    low, high = 0, observed.steps
    for first, end in gaps_in(observed.arrivals):
        if (end - first) * observed.step_s > LONG_GAP_S:
            low = end if end <= middle else low
            high = min(high, first) if first > middle else high
    first, end, held = middle, middle + 1, float(arrivals[middle])
    while first > low or end < high:
        is_left = first > low and (end >= high or middle - first < end - middle)
        more = float(arrivals[first - 1] if is_left else arrivals[end])
        if held + more > most_requests:
            break
        held += more
        first, end = (first - 1, end) if is_left else (first, end + 1)
    return first, end


def busiest_window(observed: Observed, most_requests: int) -> tuple[int, int]:
    """Return the window around the step with the most requests; see `window_around`."""
    busiest = int(np.argmax(np.nan_to_num(observed.arrivals, nan=0.0)))
    return window_around(observed, busiest, most_requests)


def telling_windows(observed: Observed, most_requests: int) -> list[tuple[int, int]]:
    """Return windows at a light, a middle and a heavy load of each replica, without repetitions.

    An engine's speed shows in how its latencies grow with its load: one load alone fits engines of several kinds.
    """
    arrivals = np.nan_to_num(observed.arrivals, nan=0.0)
    busy = np.flatnonzero(arrivals > 0)
    ordered = busy[np.argsort((arrivals / observed.mean_replicas())[busy], kind="stable")]
    chosen = [int(ordered[int(rank * (len(ordered) - 1))]) for rank in (0.2, 0.6, 0.95)]
    return list(dict.fromkeys(window_around(observed, middle, most_requests) for middle in chosen))


def dispersion(fine: Sequence[float] | Floats) -> float:
    """Return how much more the counts of short steps vary than those of a Poisson process, >= 1.

    It is the mean of (difference of two neighbours)² / their sum: 1 for Poisson, whatever slow trend the rate has.
    """
    counts = np.asarray(fine, dtype=np.float64)
    before, after = counts[:-1], counts[1:]
    is_known = ~np.isnan(before) & ~np.isnan(after) & (before + after > 0)
    if int(is_known.sum()) < MIN_PAIRS:
        return 1.0
    squares = (after - before)[is_known] ** 2
    return max(1.0, float(squares.sum() / (before + after)[is_known].sum()))


MIN_PAIRS = 10
"""Pairs of short steps below which the burstiness counts as unknown. Chosen."""
