"""More instances, fewer instances, more routers: the paper's elasticity and scalability, and what it does not ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from setups import INSTANCES, Case, world

from penstock.api import Role, RouterConfig
from penstock.simulator.scenario import Resize, Scenario, SimulatedRouters
from penstock.simulator.sweep import RunSpec

WAYS = ("one picks", "it dies four times")
DEATHS = 4
PICK_DELAY_S = 0.001
"""Chosen: several times what `bench/hop.py` measures."""


def elasticity(case: Case, seeds: int, routers: Mapping[str, RouterConfig]) -> list[RunSpec]:
    """4 to 8 instances at 74 s under QPS 4, and 8 to 4, one each 60 s from 1,809 s, under QPS 2."""
    up = (Resize(74.0, Role.AGGREGATED, 8),)
    down = tuple(Resize(1809.0 + 60.0 * step, Role.AGGREGATED, 7 - step) for step in range(4))
    runs = []
    for policy, spec in routers.items():
        for label, start, resizes, rate in (("4 to 8", 4, up, 4.0), ("8 to 4", 8, down, 2.0)):
            scenario = replace(world(case.model, spec, instances=start), resizes=resizes)
            workload = replace(case.workload, warmup=0)
            runs += [RunSpec(f"{policy}, {label}", scenario, workload, rate, seed) for seed in range(seeds)]
    return runs


def scaling(
    case: Case, seeds: int, sizes: Sequence[int], routers: Mapping[str, RouterConfig]
) -> list[RunSpec]:
    """More instances under proportionally more requests: copies of the population side by side."""
    runs = []
    for size in sizes:
        copies = size // INSTANCES
        workload = replace(case.workload, copies=copies)
        for policy, spec in routers.items():
            scenario = world(case.model, spec, instances=size)
            runs += [
                RunSpec(f"{policy} x{size}", scenario, workload, rate * copies, seed)
                for rate in case.rates
                for seed in range(seeds)
            ]
    return runs


def together(scenario: Scenario, count: int, way: str, *, last_s: float = 0.0) -> Scenario:
    """Return a scenario with ``count`` routers side by side, of which one picks.

    Args:
        scenario: With one.
        count: >= 1.
        way: One of `WAYS`.
        last_s: Until when requests come, seconds; the picker's deaths come at even distances before.
    """
    if count == 1:
        return scenario
    deaths = tuple(last_s * number / (DEATHS + 1) for number in range(1, DEATHS + 1))
    return replace(
        scenario, routers=SimulatedRouters(count, 0.0, PICK_DELAY_S, deaths if way == WAYS[1] else ())
    )


def routers(
    case: Case, seeds: int, rate: float, *, counts: Sequence[int], chosen: Mapping[str, RouterConfig]
) -> list[RunSpec]:
    """Routers side by side, in every way in which they can work together; labels are policy|count|way.

    Args:
        case: Workload and model.
        seeds: Runs of each.
        rate: QPS.
        counts: Numbers of routers.
        chosen: Policies by label.
    """
    return [
        RunSpec(
            f"{policy}|{count}|{way}",
            together(world(case.model, spec), count, way, last_s=(case.workload.limit or 0) / rate),
            case.workload,
            rate,
            seed,
        )
        for policy, spec in chosen.items()
        for count in counts
        for way in (WAYS if count > 1 else WAYS[:1])
        for seed in range(seeds)
    ]


def lighter(case: Case) -> Case:
    """Return the case with fewer requests and rates, for clusters of many instances."""
    limit = case.workload.limit
    workload = replace(case.workload, limit=None if limit is None else limit // 2)
    return replace(case, workload=workload, rates=case.rates[1:4])
