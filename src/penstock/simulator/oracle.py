"""Computes a replica schedule with knowledge of every arrival: a reference for planners, not a planner itself.

The load is modelled as a fluid: prefill seconds per second of arrivals, and KV tokens held by the requests that are decoding. The
smoothing of the load and the allowed utilisation determine the number of replicas that each role needs at each second. Many such
schedules are tried on a queueing model (`share_in_time`). The cheapest schedule that serves 99% on time there is chosen, and then
spans are cut out of it as long as it still does. The cost of the result is an upper bound of the minimum cost; the schedule does not
know faults in advance.

For prompts that share prefixes, a schedule assumes that a fixed fraction of the repeated prompt tokens (those with the same prefix
in an earlier prompt) is found in a cache. It models neither evictions nor the cache of each worker. A simulation does, and shows
what the schedule really achieves.
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
from penstock_planner.decide.policies.baselines.oracle import Sizes, size_at

AFTER_S = 600.0
"""Simulated seconds after the last arrival until which the number of needed replicas is computed, and at which schedules end. Chosen."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Utilisation up to which a schedule (the number of replicas of each role over time) may fill replicas.

    Attributes:
        prefill: Fraction of the time for which prefill workers are busy, > 0; a lower value gives a shorter queue.
        kv: Fraction of the KV cache in use, > 0.
        smoothing_s: Simulated seconds over which the prefill work is averaged, in addition to the TTFT target.
        cached: Fraction, 0-1, of the repeated prompt tokens that is found in a cache.
    """

    prefill: float
    kv: float
    smoothing_s: float = 0.0
    cached: float = 0.0


def needs(requests: Sequence[TraceRequest], scenario: Scenario, at: Utilisation) -> dict[Role, Floats]:
    """Return the number of replicas that each role needs, by role: an array with one value per simulated second, not rounded to integers.

    Args:
        requests: Requests in order of arrival.
        scenario: Scenario with the engines and the latency targets.
        at: Utilisation up to which replicas may be filled; a lower one gives more replicas.
    """
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
    # An aggregated worker does both: the time that decoding does not need is used for prompts.
    return {Role.AGGREGATED: prefill + decode}


def prefill_s(requests: Sequence[TraceRequest], scenario: Scenario, *, cached: float) -> Floats:
    """Return the simulated seconds that each prompt takes on a prefill (or aggregated) worker that computes nothing else.

    The result is an array in the order of the requests. Each value is the time of the simulated engine for a step with one prompt; it
    includes the attention to cached tokens.

    Args:
        requests: Requests in order of arrival.
        scenario: Scenario with the engine of the entry role (the workers that compute prompts).
        cached: Fraction, 0-1, of the repeated prompt tokens that is found in a cache.
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
    """Return, for each prompt, the number of leading tokens that an earlier prompt had too, in whole blocks of 512 tokens.

    The number is less than the prompt's length, even if an earlier prompt was the same.
    """
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
    """Return the simulated seconds for which each request keeps a prefill (or aggregated) worker busy, in order of the requests.

    Args:
        requests: Requests in order of arrival.
        scenario: Scenario with the engines.
        work: Seconds that each prompt takes, as returned by `prefill_s`. With prefill workers, the result is equal to ``work``; with
            aggregated workers, the request's part of the decode steps is added to ``work``.
        kv: Fraction of the KV cache in use while decoding.
    """
    if scenario.is_disaggregated:
        return work
    batch, step_s, outputs, _ = _decoding(requests, scenario, kv)
    return np.asarray(work + outputs * step_s / batch)


def _decoding(
    requests: Sequence[TraceRequest], scenario: Scenario, kv: float
) -> tuple[float, float, Floats, Floats]:
    """Return (batch size, step time in seconds, output tokens, mean tokens held) of a decode worker at that KV usage."""
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
    """Return, for each second, the sum of the weights of the requests that are running."""
    begun = np.bincount(np.minimum(starts, length - 1).astype(np.int64), weights=weights, minlength=length)
    ended = np.bincount(np.minimum(ends, length - 1).astype(np.int64), weights=weights, minlength=length)
    return np.asarray(np.cumsum(begun - ended)[:length])


