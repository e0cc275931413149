"""What each chosen value of mode adaptive buys: cases with one of them halved and doubled, alongside the value as it is.

    python bench/planner/values.py [--cases CASE[:HOURS],...] [--values NAME,...] [--output FILE.json] [--jobs N]

A value is replaced in its module's source as one run's process imports it, so that all that is derived from it follows; nothing is written there.
The table is Markdown, VALUES.md alongside this file. With `--output` finished runs are kept, and a killed bench continues from them while the planner's code is the same.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import orjson
from chosen import Value, chosen_values, with_number

sys.path.insert(0, str(Path(__file__).parent / "plugins"))

FACTORS = (0.5, 2.0)
CASES = "flash,mooncake,aggregated-flash,recurring:2,shared:1.5,tenants:1,drifting-prompts:1"
"""Chosen: half a minute of processor time for all; cut to this many hours, which tells nothing of what is learnt in a day or a week."""

POINT_COSTS = 0.2
"""Of the GPU-hours, for each point below `ENOUGH`; the manifest's default."""
ENOUGH = 0.99

_HEADER = """# What each chosen value buys

Written by `python bench/planner/values.py {words}`. Of mode `adaptive`'s {count} chosen numbers each is halved and doubled alone, or cut to its
range: requests in time and GPU-hours of each case, seed 0, the largest change of the share and of the cost (GPU-hours, a fifth more for each
point in time below 99%), and the mean change of the cost. First is what is dearest to change, whichever way. A
case tells only of the values that it needs: one of minutes nothing of hours, days and what comes again, one without aggregated workers nothing of those.
"""

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a case, cut to hours where given, and the number in one value's place; no label: as it is."""

    case: str
    label: str = ""
    number: float | None = None


def cost(figures: Figures) -> float:
    """Return the GPU-hours, a fifth more for each point in time below 99%."""
    missed_points = max(0.0, 100 * (ENOUGH - figures["in_time"]))
    return float(figures["gpu_hours"] * (1 + POINT_COSTS * missed_points))


def runs_of(values: Iterable[Value], cases: Sequence[str]) -> list[Run]:
    """Return every run, case by case, the values as they are first; what a bound leaves as it is is not run."""
    changed = [
        (value.label, number)
        for value in values
        for factor in FACTORS
        if (number := value.times(factor)) != value.number
    ]
    return [run for case in cases for run in (Run(case), *(Run(case, *each) for each in changed))]


def table(values: Sequence[Value], cases: Sequence[str], found: Mapping[Run, Figures]) -> list[str]:
    """Return lines of Markdown: what was run, sorted by what the value buys.

    That is by how much dearer the cases are in the mean where the value is halved or doubled, whichever is less so.
    """
    lines = [
        f"| value | as it is | changed to | {' | '.join(cases)} | largest change | mean cost |",
        f"|---{'|---' * (len(cases) + 4)}|",
        f"| as they are | | | {' | '.join(_shown(found.get(Run(case))) for case in cases)} | | |",
    ]
    blocks = []
    for value in values:
        rows, means = [], []
        for number in dict.fromkeys(value.times(factor) for factor in FACTORS):
            runs = {case: found.get(Run(case, value.label, number)) for case in cases}
            pairs = [(found[Run(case)], run) for case, run in runs.items() if run and Run(case) in found]
            if not pairs:
                continue
            points = max((run["in_time"] - base["in_time"] for base, run in pairs), key=abs) * 100
            costs = [cost(run) / cost(base) - 1 for base, run in pairs]
            means.append(sum(costs) / len(costs))
            shown = " | ".join(_shown(run) for run in runs.values())
            largest = f"{points:+.2f} points, {max(costs, key=abs):+.1%}"
            rows.append(
                f"| {value.label} | {value.number:g} | {number:g} | {shown} | {largest} | {means[-1]:+.1%} |"
            )
        if rows:
            blocks.append((min(means), rows))
    return lines + [row for _, rows in sorted(blocks, key=lambda each: -each[0]) for row in rows]


def _shown(figures: Figures | None) -> str:
    return "-" if figures is None else f"{100 * figures['in_time']:.2f}% {figures['gpu_hours']:.2f}"


def run(each: Run) -> Figures:
    """Return the figures of one run; with a changed number it must be the first import of the planner in its process."""
    if each.number is not None:
        value = next(value for value in chosen_values() if value.label == each.label)
        assert value.module not in sys.modules, value.module
        sys.meta_path.insert(0, Changed(value, each.number))
    cells = import_module("cells")
    row = cells.run_cell(cells.Cell(_case(each.case), "adaptive", 0))
    return {"in_time": row["in_time"]["both"], "gpu_hours": row["gpu_hours"], "changes": row["changes"]}


