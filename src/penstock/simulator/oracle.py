"""A replica schedule computed with knowledge of every arrival: the yardstick of planners, not a planner.

The load is a fluid: prefill seconds per second of arrivals, and KV tokens held by those who are being decoded. Its
smoothing and its utilisation say how many replicas of each role are needed at each second. Many such schedules are tried
on a queue (`share_in_time`), and the cheapest is taken that serves 99% in time there; then spans are cut out of it for as
long as that holds. What it reaches is an upper bound of the least cost; it does not know faults in advance.

Of prompts that share prefixes a schedule assumes that a fraction of the tokens that an earlier prompt had too is found in a
cache, the same fraction of each. It knows neither evictions nor which worker holds what; a simulation does, and says what
the schedule really reaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf

import numpy as np
from numpy.typing import NDArray

from penstock.api import Role
from penstock.engine import profiles
from penstock.engine.core.latency import LatencyModel
from penstock.simulator.jobs import PrefixChains
from penstock.simulator.observer import Floats
from penstock.simulator.scenario import ProfiledModel, Scenario
from penstock.workload.traces import BLOCK_TOKENS, TraceRequest
from penstock_planner.decide.baselines.oracle import Sizes, size_at

AFTER_S = 600.0
"""Chosen: needs, and so schedules, end this long after the last arrival."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """How full fluid needs let replicas be.

    Attributes:
        prefill: Share of the time that they compute prompts, > 0; the lower, the shorter the queue.
        kv: Share of the KV cache in use, > 0.
        smoothing_s: Prompts' work is averaged over the TTFT target and this long around it.
        cached: Fraction found in a cache, 0-1, of the tokens that an earlier prompt had too.
    """

    prefill: float
    kv: float
    smoothing_s: float = 0.0
    cached: float = 0.0


def needs(requests: Sequence[TraceRequest], scenario: Scenario, at: Utilisation) -> dict[Role, Floats]:
    """Return the replicas that each role needs, shape (seconds,), not rounded."""
    work = prefill_s(requests, scenario, cached=at.cached)
    arrivals = np.array([request.arrival_s for request in requests])
    length = math.ceil(float(arrivals[-1]) + AFTER_S)
    by_second = np.bincount(arrivals.astype(np.int64), weights=work, minlength=length).astype(np.float64)
    prefill = (
        _smoothed(by_second, scenario.slo.ttft_seconds, at.smoothing_s, int(arrivals[-1]) + 1) / at.prefill
    )
    decode = _decode_need(requests, arrivals + work, scenario, at, length)
    if scenario.is_disaggregated:
        return {Role.PREFILL: prefill, Role.DECODE: decode}
    # One worker does both: what decoding leaves of its time goes to prompts.
    return {Role.AGGREGATED: prefill + decode}


def prefill_s(requests: Sequence[TraceRequest], scenario: Scenario, *, cached: float) -> Floats:
    """Return how long each prompt takes alone on an entry worker.

    It is the engine's own step of one prompt, so that the attention to a cached prefix is paid for.

    Args:
        requests: In order of time.
        scenario: With the entry role's engine.
        cached: Fraction found in a cache, 0-1, of the tokens that an earlier prompt had too.
    """
    latency, _ = _engine(scenario, scenario.entry_role)
    shared = shared_tokens(requests) if cached else [0] * len(requests)
    return np.array(
        [
            latency.step_s([(int(cached * start), request.input_tokens, True)], 0, 0)
            for start, request in zip(shared, requests, strict=True)
        ]
    )


def shared_tokens(requests: Sequence[TraceRequest]) -> list[int]:
    """Return the leading tokens of each prompt that an earlier one had too, in whole blocks; never the entire prompt."""
    chains = PrefixChains(0)
    seen: set[int] = set()
    found = []
    for request in requests:
        chain = chains.chain(request)
        blocks = sum(1 for _ in takewhile(seen.__contains__, chain))
        longest = max(0, request.input_tokens - 1) // BLOCK_TOKENS
        found.append(min(blocks, longest) * BLOCK_TOKENS)
        seen.update(chain)
    return found


def busy_s(requests: Sequence[TraceRequest], scenario: Scenario, work: Floats, kv: float) -> Floats:
    """Return how long each request keeps an entry worker busy: its prompt's ``work``; its share of the decode steps as well."""
    if scenario.is_disaggregated:
        return work
    batch, step_s, outputs, _ = _decoding(requests, scenario, kv)
    return np.asarray(work + outputs * step_s / batch)


