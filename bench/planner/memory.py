"""What a planner gains by starting from another one's memory: a case twice, with other arrivals, in virtual time.

    python bench/planner/memory.py [CASE]

The first run learns; the second serves other arrivals of the same case, with that memory and without. Same figures each time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import orjson
from cells import Cell, scenario_of
from workloads import Case, cases

from penstock.simulator.scoreboard import measures
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import prepare
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.config import Mode
from penstock_planner.decide.state import Learned

FIRST_S = 3600.0
"""Chosen: an hour; from then on a planner knows such a case by itself."""


def main() -> None:
    """Print the figures of one case."""
    known_cases = {each.name: each for each in cases(None)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "case", nargs="?", default="recurring", choices=known_cases, metavar="CASE", help="default: recurring"
    )
    name = parser.parse_args().case
    case = known_cases[name]
    memory = _run(case, seed=0, memory={}, until_s=float("inf"))[1]
    print(f"{name}: {len(orjson.dumps(to_plain(memory)))} bytes of memory")
    for until_s, words in ((FIRST_S, "first hour"), (float("inf"), "whole")):
        for known, how in (({}, "without"), (memory, "with")):
            figures, _ = _run(case, seed=1, memory=known, until_s=until_s)
            print(f"  {words:10} {how:7} {figures}")


def _run(case: Case, *, seed: int, memory: Learned, until_s: float) -> tuple[str, Learned]:
    """Return the figures of the arrivals before a time, and what the planner knows at the end."""
    requests = prepare(case.spec, seed=seed, qps=case.qps).requests
    scenario = replace(scenario_of(Cell(case, Mode.ADAPTIVE.value, seed)), memory=memory)
    simulation = Simulation(scenario, [each for each in requests if each.arrival_s < until_s])
    recording = simulation.run()
    assert simulation.control is not None, "a cell without a fleet of its own has a planner"
    found = measures(recording, scenario)
    words = f"in time {found['in_time']['both']:7.2%}  GPU-h {found['gpu_hours']:6.2f}"
    return words, simulation.control.planner.learnt(recording.end_s)


if __name__ == "__main__":
    main()
