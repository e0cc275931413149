"""Finds the oracle's schedule for a run by simulating candidate schedules completely and comparing the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from penstock.simulator.oracle import TARGET, ScheduleTarget, Utilisation, needs, schedule, shared_tokens
from penstock.simulator.scenario import Scenario
from penstock.simulator.scoreboard import measures
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest
from penstock_planner.decide.policies.baselines.oracle import OracleParameters

_DEADLINES = (1.3, 1.0, 0.9, 0.75, 0.6)
"""Multiples of the TTFT target that the queueing model may use up; it models neither KV transfer nor decode steps."""
_KV = (0.95, 0.8, 0.6, 0.4)
"""Fractions of the KV cache that decoding may use."""


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A candidate schedule and the result of its simulation.

    Attributes:
        target: Requirements from which the schedule was computed.
        in_time: Fraction, 0-1, of requests that met all latency targets.
        gpu_s: GPU-seconds that the fleet held.
        cached: Fraction, 0-1, of the repeated prompt tokens that was found in a cache.
    """

    target: ScheduleTarget
    in_time: float
    gpu_s: float
    cached: float = 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key of candidate schedules; the lowest is the best.

        Schedules with 99% (`TARGET`) of the requests on time (within all latency targets) come first, in order of their GPU-seconds. The
        other schedules follow in order of the fraction of requests that are late (to three decimals), then of their GPU-seconds.
        """
        return (0.0 if self.in_time >= TARGET else 1.0 - round(self.in_time, 3)), self.gpu_s


def with_schedule(scenario: Scenario, requests: Sequence[TraceRequest], target: ScheduleTarget) -> Scenario:
    """Return the scenario with a newly computed schedule, the replicas over time that its oracle (planner that knows all arrivals) follows.

    Args:
        scenario: Scenario with an oracle as its planner.
        requests: Requests in order of arrival.
        target: Requirements from which the schedule is computed.
    """
    planner = scenario.planner
    assert planner is not None  # noqa: S101 - an oracle is a planner
    known = OracleParameters(schedule(requests, scenario, target))
    return replace(scenario, planner=replace(planner, parameters=known))


def search(scenario: Scenario, requests: Sequence[TraceRequest]) -> ScheduleCandidate:
    """Return the cheapest schedule (replicas over time) with 99% (`TARGET`) of the requests on time, else that with the most on time.

    A request is on time if it meets all latency targets. Candidates that follow the load are sorted by cost. A binary search for the
    cheapest one that reaches 99% simulates about five candidates; the search is approximate, since more GPUs do not always serve more
    requests on time. These candidates assume no cached tokens. If the best of them found prefixes in caches, the search is repeated with
    that fraction of cached tokens. Finally, constant fleets are simulated if they are cheaper.

    Args:
        scenario: Scenario with an oracle (a planner that follows a schedule computed from all arrivals) as its planner.
        requests: Requests in order of arrival.
    """
    shared = sum(shared_tokens(requests))

    def tried(candidate: Scenario, target: ScheduleTarget) -> ScheduleCandidate:
        recording = Simulation(candidate, requests).run()
        share = measures(recording, candidate)["in_time"]["both"] or 0.0
        found = int(np.nansum(recording.requests.cached_tokens))
        cached = min(1.0, found / shared) if shared else 0.0
        return ScheduleCandidate(target, share, recording.gpu_s, cached)

    def halved(cached: float) -> ScheduleCandidate:
        targets = [ScheduleTarget(deadline, kv, cached=cached) for deadline in _DEADLINES for kv in _KV]
        ordered = _by_cost(scenario, requests, targets)
        found: list[ScheduleCandidate] = []
        low, high = 0, len(ordered) - 1
        while low <= high:
            middle = (low + high) // 2
            found.append(tried(*ordered[middle]))
            if found[-1].in_time >= TARGET:
                high = middle - 1
            else:
                low = middle + 1
        return min(found, key=lambda each: each.rank)

    best = halved(0.0)
    if best.cached:
        best = min(best, halved(best.cached), key=lambda each: each.rank)
    for candidate, target in _by_cost(scenario, requests, _held(scenario, requests)):
        if scheduled_gpu_s(candidate, requests[-1].arrival_s) < best.gpu_s:
            best = min(best, tried(candidate, target), key=lambda each: each.rank)
    return best


def _held(scenario: Scenario, requests: Sequence[TraceRequest]) -> list[ScheduleTarget]:
    """Return constant fleets that are just large enough for the mean load, with up to two more prefill (or aggregated) workers."""
    busy = int(requests[-1].arrival_s) + 1
    mean = [
        math.ceil(float(need[:busy].mean()))
        for need in needs(requests, scenario, Utilisation(1.0, _KV[1])).values()
    ]
    fleets = [(max(1, mean[0]) + more, *(max(1, count) for count in mean[1:])) for more in range(3)]
    limit = scenario.max_gpus
    return [
        ScheduleTarget(1.0, _KV[1], fleet)
        for fleet in fleets
        if limit is None or sum(n * pool.gpus for n, pool in zip(fleet, scenario.pools, strict=True)) <= limit
    ]


def _by_cost(
    scenario: Scenario, requests: Sequence[TraceRequest], targets: Sequence[ScheduleTarget]
) -> list[tuple[Scenario, ScheduleTarget]]:
    worlds = [(with_schedule(scenario, requests, target), target) for target in targets]
    return sorted(worlds, key=lambda each: scheduled_gpu_s(each[0], requests[-1].arrival_s))


def scheduled_gpu_s(scenario: Scenario, until_s: float) -> float:
    """Return the GPU-seconds that a schedule costs until ``until_s``: replicas times GPUs of a replica, summed over these seconds.

    The schedule is that of the scenario's oracle, a planner that follows replica numbers computed from all arrivals. Times are
    simulated seconds, from 0 on.
    """
    assert scenario.planner is not None  # noqa: S101 - an oracle is a planner
    total = 0.0
    for role, sizes in scenario.planner.parameters_as(OracleParameters).schedule.items():
        ended = [*(size for size in sizes if size[0] < until_s), (until_s, 0)]
        held = sum(count * (after_s - at_s) for (at_s, count), (after_s, _) in pairwise(ended))
        total += held * scenario.pool(role).gpus
    return total


def with_best_schedule(scenario: Scenario, requests: Sequence[TraceRequest]) -> Scenario:
    """Return the scenario with the best schedule (replicas over time) for ``requests`` set for its oracle.

    An oracle is a planner that knows all arrivals; with another planner, the scenario is returned unchanged. This runs several
    complete simulations.
    """
    if scenario.planner is None or not scenario.planner.policy.is_oracle:
        return scenario
    return with_schedule(scenario, requests, search(scenario, requests).target)