def _case(text: str) -> Any:
    """Return a case of the scoreboard, cut to the hours that its name ends with."""
    name, _, hours = text.partition(":")
    traces = os.environ.get("PENSTOCK_TRACES")
    known = {
        case.name: case
        for case in [
            *import_module("days").days(),
            *import_module("workloads").cases(Path(traces) if traces else None),
        ]
    }
    if name not in known:
        sys.exit(f"--cases {name}: choose from {', '.join(known)}")
    case, duration = known[name], re.search(r"duration_s=(\d+)", str(known[name].spec.source))
    if not hours:
        return case
    if duration is None or int(duration[1]) <= 3600 * float(hours):
        sys.exit(f"--cases {text}: {name} lasts no longer; leave :{hours} out")
    source = str(case.spec.source).replace(duration[0], f"duration_s={round(3600 * float(hours))}")
    return replace(case, spec=replace(case.spec, source=source))


class Changed(MetaPathFinder):
    """Finds one module with another number in it."""

    def __init__(self, value: Value, number: float) -> None:
        self._value, self._number = value, number

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with a loader of its own."""
        if fullname != self._value.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None, fullname
        assert spec.origin is not None, fullname
        spec.loader = _Loader(fullname, spec.origin, self._value, self._number)
        return spec


class _Loader(SourceFileLoader):
    """Compiles the module's source with another number; keeps no bytecode."""

    def __init__(self, fullname: str, path: str, value: Value, number: float) -> None:
        super().__init__(fullname, path)
        self._value, self._number = value, number

    def get_code(self, fullname: str) -> CodeType:
        """Return the changed module."""
        source = self.get_source(fullname)
        assert source is not None, fullname
        tree: ast.Module = with_number(source, self._value, self._number)
        return compile(tree, self.path, "exec")


def _apart(each: Run) -> Figures:
    """Return the figures of one run in a process of its own."""
    words = [sys.executable, __file__, "--one", orjson.dumps(each).decode()]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{each}: exit {done.returncode}")
    return dict(orjson.loads(done.stdout))


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for, print the table and write it alongside the figures; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        default=CASES,
        help="of the scoreboard, each maybe with :HOURS to cut it to [default: %(default)s]",
    )
    parser.add_argument("--values", help="names with commas between them [default: all]")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="where finished runs are kept [default: nowhere]"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side [default: %(default)s]")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        sys.stdout.buffer.write(orjson.dumps(run(Run(**orjson.loads(options.one)))))
        return 0
    values, cases = _asked(options.values), options.cases.split(",")
    for case in cases:
        _case(case)
    found = _found(options.output, runs_of(values, cases), options.jobs)
    print(_HEADER.format(count=len(chosen_values()), words=repeated(options.cases, options.values)))
    print("\n".join(table(values, cases, found)))
    return 0


def repeated(cases: str, values: str | None) -> str:
    """Return the options with which a reader makes the same table; where runs are kept, and how many at once, is not part of it."""
    return f"--cases {cases}" + (f" --values {values}" if values else "")


def _asked(names: str | None) -> list[Value]:
    known = chosen_values()
    asked = names.split(",") if names else [value.label for value in known]
    unknown = sorted(set(asked) - {name for value in known for name in (value.label, value.name)})
    if unknown:
        sys.exit(f"--values {','.join(unknown)}: choose from {', '.join(value.label for value in known)}")
    return [value for value in known if value.label in asked or value.name in asked]


def _found(output: Path | None, runs: Sequence[Run], jobs: int) -> dict[Run, Figures]:
    """Return the figures of every run, those that are in the output already as they are there."""
    code = import_module("penstock.simulator.cells").code_digest()
    kept = orjson.loads(output.read_bytes()) if output is not None and output.exists() else []
    found: dict[Run, Figures] = {Run(**row["run"]): row["figures"] for row in kept if row["code"] == code}
    left = [each for each in runs if each not in found]
    with ThreadPoolExecutor(jobs) as pool:
        for number, (each, figures) in enumerate(zip(left, pool.map(_apart, left), strict=True), start=1):
            found[each] = figures
            print(
                f"{number}/{len(left)} {each.case} {each.label} {each.number} {_shown(figures)}",
                file=sys.stderr,
            )
            if output is not None:
                kept.append({"code": code, "run": asdict(each), "figures": figures})
                part = output.with_suffix(".part")
                part.write_bytes(orjson.dumps(kept, option=orjson.OPT_INDENT_2))
                part.replace(output)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
