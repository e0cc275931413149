"""The planner's scoreboard: policies x workloads x seeds in virtual time; the body of `make bench-planner`.

    python bench/planner/run.py [--quick] [--data DIR] [--workloads NAME,...] [--policies NAME,...] [--seeds N]

The whole suite writes RESULTS.md, results.json and the pictures alongside this file; a part of it prints, and writes only to
an `--output`. Same options, same figures: nothing reads a clock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import conformance
import orjson
import reference
from board import Board
from cells import Cell, later, run_cell
from choice import chosen_cases, chosen_policies, known_cases, options_of, seeds_of
from gate import gate
from pictures import draw
from results import document
from workloads import Case

from penstock.simulator.cells import CellJournal
from penstock.simulator.executors import open_executor, run_all
from penstock_planner.decide.config import Mode
from penstock_planner.decide.policy import policy_of

DEFAULT = Mode.ADAPTIVE.value
"""The planner's own default."""


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for and print it; return the exit status: 1 where the quick run's condition is missed."""
    options = options_of(arguments)
    cases, policies = chosen_cases(options), chosen_policies(options)
    _search(cases, options)
    if options.search:
        return 0
    default = DEFAULT if DEFAULT in policies else policies[0]
    rows = _rows(cases, policies, default, options)
    board = Board(cases, rows, policies, default)
    missed, better = gate(board) if options.quick else ([], [])
    if options.json:
        sys.stdout.buffer.write(
            orjson.dumps({"rows": rows, "shortfalls": missed}, option=orjson.OPT_APPEND_NEWLINE)
        )
    else:
        print("\n".join(_lines(cases, rows)))
    if options.output is not None or not options.is_part:
        _write(options.output or Path(__file__).parent, board, rows, options)
    for sentence in missed + better:
        print(sentence, file=sys.stderr)
    return 1 if missed else 0


def _search(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Search all references, or those that the whole suite lacks."""
    known = {} if options.search else reference.load()
    lacking = [
        case for case in cases if not reference.is_complete(known.get(case.name)) and case.kind != "fault"
    ]
    if options.search or not options.is_part:
        fresh = _map("references", reference.search_case, lacking, options)
        if fresh:
            reference.save(fresh)


def _rows(
    cases: Sequence[Case], policies: Sequence[str], default: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return every cell's figures, ordered by case, policy and seed."""
    cells = [
        Cell(case, policy, seed)
        for case in cases
        for policy in policies
        for seed in range(seeds_of(case, options))
    ]
    rows = _reused(cells, options.reuse)
    known = {_key(row) for row in rows}
    cells = [cell for cell in cells if (cell.case.name, cell.policy, cell.seed) not in known]
    # The longest are of one seed; begun last, one of them would be waited for alone.
    cells.sort(key=lambda cell: cell.case.seeds or sys.maxsize)
    rows += _map("cells", run_cell, cells, options)
    rows += _map("references", run_cell, _references(cases, rows, default, options), options)
    places = {case.name: place for place, case in enumerate(cases)}
    return sorted(rows, key=lambda row: places[row["case"]])


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["case"], row["policy"], row["seed"]


def _reused(cells: Sequence[Cell], file: Path | None) -> list[dict[str, Any]]:
    """Return the rows that an earlier run has of these cells, except for those of the planner's own modes."""
    if file is None:
        return []
    wanted = {
        (cell.case.name, cell.policy, cell.seed) for cell in cells if not policy_of(cell.policy).has_ledger
    }
    return [row for row in orjson.loads(file.read_bytes()) if _key(row) in wanted]


def _references(
    cases: Sequence[Case], rows: Sequence[dict[str, Any]], default: str, options: argparse.Namespace
) -> list[Cell]:
    """Return the oracles' cells, and the fixed fleets to hold the default against, where they were searched."""
    searched = reference.load()
    cells = []
    for case in cases:
        found = searched.get(case.name, {})
        own = [row for row in rows if row["case"] == case.name and row["policy"] == default]
        if not reference.is_complete(found) or not own:
            continue
        mean_gpus = sum((later([row["bins"]]) or row)["mean_gpus"] for row in own) / len(own)
        for seed in range(seeds_of(case, options)):
            cells += reference.static_cells(case, seed, found, mean_gpus)
            if not options.quick:
                cells += reference.oracle_cells(case, seed, found)
    return cells


def _write(folder: Path, board: Board, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write results.json, the pictures and RESULTS.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_bytes(orjson.dumps(rows, option=orjson.OPT_APPEND_NEWLINE))
    pictures = draw(board, folder)
    held = [name for name in board.policies if name in conformance.CONFORMABLE]
    found = conformance.merged(_map("conformance", conformance.verdicts_of, held, options))
    table = conformance.table(found, held)
    command = " ".join(["python bench/planner/run.py", *options.words])
    before = None
    if options.before is not None:
        before = Board(board.cases, orjson.loads(options.before.read_bytes()), board.policies, board.default)
    run = {case.name for case in board.cases}
    left_out = [case.name for case in known_cases(options) if case.name not in run]
    text = document(board, table, pictures, command, before=before, left_out=left_out)
    (folder / "RESULTS.md").write_text(text, encoding="utf-8")
    print(f"wrote {folder / 'RESULTS.md'}", file=sys.stderr)


def _lines(cases: Sequence[Case], rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for case in cases:
        lines.append(f"\n{case.name}: {case.about}{' (tuned)' if case.is_tuned else ' (held out)'}")
        of_case = [row for row in rows if row["case"] == case.name]
        policies = dict.fromkeys(row["policy"] for row in of_case)
        lines += [_line([row for row in of_case if row["policy"] == policy]) for policy in policies]
    return lines


def _line(rows: Sequence[dict[str, Any]]) -> str:
    """Return one policy's means over the seeds of a case."""

    def mean(name: str) -> float:
        return sum(row[name] or 0.0 for row in rows) / len(rows)

    both = sum(row["in_time"]["both"] for row in rows) / len(rows)
    windows = sum(row.get("windows", 0) for row in rows)
    agreed = sum(row["windows"] * row["windows_agreed"] for row in rows if row.get("windows"))
    return (
        f"  {rows[0]['policy']:18} in time {100 * both:6.2f}%  GPU-h {mean('gpu_hours'):6.2f}"
        f"  p99 {mean('ttft_p99_s'):7.1f} s  violation {mean('violation_s'):6.0f} s"
        f"  changes {mean('changes'):5.1f}  reversals {mean('reversals'):5.1f}  lost {mean('lost'):5.1f}"
        + (f"  served as predicted in {agreed / windows:.0%} of {windows} windows" if windows else "")
    )


def _map(
    name: str,
    work: Callable[[Any], dict[str, Any]],
    specs: Sequence[Any],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    if not specs:
        return []
    journal = None if options.journal is None else CellJournal(options.journal)
    with open_executor(processes=options.jobs, cells=len(specs), on=options.on) as executor:
        return run_all(work, specs, executor, journal=journal, on_done=_progress(name, len(specs)))


def _progress(name: str, total: int) -> Callable[[int], None]:
    """Return what writes how much is done: in place on a terminal, else a line every twentieth."""
    lines, said = {-(-total * part // 20) for part in range(1, 21)}, 0

    def done(number: int) -> None:
        nonlocal said
        passed = [each for each in lines if said < each <= number]
        said = number
        if sys.stderr.isatty():
            print(
                f"\r{name} {number}/{total}", end="" if number < total else "\n", file=sys.stderr, flush=True
            )
        elif passed:
            print(f"{name} {number}/{total}", file=sys.stderr, flush=True)

    return done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
