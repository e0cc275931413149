"""Run every benchmark one after the other and print what each prints; the body of `make bench`.

    python bench/run.py [NAME ...]

Each benchmark compares side by side within its own run, because machines drift. Nothing here passes or fails:
the figures and the goals alongside them are in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = {
    "router": (
        "router.py",
        "--only",
        "penstock",
        "penstock-apart",
        "relay-wire",
        "relay-aiohttp",
        "relay-bytes",
        "nginx",
    ),
    "request": ("request.py",),
    "hop": ("hop.py",),
    "picker": ("picker.py",),
    "engine-core": ("engine_core.py",),
    "engine-accuracy": ("engine_accuracy.py",),
    "planner": ("planner_decide.py",),
    "routing": ("routing.py",),
    "load": ("load_client.py",),
    "simulator": ("simulator.py",),
    "live": (
        "live_proof.py",
        *["--rows", "60", "--rate", "1.5", "--instances", "2P2D", "--policy", "prefix-cost", "--speed", "2"],
    ),
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; return 1 if one could not run."""
    failed = []
    for name in names or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        began_s = time.monotonic()
        command = [sys.executable, str(Path(__file__).with_name(BENCHMARKS[name][0])), *BENCHMARKS[name][1:]]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
        print(f"({time.monotonic() - began_s:.0f} s)", flush=True)
    if failed:
        print(f"\ncould not run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(BENCHMARKS)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    sys.exit(main(arguments.names))