def _decoding(
    requests: Sequence[TraceRequest], scenario: Scenario, kv: float
) -> tuple[float, float, Floats, Floats]:
    """Return (batch, step in seconds, output tokens, mean tokens held) of a decode worker at that KV usage."""
    latency, kv_tokens = _engine(scenario, Role.DECODE if scenario.is_disaggregated else Role.AGGREGATED)
    outputs = np.array([request.output_tokens for request in requests], dtype=np.float64)
    held = np.array([request.input_tokens for request in requests]) + outputs / 2
    mean = float(held.mean())
    batch = max(1.0, min(256.0, kv * kv_tokens / mean))
    if scenario.slo.itl_seconds is not None:
        batch = _largest_batch(latency, mean, batch, scenario.slo.itl_seconds)
    return batch, latency.decode.step_s(batch, batch * mean), outputs, held


def _decode_need(
    requests: Sequence[TraceRequest], starts: Floats, scenario: Scenario, at: Utilisation, length: int
) -> Floats:
    _, kv_tokens = _engine(scenario, Role.DECODE if scenario.is_disaggregated else Role.AGGREGATED)
    batch, step_s, outputs, held = _decoding(requests, scenario, at.kv)
    ends = starts + outputs * step_s
    tokens = _held(starts, ends, held, length)
    running = _held(starts, ends, np.ones_like(held), length)
    return np.maximum(tokens / (at.kv * kv_tokens), running / batch)


def _largest_batch(latency: LatencyModel, held: float, most: float, itl_slo_s: float) -> float:
    batch = most
    while batch > 1 and latency.decode.step_s(batch, batch * held) > itl_slo_s:
        batch *= 0.95
    return max(1.0, batch)


def _held(starts: Floats, ends: Floats, weights: Floats, length: int) -> Floats:
    """Return the weight of the jobs under way, by second."""
    begun = np.bincount(np.minimum(starts, length - 1).astype(np.int64), weights=weights, minlength=length)
    ended = np.bincount(np.minimum(ends, length - 1).astype(np.int64), weights=weights, minlength=length)
    return np.asarray(np.cumsum(begun - ended)[:length])


def _smoothed(values: Floats, slo_s: float, more_s: float, busy: int) -> Floats:
    """Return the mean over the seconds in which work may wait and still be in time, and ``more_s`` around them.

    ``values`` are 0 from second ``busy`` on; ``more_s`` infinite: one mean for all.
    """
    if math.isinf(more_s):
        return np.where(np.arange(len(values)) < busy, values[:busy].mean(), 0.0)
    width = max(2, round(slo_s + more_s))
    total = np.concatenate((np.zeros(width), np.cumsum(values)))
    trailing = (total[width:] - total[: len(values)]) / width
    ahead = round(more_s / 2)
    return np.asarray(np.concatenate((trailing[ahead:], np.zeros(ahead))))


def _engine(scenario: Scenario, role: Role) -> tuple[LatencyModel, int]:
    model = scenario.pool(role).model
    assert isinstance(model, ProfiledModel)  # noqa: S101 - `baselines.configured` refuses the simple server
    profile = profiles.load(model.profile)
    return profile.latency(), model.kv_tokens or profile.kv_capacity_tokens


def worker_changes(sizes: Sizes, start: int, cold_start_s: float) -> list[tuple[float, int]]:
    """Return (second, +1 or -1) for every worker that begins or ends to serve, in order of time."""
    changes: list[tuple[float, int]] = []
    starting: list[float] = []
    current = start
    for at_s, wanted in sizes:
        starting += [at_s + cold_start_s] * (wanted - current)
        for _ in range(current - wanted):
            if starting and starting[-1] > at_s:
                starting.pop()
            else:
                changes.append((at_s, -1))
        current = wanted
    return sorted([*changes, *((ready_s, 1) for ready_s in starting)])


def share_in_time(
    arrivals: Sequence[float],
    first_s: Sequence[float],
    busy_s: Sequence[float],
    changes: Sequence[tuple[float, int]],
    *,
    start: int,
    deadline_s: float,
) -> float:
    """Return the share of the requests whose first token comes within ``deadline_s`` of their arrival."""
    free = [0.0] * start
    heapify(free)
    upcoming = iter([*changes, (inf, 0)])
    change_s, change = next(upcoming)
    good = 0
    for arrival_s, until_first_s, work_s in zip(arrivals, first_s, busy_s, strict=True):
        while change_s <= (max(arrival_s, free[0]) if free else inf) and change:
            if change > 0:
                heappush(free, change_s)
            elif free:
                heappop(free)
            change_s, change = next(upcoming)
        if not free:
            break
        begin_s = max(arrival_s, heappop(free))
        heappush(free, begin_s + work_s)
        good += begin_s + until_first_s - arrival_s < deadline_s
    return good / len(arrivals)


