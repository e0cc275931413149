"""Finds the oracle's schedule for a run: candidates are simulated in full, and that result counts."""

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
from penstock_planner.decide.baselines.oracle import OracleParameters

_DEADLINES = (1.3, 1.0, 0.9, 0.75, 0.6)
"""Shares of the TTFT target that the queue may use up; it knows neither KV transfer nor decode steps."""
_KV = (0.95, 0.8, 0.6, 0.4)
"""Shares of the KV cache."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """What a search found.

    Attributes:
        target: What its schedule is made for.
        in_time: Share of the requests that its simulation served within all targets, 0-1.
        gpu_s: GPU-seconds that it held.
        cached: Fraction that was found in a cache of the tokens that an earlier prompt had too, 0-1.
    """

    target: ScheduleTarget
    in_time: float
    gpu_s: float
    cached: float = 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """The lower the better: GPUs where the target is reached, else the shortfall in thousandths, then GPUs."""
        return (0.0 if self.in_time >= TARGET else 1.0 - round(self.in_time, 3)), self.gpu_s


def with_schedule(scenario: Scenario, requests: Sequence[TraceRequest], target: ScheduleTarget) -> Scenario:
    """Return the scenario whose oracle knows its schedule."""
    planner = scenario.planner
    assert planner is not None  # noqa: S101 - an oracle is a planner
    known = OracleParameters(schedule(requests, scenario, target))
    return replace(scenario, planner=replace(planner, parameters=known))


def search(scenario: Scenario, requests: Sequence[TraceRequest]) -> Foresight:
    """Return the cheapest schedule that serves the target's share in time, else the one that serves most.

    Of the schedules that follow the load, in order of cost, five or so are simulated, by halving the way to the cheapest that
    reaches the target: more GPUs do not always serve more. They count nothing as cached; where the best of them found
    prefixes in caches, as many again are made with that fraction of cached tokens. Then fleets that are held, as far as they are
    cheaper.
    """
    shared = sum(shared_tokens(requests))

    def tried(candidate: Scenario, target: ScheduleTarget) -> Foresight:
        recording = Simulation(candidate, requests).run()
        share = measures(recording, candidate)["in_time"]["both"] or 0.0
        found = int(np.nansum(recording.requests.cached_tokens))
        cached = min(1.0, found / shared) if shared else 0.0
        return Foresight(target, share, recording.gpu_s, cached)

    def halved(cached: float) -> Foresight:
        targets = [ScheduleTarget(deadline, kv, cached=cached) for deadline in _DEADLINES for kv in _KV]
        ordered = _by_cost(scenario, requests, targets)
        found: list[Foresight] = []
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
    """Return the fleets that are just enough for the mean load, and up to two entry workers more."""
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
    """Return the GPU-seconds that an oracle's schedule asks for until a time."""
    assert scenario.planner is not None  # noqa: S101 - an oracle is a planner
    total = 0.0
    for role, sizes in scenario.planner.parameters_as(OracleParameters).schedule.items():
        ended = [*(size for size in sizes if size[0] < until_s), (until_s, 0)]
        held = sum(count * (after_s - at_s) for (at_s, count), (after_s, _) in pairwise(ended))
        total += held * scenario.pool(role).gpus
    return total


def foreseen(scenario: Scenario, requests: Sequence[TraceRequest]) -> Scenario:
    """Return the scenario with the oracle's schedule, where an oracle plans; any other as it is."""
    if scenario.planner is None or not scenario.planner.policy.is_oracle:
        return scenario
    return with_schedule(scenario, requests, search(scenario, requests).target)
