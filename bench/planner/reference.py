"""What planners are held against: the best fixed fleets, and oracles that know every arrival; both searched.

*Equal GPU-hours*: the fixed fleet that serves most in time among those that cost no more than the planner. *Hindsight*: the
cheapest that serves `GOOD` in time, else the one that serves most. Of a case of hours, what comes after its first two counts.

A search runs on the first seed. Its outcome depends on no planner, so it is kept in reference.json; it is made for cases
that are not in there, and again with `run.py --search`, which a change of the simulator asks for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from cells import Cell, later, run_cell, scenario_of
from workloads import Case

from penstock.simulator.oracle import ScheduleTarget, Utilisation, needs
from penstock.simulator.oracle_search import search
from penstock.simulator.workload import prepare
from penstock_planner.decide.config import Mode

FILE = Path(__file__).with_name("reference.json")
ORACLES = (Mode.ORACLE.value, Mode.ORACLE_ONE_STEP.value)
EQUAL, HINDSIGHT = "static, equal GPU-hours", "static, hindsight"
GOOD = 0.99
"""Chosen: as the oracle's target."""
ENOUGH = 0.995
"""A fixed fleet this good ends the search for larger ones."""
GAIN = 0.002
"""A size that brings less than this ends it too: what is still late would be late on any fleet."""


def search_case(case: Case) -> dict[str, Any]:
    """Return the fixed fleets tried, and what each oracle aims at, with their figures."""
    shown = replace(case, spec=case.search or case.spec)
    return {"case": case.name, "static": _fleets(case), **{name: _aim(shown, name) for name in ORACLES}}


def load() -> dict[str, dict[str, Any]]:
    """Return what was searched, by case; empty where nothing was."""
    if not FILE.exists():
        return {}
    return {found["case"]: found for found in orjson.loads(FILE.read_bytes())}


def is_complete(found: dict[str, Any] | None) -> bool:
    """Tell whether fleets and both oracles were searched."""
    return found is not None and {"static", *ORACLES} <= found.keys()


def save(fresh: list[dict[str, Any]]) -> None:
    """Write what was searched alongside what is there."""
    found = load() | {each["case"]: each for each in fresh}
    rows = [found[name] for name in sorted(found)]
    FILE.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def oracle_cells(case: Case, seed: int, found: dict[str, Any]) -> list[Cell]:
    """Return the oracles' runs of a seed, their schedules made from that seed's own arrivals."""
    return [Cell(case, name, seed, aim=_aim_of(found[name])) for name in ORACLES]


def _aim_of(found: dict[str, Any]) -> ScheduleTarget:
    fleet = found["fleet"]
    held = None if fleet is None else tuple(fleet)
    return ScheduleTarget(found["deadline"], found["kv"], held, cached=found.get("cached", 0.0))


def static_cells(case: Case, seed: int, found: dict[str, Any], mean_gpus: float) -> list[Cell]:
    """Return the fixed fleets to hold a policy against.

    Args:
        case: Which.
        seed: Which.
        found: Of the search.
        mean_gpus: The policy's.
    """
    fleets = found["static"]
    affordable = [each for each in fleets if each["mean_gpus"] <= mean_gpus * 1.005]
    chosen = {HINDSIGHT: _cheapest(fleets)}
    if affordable:
        chosen[EQUAL] = max(affordable, key=lambda each: each["in_time"])
    return [Cell(case, name, seed, tuple(each["fleet"])) for name, each in chosen.items()]


def _cheapest(fleets: list[dict[str, Any]]) -> dict[str, Any]:
    good = [each for each in fleets if each["in_time"] >= GOOD]
    if good:
        return min(good, key=lambda each: each["mean_gpus"])
    return max(fleets, key=lambda each: each["in_time"])


def _fleets(case: Case) -> list[dict[str, Any]]:
    requests = prepare(case.spec, seed=0, qps=case.qps).requests
    wanted = needs(requests, scenario_of(Cell(case, "static", 0, case.fleet)), Utilisation(0.8, 0.9))
    means = [float(need[: int(requests[-1].arrival_s)].mean()) for need in wanted.values()]
    most = case.budget // case.gpus
    first = max(len(means), min(most, round(sum(means))))
    tried: list[dict[str, Any]] = []
    before = -1.0
    for size in range(first, most + 1):
        of_size = [_figures(case, fleet) for fleet in _splits(size, means)]
        tried += of_size
        best = max(each["in_time"] for each in of_size)
        if best >= ENOUGH or (best > ENOUGH - 0.1 and best - before < GAIN):
            break
        before = best
    return tried


def _figures(case: Case, fleet: tuple[int, ...]) -> dict[str, Any]:
    row = run_cell(Cell(case, "static", 0, fleet))
    figures = later([row["bins"]]) or row
    return {"fleet": list(fleet), "in_time": figures["in_time"]["both"], "mean_gpus": figures["mean_gpus"]}


def _splits(size: int, means: list[float]) -> list[tuple[int, ...]]:
    if len(means) == 1:
        return [(size,)]
    share = size * means[0] / sum(means)
    prefills = {min(size - 1, max(1, round_(share))) for round_ in (math.floor, math.ceil)}
    return [(prefill, size - prefill) for prefill in sorted(prefills)]


def _aim(case: Case, name: str) -> dict[str, Any]:
    requests = prepare(case.spec, seed=0, qps=case.qps).requests
    found = search(scenario_of(Cell(case, name, 0)), requests)
    return {
        "deadline": found.target.deadline,
        "kv": found.target.kv,
        "fleet": found.target.fleet,
        "cached": found.target.cached,
        "in_time": found.in_time,
        "gpu_hours": round(found.gpu_s / 3600, 6),
    }