Counts = NDArray[np.int64]
"""Replicas by second, or by decision."""

TARGET = 0.99
"""The share in time that a schedule has to reach, where one does."""
DRAIN_S = 10.0
"""Chosen: a leaving replica's GPUs are held for about one answer longer."""
_SMOOTHINGS_S = (0.0, 15.0, 60.0, 240.0, math.inf)
_UTILISATIONS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1)
_CUTS = 150
"""Maximum number of spans that one schedule is tried without."""


@dataclass(frozen=True, slots=True)
class ScheduleTarget:
    """What a schedule is made for.

    Attributes:
        deadline: Share of the TTFT target within which the queue has to answer, > 0.
        kv: Share of the KV cache that decoding may use, > 0.
        fleet: Replicas of each pool, held from the first decision on; None: they follow the load.
        cached: Fraction found in a cache, 0-1, of the tokens that an earlier prompt had too.
        sizes: By role, the sizes of a run that spans are cut out of; None: the load says them.
    """

    deadline: float
    kv: float
    fleet: tuple[int, ...] | None = None
    cached: float = 0.0
    sizes: Mapping[Role, Sizes] | None = None


def schedule(
    requests: Sequence[TraceRequest], scenario: Scenario, target: ScheduleTarget
) -> dict[Role, Sizes]:
    """Return the sizes of every pool over time, inside the budget and the planner's step."""
    search = _Search(requests, scenario, target)
    if target.sizes is not None:
        return search.trimmed(target.sizes)
    return search.best() if target.fleet is None else search.held(target.fleet)


