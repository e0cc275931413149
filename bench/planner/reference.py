"""What planners are held against: the best fixed fleets, and a schedule that knows every arrival; both searched.

A search runs on the first seed. Its outcome depends on no planner, so it is kept in reference.json and made again
only by `run.py --search`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from cells import Cell, run_cell, scenario_of
from workloads import Case

from penstock_simulator.oracle import Utilisation, needs, schedule
from penstock_simulator.scenario import Resize
from penstock_simulator.workload import prepare

FILE = Path(__file__).with_name("reference.json")
TARGET = 0.99
"""The share in time that the oracle has to reach, where any schedule does."""
ENOUGH = 0.995
"""A fixed fleet this good ends the search for larger ones."""
GAIN = 0.002
"""A size that brings less than this ends it too: what is still late would be late on any fleet."""


def search(case: Case) -> dict[str, Any]:
    """Return the fixed fleets tried, with their figures, and the oracle's utilisations.

    Fleets that were tried before are not tried again: delete the file to begin from nothing.
    """
    before = load().get(case.name)
    case = replace(case, spec=case.search or case.spec)
    fleets = before["static"] if before is not None else _fleets(case)
    return {"case": case.name, "static": fleets, "oracle": _oracle(case, fleets)}


def load() -> dict[str, dict[str, Any]]:
    """Return what was searched, by case; empty where nothing was."""
    if not FILE.exists():
        return {}
    return {found["case"]: found for found in orjson.loads(FILE.read_bytes())}


def save(found: dict[str, dict[str, Any]]) -> None:
    """Write what was searched."""
    rows = [found[name] for name in sorted(found)]
    FILE.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def oracle_cell(case: Case, seed: int, found: dict[str, Any]) -> Cell:
    """Return the oracle's run of a seed, made from that seed's own arrivals."""
    oracle = found["oracle"]
    if oracle["fleet"] is not None:
        return _constant(case, seed, tuple(oracle["fleet"]))
    return _scheduled(case, seed, Utilisation(**oracle["at"]))


def static_cells(case: Case, seed: int, found: dict[str, Any], rival: dict[str, float]) -> list[Cell]:
    """Return the fixed fleets to hold a policy against: as good as it, and as dear as it.

    Args:
        case: Which.
        seed: Which.
        found: Of the search.
        rival: The policy's mean ``in_time`` and ``mean_gpus``.
    """
    fleets = found["static"]
    as_good = [each for each in fleets if each["in_time"] >= rival["in_time"]]
    as_dear = [each for each in fleets if each["mean_gpus"] <= rival["mean_gpus"] * 1.005]
    cells = []
    if as_good:
        best = min(as_good, key=lambda each: each["mean_gpus"])
        cells.append(Cell(case, "static, as good", seed, tuple(best["fleet"])))
    if as_dear:
        best = max(as_dear, key=lambda each: each["in_time"])
        cells.append(Cell(case, "static, as dear", seed, tuple(best["fleet"])))
    return cells


def _fleets(case: Case) -> list[dict[str, Any]]:
    workload = prepare(case.spec, seed=0, qps=case.qps)
    scenario = scenario_of(Cell(case, "static", 0))
    wanted = needs(workload.requests, scenario, Utilisation(0.8, 0.9))
    means = [float(need[: int(workload.requests[-1].arrival_s)].mean()) for need in wanted.values()]
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
    figures = run_cell(Cell(case, "static", 0, fleet))
    return {"fleet": list(fleet), "in_time": figures["in_time"]["both"], "mean_gpus": figures["mean_gpus"]}


def _splits(size: int, means: list[float]) -> list[tuple[int, ...]]:
    if len(means) == 1:
        return [(size,)]
    share = size * means[0] / sum(means)
    prefills = {min(size - 1, max(1, round_(share))) for round_ in (math.floor, math.ceil)}
    return [(prefill, size - prefill) for prefill in sorted(prefills)]


def _oracle(case: Case, fleets: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the cheapest schedule that reaches the target, else the best one.

    Utilisations are tried one coordinate after the other; the best fixed fleet, taken up at time 0, is a schedule too.
    """
    at = Utilisation(1.0, 0.95)
    tried: dict[Utilisation, dict[str, Any]] = {}

    def figures(at: Utilisation) -> dict[str, Any]:
        if at not in tried:
            tried[at] = run_cell(_scheduled(case, 0, at))
        return tried[at]

    for name, values in (("prefill", _PREFILL), ("kv", _KV)):
        options = [replace(at, **{name: value}) for value in values]
        at = min(options, key=lambda each: _rank(figures(each)))
    fleet = tuple(min(fleets, key=_rank_of_fleet)["fleet"])
    constant = run_cell(_constant(case, 0, fleet))
    is_fixed = _rank(constant) < _rank(figures(at))
    best = constant if is_fixed else figures(at)
    return {
        "at": {"prefill": at.prefill, "kv": at.kv},
        "fleet": list(fleet) if is_fixed else None,
        "in_time": best["in_time"]["both"],
        "mean_gpus": best["mean_gpus"],
    }


def _rank_of_fleet(fleet: dict[str, Any]) -> tuple[float, float]:
    return _rank({"in_time": {"both": fleet["in_time"]}, "mean_gpus": fleet["mean_gpus"]})


_PREFILL = (0.7, 0.85, 1.0, 1.15)
_KV = (0.75, 0.95)


def _rank(figures: dict[str, Any]) -> tuple[float, float]:
    in_time = figures["in_time"]["both"]
    if in_time >= TARGET:
        return (0.0, figures["mean_gpus"])
    return (1.0 - in_time, figures["mean_gpus"])


def _scheduled(case: Case, seed: int, at: Utilisation) -> Cell:
    workload = prepare(case.spec, seed=seed, qps=case.qps)
    scenario = scenario_of(Cell(case, "static", seed))
    return Cell(case, "oracle", seed, resizes=schedule(workload.requests, scenario, at))


def _constant(case: Case, seed: int, fleet: tuple[int, ...]) -> Cell:
    roles = [pool.role for pool in case.pools()]
    return Cell(
        case,
        "oracle",
        seed,
        resizes=tuple(Resize(0.0, role, count) for role, count in zip(roles, fleet, strict=True)),
    )
