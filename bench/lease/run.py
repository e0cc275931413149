"""Measure KV leases and write RESULTS.md and a picture: `make bench-lease`.

Ends with 1 where a figure that the page is held to is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from crash import run_crash
from page import as_page, crash_section, draw_crash, table_section, verdict_section, verdicts, waiting_section
from table import measure
from waiting import run_waiting

REQUESTS = (1_000, 10_000)
LEASES = (10_000, 100_000, 1_000_000)


def main() -> int:
    """Run, write, and say what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="where page and picture go"
    )
    folder = parser.parse_args().folder
    lease, fixed = run_crash(leases=True), run_crash(leases=False)
    waiting = [run_waiting(requests, prefills=2, decodes=2) for requests in REQUESTS]
    waiting.append(run_waiting(REQUESTS[-1], prefills=4, decodes=4))
    costs = [measure(leases) for leases in LEASES]
    found = verdicts(lease, fixed, waiting, costs)
    page = as_page(
        crash_section(lease, fixed), waiting_section(waiting), table_section(costs), verdict_section(found)
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "RESULTS.md").write_text(page, encoding="utf-8")
    draw_crash(lease, fixed, folder / "crash.png")
    missed = [f"missed: {what}: {measured}\n" for what, measured, holds in found if not holds]
    sys.stderr.write("".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
