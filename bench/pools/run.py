"""Two to eight graphs on one pool, from real traces shifted by a slot of time, one of them viral, under seven ways to divide it.

Needs PENSTOCK_TRACES, the folder of Azure's conversation trace and Mooncake's. Writes results.json and RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from boards import AZURE, BOARDS, Board
from pool_cells import AMPLE, BOUND, ORACLE, OURS, PoolCell, figures_of
from rivals import RIVALS

from penstock.simulator.cells import CellJournal
from penstock.simulator.executors import open_executor, run_all

FOLDER = Path(__file__).parent
PICTURE = "pool.png"
PICTURED = "five"
Row = Mapping[str, Any]


def page(results: Sequence[Row], slot_s: float) -> str:
    """Return the results as Markdown."""
    lines = [
        "# GPU pools: graphs that share GPUs",
        "",
        f"Written by `python bench/pools/run.py`, slots of {slot_s / 60:g} minutes. Each graph has its trace at its rate while it is busy and a",
        "tenth of it else; Mooncake's prompts are cut at 32,000 tokens. Simulated workers, mode adaptive, start-up 60 s. The guarantees are the",
        "pool's GPUs together, and the budgets where each graph has its own. Of graphs that ask at once, *first come* serves who stands first.",
        f"*{ORACLE}* knows each graph's wants and requests of the next start-up and lends where most requests are in time, guarantees or not,",
        f"*{BOUND}* so within guarantees and priorities; *{AMPLE}*: as many GPUs as the planners want. Late: requests out of time; lacked:",
        "graph-seconds with less of the guarantee than was wanted; lost: taken, and failed.",
    ]
    for name, board in BOARDS.items():
        rows = [each for each in results if each["board"] == name]
        if rows:
            lines += ["", *_section(name, board, rows)]
    lines += ["", f"![GPUs held, wanted and guaranteed on the board of {PICTURED}]({PICTURE})"]
    return "\n".join(lines) + "\n"


def _section(title: str, board: Board, results: Sequence[Row]) -> Iterator[str]:
    yield f"## {title.capitalize()} graphs, {board.gpus} GPUs"
    yield board.about
    yield ""
    yield "| graph | trace | requests/s | busy slots | priority | guaranteed | GPUs of a replica |"
    yield "|---" * 7 + "|"
    for name, load in board.loads.items():
        trace = "Azure" if load.trace == AZURE else "Mooncake"
        begin, end = load.busy
        cells = (name, trace, f"{load.rate:g}", f"{begin:.3g} to {end:.3g}", load.priority.value)
        yield f"| {' | '.join(cells)} | {load.guaranteed} | {load.gpus} |"
    yield ""
    yield f"| divided by | {' | '.join(f'{name}: in time' for name in board.loads)} | late | lacked, s | GPU-hours | lost |"
    yield "|---" * (len(board.loads) + 5) + "|"
    for result in results:
        shares = [f"{100 * each:.1f}%" for each in _in_time(result).values()]
        lacked = sum(row["lacked_s"] for row in result["graphs"])
        figures = (f"{_late(result):,}", f"{lacked:,.0f}", f"{result['pool']['gpu_hours']:.1f}")
        yield f"| {' | '.join((result['policy'], *shares, *figures))} | {result['pool']['lost']} |"
    yield ""
    yield from _against(results)


def _in_time(result: Row) -> dict[str, float]:
    return {row["graph"]: row["in_time"]["both"] for row in result["graphs"]}


def _late(result: Row) -> int:
    return sum(row["late"] for row in result["graphs"])


def _against(results: Sequence[Row]) -> Iterator[str]:
    """Yield where the pool stands against the rivals, as sentences."""
    found = {each["policy"]: each for each in results}
    rivals = [found[name] for name in RIVALS if name in found]
    if OURS not in found or not rivals:
        return
    for rival in rivals:
        saved = 1 - _late(found[OURS]) / max(1, _late(rival))
        yield f"- Requests late in the pool, against {rival['policy']}: {-100 * saved:+.0f}%."
    behind = []
    for name, share in _in_time(found[OURS]).items():
        best = max(rivals, key=lambda each: _in_time(each)[name])
        if round(_in_time(best)[name] - share, 3) > 0:
            behind.append(f"{name} ({best['policy']}: {100 * _in_time(best)[name]:.1f}%)")
    yield f"- Graphs that a rival serves better: {', '.join(behind) or 'none'}."


def main() -> int:
    """Run every way to divide each pool and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slot-s", type=float, default=400.0, help="seconds of a slot; default: 400")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the page goes")
    parser.add_argument("--jobs", type=int, help="processes; default: 1, or the cluster's")
    parser.add_argument(
        "--on",
        help="dask, or dask://HOST:PORT of a scheduler whose workers have this folder on PYTHONPATH; default: processes",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        help="folder of finished runs, from which a killed one continues; default: none",
    )
    parser.add_argument("--boards", nargs="*", default=list(BOARDS), choices=BOARDS, help="default: all")
    parser.add_argument("--only", nargs="*", default=None, help="ways to divide the pool; default: all")
    given = parser.parse_args()
    if given.jobs is None and given.on is None:
        given.jobs = 1
    traces = Path(os.environ["PENSTOCK_TRACES"])
    names = given.only or [*RIVALS, OURS, BOUND, ORACLE, AMPLE]
    given.folder.mkdir(parents=True, exist_ok=True)
    picture = str(given.folder.resolve() / PICTURE)
    specs = [
        PoolCell(
            board, name, given.slot_s, str(traces), picture if (board, name) == (PICTURED, OURS) else None
        )
        for board in given.boards
        for name in names
    ]
    journal = None if given.journal is None else CellJournal(given.journal)
    with open_executor(processes=given.jobs, cells=len(specs), on=given.on) as executor:
        results = run_all(figures_of, specs, executor, journal=journal)
    (given.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = page(results, given.slot_s)
    (given.folder / "RESULTS.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