class _Search:
    """One search on the queue."""

    def __init__(self, requests: Sequence[TraceRequest], scenario: Scenario, target: ScheduleTarget) -> None:
        self._requests, self._scenario, self._target = requests, scenario, target
        planner = scenario.planner
        assert planner is not None  # noqa: S101 - an oracle is a planner
        self._interval_s, self._step = planner.interval_s, planner.max_step
        self._arrivals = [request.arrival_s for request in requests]
        work = prefill_s(requests, scenario, cached=target.cached)
        self._first_s = work.tolist()
        self._busy_s = busy_s(requests, scenario, work, target.kv).tolist()
        self._entry = scenario.entry_role

    def best(self) -> dict[Role, Sizes]:
        """Return the cheapest schedule that serves the target's share on the queue, or the most that any serves."""
        tried = [
            self._counts(Utilisation(prefill, self._target.kv, smoothing_s, self._target.cached))
            for smoothing_s in _SMOOTHINGS_S
            for prefill in _UTILISATIONS
        ]
        shares = [self._share(counts) for counts in tried]
        target = min(TARGET, max(shares))
        good = [counts for counts, share in zip(tried, shares, strict=True) if share >= target]
        counts = self._cut(min(good, key=self._cost), target)
        return {role: _sizes(values, self._interval_s) for role, values in counts.items()}

    def held(self, fleet: tuple[int, ...]) -> dict[Role, Sizes]:
        """Return the schedule that brings the pools to a size and keeps it."""
        decisions = int(self._arrivals[-1] // self._interval_s) + 2
        pools = zip(self._scenario.pools, fleet, strict=True)
        counts = self._reachable({pool.role: np.full(decisions, count) for pool, count in pools})
        return {role: _sizes(values, self._interval_s) for role, values in counts.items()}

    def trimmed(self, sizes: Mapping[Role, Sizes]) -> dict[Role, Sizes]:
        """Return the sizes of a run without the spans that the queue does not need to serve as many in time."""
        decisions = int(self._arrivals[-1] // self._interval_s) + 2
        times = np.arange(decisions) * self._interval_s
        counts = self._reachable(
            {role: np.array([size_at(each, at_s) for at_s in times]) for role, each in sizes.items()}
        )
        counts = self._cut(counts, self._share(counts))
        return {role: _sizes(values, self._interval_s) for role, values in counts.items()}

    def _counts(self, at: Utilisation) -> dict[Role, Counts]:
        scenario = self._scenario
        lead_s = scenario.cold_start_s + self._interval_s
        counts = {
            role: _with_start_up(np.maximum(1, np.ceil(need)).astype(np.int64), lead_s)
            for role, need in needs(self._requests, scenario, at).items()
        }
        return self._reachable(
            {
                role: _by_decision(values, self._interval_s)
                for role, values in _within_budget(counts, scenario).items()
            }
        )

    def _reachable(self, counts: Mapping[Role, Counts]) -> dict[Role, Counts]:
        starts = {role: self._scenario.pool(role).replicas for role in counts}
        if self._step is None:
            return {role: np.concatenate(([starts[role]], values[1:])) for role, values in counts.items()}
        return {role: reachable(values, starts[role], self._step) for role, values in counts.items()}

    def _share(self, counts: Mapping[Role, Counts]) -> float:
        scenario, entry = self._scenario, self._scenario.pool(self._entry)
        sizes = _sizes(counts[self._entry], self._interval_s)
        return share_in_time(
            self._arrivals,
            self._first_s,
            self._busy_s,
            worker_changes(sizes, entry.replicas, scenario.cold_start_s),
            start=entry.replicas,
            deadline_s=self._target.deadline * scenario.slo.ttft_seconds,
        )

    def _cost(self, counts: Mapping[Role, Counts]) -> float:
        return sum(float(values.sum()) * self._scenario.pool(role).gpus for role, values in counts.items())

    def _cut(self, counts: dict[Role, Counts], target: float) -> dict[Role, Counts]:
        """Take single replicas out of spans of the entry role, the longest first, while the target is held."""
        best = counts
        for begin, end in _spans(counts[self._entry])[:_CUTS]:
            values = best[self._entry].copy()
            values[begin:end] = np.maximum(1, values[begin:end] - 1)
            fewer = self._reachable({**best, self._entry: values})
            if self._cost(fewer) < self._cost(best) and self._share(fewer) >= target:
                best = fewer
        return best


def reachable(wanted: Counts, start: int, step: int) -> Counts:
    """Return the smallest numbers, none below ``wanted`` where that can be, that change by ``step`` per decision at most.

    Example: wanted 2 2 2 5 1 1, from 2 by one: 2 3 4 5 4 3.
    """
    values = wanted.astype(np.int64)
    values[0] = start
    for place in range(len(values) - 2, 0, -1):
        values[place] = max(values[place], values[place + 1] - step)
    for place in range(1, len(values)):
        before = values[place - 1]
        values[place] = min(max(values[place], before - step), before + step)
    return values


def _spans(values: Counts) -> list[tuple[int, int]]:
    """Return (begin, end) of every span in which a level above the first is held, and its halves; the longest first."""
    spans = set()
    for level in range(2, int(values.max()) + 1):
        for begin, end in _runs(values >= level):
            middle = (begin + end) // 2
            spans |= {(begin, end), (begin, middle), (middle, end)}
            for share in (4, 8):
                part = (end - begin) // share
                spans |= {(begin, begin + part), (end - part, end)}
    return sorted((span for span in spans if span[1] > span[0]), key=lambda span: (span[0] - span[1], span))


def _runs(is_on: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_on, [False])).astype(np.int8)))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _by_decision(counts: Counts, interval_s: float) -> Counts:
    """Return the most that each decision's interval wants; decision 0 is time 0, at which nothing is decided."""
    times = np.arange(len(counts))
    places = (times // interval_s).astype(np.int64)
    wanted = np.zeros(int(places[-1]) + 1, dtype=np.int64)
    np.maximum.at(wanted, places, counts)
    return wanted


def _sizes(counts: Counts, interval_s: float) -> Sizes:
    changed = np.flatnonzero(np.diff(counts, prepend=counts[0] - 1))
    return tuple((float(place * interval_s), int(counts[place])) for place in changed)


def _with_start_up(need: Counts, lead_s: float) -> Counts:
    """Return the replicas to have asked for, by second: each level early by its start-up, gaps kept where cheaper."""
    lead = math.ceil(lead_s)
    total = np.zeros(len(need), dtype=np.int64)
    for level in range(1, int(need.max()) + 1):
        spans: list[list[int]] = []
        for start, end in _runs(need >= level):
            begin = max(0, start - lead)
            if spans and begin - spans[-1][1] <= DRAIN_S:
                spans[-1][1] = end
            else:
                spans.append([begin, end])
        for begin, end in spans:
            total[begin:end] += 1
    return total


def _within_budget(counts: dict[Role, Counts], scenario: Scenario) -> dict[Role, Counts]:
    """Return the counts with one replica at a time taken from the largest pool where the budget is exceeded."""
    if scenario.max_gpus is None:
        return counts
    gpus = {role: scenario.pool(role).gpus for role in counts}
    counts = {role: values.copy() for role, values in counts.items()}
    while True:
        used = sum(values * gpus[role] for role, values in counts.items())
        over = np.flatnonzero(np.asarray(used) > scenario.max_gpus)
        if not over.size:
            return counts
        roles = list(counts)
        largest = np.argmax(np.stack([counts[role][over] for role in roles]), axis=0)
        for place, role in enumerate(roles):
            counts[role][over[largest == place]] -= 1
