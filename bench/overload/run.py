"""Measure priority tiers and rejection under overload in virtual time, and write RESULTS.md: `make bench-overload`.

Ends with 1 where a figure that the page is held to is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleet import run_fleet
from page import as_page, draw_tiers, fleet_section, overload_section, tiers_section, verdicts
from rejection import sweep
from rejection_page import draw_rejection, rejection_section, rejection_verdicts
from together import MODE_WORKERS, WORKERS, measure, together_section
from together import verdicts as together_verdicts
from worker import MODES, Run, drive
from workload import traffic

RATE = 4.35
"""Requests/s outside of surges, chosen: FIFO's p99 TTFT is then near the document's 2.1 s."""

WHOLE_S, QUICK_S, SWEEP_QUICK_S = 3600.0, 600.0, 60.0
TOGETHER_S = 120.0


FACTORS = (2, 5)


def saturated(factor: int) -> dict[str, Run]:
    """Return every mode's run of ten minutes at a multiple of the rate."""
    requests = traffic(RATE * factor, QUICK_S, seed=0)
    return {mode.name: drive(mode, requests, QUICK_S) for mode in MODES}


def _note(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def main() -> int:
    """Run, write, and say what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a sixth of the time; prints the page unless --folder"
    )
    parser.add_argument("--folder", type=Path, help="where page and pictures go; default: bench/overload")
    options = parser.parse_args()
    folder = options.folder or (None if options.quick else Path(__file__).parent)
    seconds, sweep_s = (QUICK_S, SWEEP_QUICK_S) if options.quick else (WHOLE_S, QUICK_S)
    requests = traffic(RATE, seconds, seed=0)
    runs = {mode.name: drive(mode, requests, seconds) for mode in MODES}
    found = sweep(sweep_s, _note)
    together_s = TOGETHER_S / 2 if options.quick else TOGETHER_S
    together = measure(together_s, _note, workers=(MODE_WORKERS,) if options.quick else WORKERS)
    fleets = {factor: run_fleet(RATE * factor, QUICK_S) for factor in (1, *FACTORS)}
    page = as_page(
        tiers_section(runs, rate=RATE, seconds=seconds),
        overload_section({factor: saturated(factor) for factor in FACTORS}, seconds=QUICK_S),
        fleet_section(fleets, seconds=QUICK_S),
        rejection_section(found, seconds=sweep_s),
        together_section(together, seconds=together_s),
    )
    if folder is None:
        sys.stdout.write(page)
    else:
        (folder / "RESULTS.md").write_text(page, encoding="utf-8")
        draw_tiers(runs, folder / "tiers.png")
        draw_rejection(found, folder / "rejection.png")
    held_to = [*verdicts(runs), *rejection_verdicts(found), *together_verdicts(together)]
    missed = [f"missed: {what}: {measured}\n" for what, measured, holds in held_to if not holds]
    sys.stderr.write("".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
