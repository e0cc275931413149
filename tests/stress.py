"""Runs chosen tests many times alongside busy loops, to find those that fail on a machine with other work; `make stress`.

A test that passes here passes in CI. Each core gets one busy loop at normal priority, so that the tests have about half
of the machine. Failures are printed with their logs by pytest; the exit status is pytest's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:randomly")
HOG = "while True: pass"


def chosen(arguments: list[str]) -> list[str]:
    """Return the names of the tests that pytest's arguments choose."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "-q", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = [line for line in listed.stdout.splitlines() if "::" in line and not line.startswith(" ")]
    if not names:
        sys.exit(f"no test is chosen by {arguments}\n{listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    return names


def main() -> int:
    """Run the tests; return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="how often each test runs (default: 50)")
    parser.add_argument("--hogs", type=int, default=os.cpu_count(), help="busy loops (default: one per core)")
    parser.add_argument("--workers", default="2", help="tests at a time (default: 2)")
    options, arguments = parser.parse_known_args()
    names = chosen(arguments)
    print(f"{len(names)} tests, {options.times} times each, alongside {options.hogs} busy loops", flush=True)
    began_s = time.monotonic()
    with ExitStack() as stack:
        for _ in range(options.hogs):
            hog = subprocess.Popen([sys.executable, "-c", HOG])
            stack.callback(hog.wait)
            stack.callback(hog.kill)
        listed = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "chosen"
        listed.write_text("\n".join(names), encoding="utf-8")
        command = [*PYTEST, "-q", "--repeat", str(listed), "--times", str(options.times)]
        command += ["-n", options.workers, "--dist", "worksteal"]
        files = sorted({name.partition("::")[0] for name in names})
        status = subprocess.run([*command, *files], cwd=ROOT, check=False).returncode
    print(f"{time.monotonic() - began_s:.0f} s, load {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
    return status


if __name__ == "__main__":
    sys.exit(main())