def _smoothed(values: Floats, slo_s: float, more_s: float, busy: int) -> Floats:
    """Return the moving average over ``slo_s + more_s`` seconds: work may wait for ``slo_s`` and still be on time.

    ``values`` are 0 from second ``busy`` on. With infinite ``more_s``, the result is one mean for all seconds before ``busy``.
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
    """Return (simulated time in seconds, +1 or -1) for every worker that starts or stops serving, in order of time.

    Args:
        sizes: (time, number of replicas) of each change that was requested, in order of time.
        start: Number of replicas ready at time 0.
        cold_start_s: Seconds from the request for a replica until it serves.
    """
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
    """Return the fraction of requests whose first token comes within ``deadline_s`` of their arrival, in a queueing model.

    The model has one first-come-first-served queue for all workers; each worker serves one request at a time.

    Args:
        arrivals: Arrival time of each request, in order.
        first_s: Seconds from the start of each request's service until its first token.
        busy_s: Seconds for which each request occupies a worker.
        changes: Result of `worker_changes`: the times at which workers start and stop serving.
        start: Number of workers at time 0.
        deadline_s: Maximum time to first token, in seconds of the same clock as all other times.
    """
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
"""Array of numbers of replicas: one value per simulated second, or per decision of the planner."""

TARGET = 0.99
"""Fraction of requests on time that a schedule must reach, if any schedule reaches it."""
DRAIN_S = 10.0
"""Simulated seconds for which a removed replica still holds its GPUs while it finishes its requests, about the time of one answer. Chosen."""
_SMOOTHINGS_S = (0.0, 15.0, 60.0, 240.0, math.inf)
_UTILISATIONS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1)
_CUTS = 150
"""Maximum number of spans that are tried to be cut out of one schedule."""


@dataclass(frozen=True, slots=True)
class ScheduleTarget:
    """Requirements from which a schedule is computed.

    Attributes:
        deadline: Time within which the first token must come in the queueing model (`share_in_time`), as a multiple of the TTFT target, >
            0.
        kv: Fraction of the KV cache that decoding may use, > 0.
        fleet: Number of replicas of each pool, constant from the planner's first decision on; None lets the number follow the load.
        cached: Fraction, 0-1, of the repeated prompt tokens that is found in a cache.
        sizes: Number of replicas over time of an earlier schedule, by role, to be improved: one replica is removed for each span of time in
            which one less suffices. None computes the numbers from the load.
    """

    deadline: float
    kv: float
    fleet: tuple[int, ...] | None = None
    cached: float = 0.0
    sizes: Mapping[Role, Sizes] | None = None


def schedule(
    requests: Sequence[TraceRequest], scenario: Scenario, target: ScheduleTarget
) -> dict[Role, Sizes]:
    """Return the number of replicas of every role over time that an oracle (a planner that knows all arrivals) should request.

    It is the cheapest schedule found with which 99% (`TARGET`) of the requests are on time in a queueing model, or else as many as
    possible. It keeps within the GPU budget and the planner's maximum change per decision. If ``target`` names a fixed fleet, the
    schedule only scales to that.

    Args:
        requests: Requests in order of arrival.
        scenario: Scenario with an oracle as its planner.
        target: Requirements of the schedule.

    Returns:
        By role: (simulated time in seconds, number of replicas) of each change, in order of time.
    """
    search = _Search(requests, scenario, target)
    if target.sizes is not None:
        return search.trimmed(target.sizes)
    return search.best() if target.fleet is None else search.held(target.fleet)


class _Search:
    """One search for a schedule on the queueing model."""

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
        """Return the cheapest schedule that reaches `TARGET` on the queueing model; if none does, the cheapest of those that serve most."""
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
        """Return the schedule that scales the pools to a size and keeps that size."""
        decisions = int(self._arrivals[-1] // self._interval_s) + 2
        pools = zip(self._scenario.pools, fleet, strict=True)
        counts = self._reachable({pool.role: np.full(decisions, count) for pool, count in pools})
        return {role: _sizes(values, self._interval_s) for role, values in counts.items()}

    def trimmed(self, sizes: Mapping[Role, Sizes]) -> dict[Role, Sizes]:
        """Return the sizes of an earlier run without the spans that are not needed to serve the same fraction on time."""
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
        """Remove single replicas from spans of the entry role, the longest spans first, as long as the target is reached."""
        best = counts
        for begin, end in _spans(counts[self._entry])[:_CUTS]:
            values = best[self._entry].copy()
            values[begin:end] = np.maximum(1, values[begin:end] - 1)
            fewer = self._reachable({**best, self._entry: values})
            if self._cost(fewer) < self._cost(best) and self._share(fewer) >= target:
                best = fewer
        return best


def reachable(wanted: Counts, start: int, step: int) -> Counts:
    """Return the smallest numbers of replicas that are at least ``wanted`` and change by at most ``step`` per decision.

    If an increase from ``start`` is too large for the first decisions, the numbers stay below ``wanted`` until they have reached it.
    Example: wanted 2 2 2 5 1 1, from 2 with step 1: 2 3 4 5 4 3.

    Args:
        wanted: Number of replicas wanted at each decision; the first one is ignored.
        start: Number of replicas at the first decision.
        step: Maximum change per decision.
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
    """Return (begin, end) of every span in which the number exceeds a level, and of parts of each span; the longest first."""
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
    """Return the maximum that is wanted in each decision's interval. Index 0 is time 0, at which no decision is taken."""
    times = np.arange(len(counts))
    places = (times // interval_s).astype(np.int64)
    wanted = np.zeros(int(places[-1]) + 1, dtype=np.int64)
    np.maximum.at(wanted, places, counts)
    return wanted


def _sizes(counts: Counts, interval_s: float) -> Sizes:
    changed = np.flatnonzero(np.diff(counts, prepend=counts[0] - 1))
    return tuple((float(place * interval_s), int(counts[place])) for place in changed)


def _with_start_up(need: Counts, lead_s: float) -> Counts:
    """Return the replicas to request per second: each level is requested its start-up time early, and kept over gaps that are too short."""
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
    """Return the counts with replicas removed from the largest pool, one at a time, wherever the budget is exceeded."""
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
