"""The planner's scoreboard: policies x workloads x seeds in virtual time; the body of `make bench-planner`.

    python bench/planner/run.py [--quick] [--data DIR] [--cases NAME,...] [--policies NAME,...] [--seeds N]

Without `--cases` and `--policies` it writes RESULTS.md, results.json and the pictures beside this file (or to
`--output`). Same options, same figures: nothing reads a clock.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import conformance
import orjson
import reference
from cells import Cell, run_cell
from pictures import draw
from results import Board, document
from workloads import Case, cases

from penstock_planner.decide.config import Mode
from penstock_planner.decide.registry import POLICIES
from penstock_simulator.sweep import map_all

DEFAULTS = (Mode.ADAPTIVE.value, Mode.LOAD.value)
"""The planner's own default; before it is registered, the document's mode stands for it."""

DATA_VARIABLE = "PENSTOCK_TRACES"
"""Folder of traces that are not packaged; `--data` wins."""


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for and print it; return the exit status."""
    options = _options(arguments)
    chosen = _cases(options)
    if options.search:
        found = reference.load()
        fresh = map_all(reference.search, chosen, processes=options.jobs, on_done=_progress(len(chosen)))
        reference.save({**found, **{each["case"]: each for each in fresh}})
        return 0
    policies = _policies(options.policies)
    cells = [
        Cell(case, policy, seed)
        for case in chosen
        for policy in policies
        for seed in range(_seeds(case, options))
    ]
    print(f"{len(cells)} cells: {len(chosen)} cases, policies {', '.join(policies)}", file=sys.stderr)
    rows = _reused(cells, options.reuse)
    known = {(row["case"], row["policy"], row["seed"]) for row in rows}
    rows += _run([cell for cell in cells if (cell.case.name, cell.policy, cell.seed) not in known], options)
    default = next((name for name in DEFAULTS if name in policies), policies[0])
    rows += _run(_references(chosen, rows, default, options), options)
    for case in chosen:
        print(f"\n{case.name}: {case.about}{' (tuned)' if case.is_tuned else ''}")
        for policy in dict.fromkeys(row["policy"] for row in rows if row["case"] == case.name):
            print(line([row for row in rows if row["case"] == case.name and row["policy"] == policy]))
    is_part = options.cases or options.policies
    if options.output is not None or not is_part:
        write(options.output or Path(__file__).parent, Board(chosen, rows, policies, default), rows, options)
    return 0


def write(folder: Path, board: Board, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write results.json, the pictures and RESULTS.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_bytes(orjson.dumps(rows, option=orjson.OPT_APPEND_NEWLINE))
    pictures = draw(board, folder)
    table = conformance.table(conformance.verdicts(board.policies), board.policies)
    words = ["python bench/planner/run.py"]
    words += ["--quick"] if options.quick else []
    words += [f"--cases {options.cases}"] if options.cases else []
    words += [f"--policies {options.policies}"] if options.policies else []
    words += [f"--seeds {options.seeds}"] if options.seeds else []
    (folder / "RESULTS.md").write_text(document(board, table, pictures, " ".join(words)), encoding="utf-8")
    print(f"wrote {folder / 'RESULTS.md'}")


def _reused(cells: list[Cell], file: Path | None) -> list[dict[str, Any]]:
    """Return the rows that an earlier run has of these cells, but for those of the planner's own modes."""
    if file is None:
        return []
    wanted = {(cell.case.name, cell.policy, cell.seed) for cell in cells if not Mode(cell.policy).has_ledger}
    rows = orjson.loads(file.read_bytes())
    return [row for row in rows if (row["case"], row["policy"], row["seed"]) in wanted]


def _run(cells: list[Cell], options: argparse.Namespace) -> list[dict[str, Any]]:
    return map_all(run_cell, cells, processes=options.jobs, on_done=_progress(len(cells)))


def _references(
    chosen: list[Case], rows: list[dict[str, Any]], default: str, options: argparse.Namespace
) -> list[Cell]:
    """Return the oracle's cells, and the fixed fleets to hold the default against, where they were searched."""
    searched = reference.load()
    cells = []
    for case in chosen:
        found = searched.get(case.name)
        own = [row for row in rows if row["case"] == case.name and row["policy"] == default]
        if found is None or not own:
            continue
        mean = {
            "in_time": sum(row["in_time"]["both"] for row in own) / len(own),
            "mean_gpus": sum(row["mean_gpus"] for row in own) / len(own),
        }
        for seed in range(_seeds(case, options)):
            cells.append(reference.oracle_cell(case, seed, found))
            cells += reference.static_cells(case, seed, found, mean)
    return cells


def line(rows: list[dict[str, Any]]) -> str:
    """Return one policy's means over the seeds of a case."""

    def mean(name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    both = sum(row["in_time"]["both"] for row in rows) / len(rows)
    return (
        f"  {rows[0]['policy']:18} in time {100 * both:6.2f}%  GPU-h {mean('gpu_hours'):6.2f}"
        f"  p99 {mean('ttft_p99_s'):7.1f} s  violation {mean('violation_s'):6.0f} s"
        f"  changes {mean('changes'):5.1f}  reversals {mean('reversals'):5.1f}  lost {mean('lost'):5.1f}"
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a few cases, one seed: about three minutes")
    parser.add_argument("--data", type=Path, help=f"folder of traces [default: ${DATA_VARIABLE}]")
    parser.add_argument("--cases", help="names with commas between them [default: all]")
    parser.add_argument("--policies", help="modes with commas between them [default: all]")
    parser.add_argument("--seeds", type=int, help="[default: 3, with --quick 1]")
    parser.add_argument(
        "--search", action="store_true", help="search fixed fleets and the oracle of the cases; long"
    )
    parser.add_argument(
        "--reuse",
        type=Path,
        help="results.json of an earlier run: rows of autoscalers that are not ours are taken from it; they change"
        " only with the simulator and the shared bounds",
    )
    parser.add_argument("--output", type=Path, help="folder [default: this one, unless only a part is run]")
    parser.add_argument("--jobs", type=int, default=2, help="processes [default: 2]")
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace) -> list[Case]:
    known = cases(options.data or _folder())
    if options.cases:
        names = options.cases.split(",")
        unknown = sorted(set(names) - {case.name for case in known})
        if unknown:
            sys.exit(f"--cases {','.join(unknown)}: choose from {', '.join(case.name for case in known)}")
        return [case for case in known if case.name in names]
    return [case for case in known if case.is_quick or not options.quick]


def _folder() -> Path | None:
    folder = os.environ.get(DATA_VARIABLE)
    return Path(folder) if folder else None


def _policies(text: str | None) -> list[str]:
    known = [mode.value for mode in Mode if mode in POLICIES]
    if not text:
        return known
    unknown = sorted(set(text.split(",")) - set(known))
    if unknown:
        sys.exit(f"--policies {','.join(unknown)}: choose from {', '.join(known)}")
    return text.split(",")


def _seeds(case: Case, options: argparse.Namespace) -> int:
    asked = options.seeds or (1 if options.quick else 3)
    return asked if case.seeds is None else min(asked, case.seeds)


def _progress(total: int) -> Any:
    def done(number: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{number}/{total}", end="", file=sys.stderr, flush=True)

    return done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
