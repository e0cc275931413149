"""Three graphs on one pool, from real traces shifted by a slot of time, one of them viral, under four ways to divide it.

Needs PENSTOCK_TRACES, the folder of Azure's conversation trace and Mooncake's. Writes results.json and RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pool_cells import AMPLE, PoolCell, figures_of
from rivals import RIVALS

from penstock.simulator.cells import CellJournal
from penstock.simulator.executors import open_executor, run_all

FOLDER = Path(__file__).parent
OURS = "pool"


def page(results: Sequence[Mapping[str, Any]], gpus: int, slot_s: float) -> str:
    """Return the results as Markdown."""
    names = [row["graph"] for row in results[0]["graphs"]]
    lines = [
        "# GPU pools: three graphs, busy one after the other",
        "",
        f"Written by `python bench/pools/run.py`. Three slots of {slot_s / 60:g} minutes: Azure's conversation trace at 5 requests/s in the",
        "first, Mooncake's at 2.5 (prompts cut at 32,000 tokens) in the second, and Azure's at 20 for the first third of it, viral; else each has a",
        "tenth of its rate. Simulated A100 workers of one GPU, mode adaptive,",
        f"start-up 60 s. {gpus} GPUs in all, a guarantee (or budget) of {gpus // 3} each, one priority. Late: requests out of time.",
        "",
        f"| divided by | {' | '.join(f'{name}: in time' for name in names)} | late | GPU-hours | lost |",
        "|---" * (len(names) + 4) + "|",
    ]
    for result in results:
        rows = {row["graph"]: row for row in result["graphs"]}
        shares = [f"{100 * rows[name]['in_time']['both']:.1f}%" for name in names]
        late = sum(row["late"] for row in rows.values())
        cells = [
            result["policy"],
            *shares,
            str(late),
            f"{result['pool']['gpu_hours']:.1f}",
            str(result["pool"]["lost"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"`{AMPLE}`: as many GPUs as the planners want, the bound of any division."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run every way to divide the pool and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=9, help="of the pool; default: 9")
    parser.add_argument("--slot-s", type=float, default=1200.0, help="seconds of a slot; default: 1200")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the page goes")
    parser.add_argument("--jobs", type=int, help="processes; default: 1, or the cluster's")
    parser.add_argument(
        "--on",
        help="dask, or dask://HOST:PORT of a scheduler whose workers have this folder on PYTHONPATH; default: processes",
    )
    parser.add_argument(
        "--journal", type=Path, help="folder of finished runs, from which a killed one goes on; default: none"
    )
    parser.add_argument("--only", nargs="*", default=None, help="ways to divide the pool; default: all")
    given = parser.parse_args()
    if given.jobs is None and given.on is None:
        given.jobs = 1
    traces = Path(os.environ["PENSTOCK_TRACES"])
    names = given.only or [*RIVALS, OURS, AMPLE]
    specs = [PoolCell(name, given.gpus, given.slot_s, str(traces)) for name in names]
    journal = None if given.journal is None else CellJournal(given.journal)
    with open_executor(processes=given.jobs, cells=len(specs), on=given.on) as executor:
        results = run_all(figures_of, specs, executor, journal=journal)
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = page(results, given.gpus, given.slot_s)
    (given.folder / "RESULTS.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
