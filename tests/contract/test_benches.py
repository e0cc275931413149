"""Every bench starts: what `make bench…` runs imports what the product has today."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "bench").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


def test_there_are_benches():
    """The pattern that finds them still does."""
    assert Path("bench/overload/run.py") in SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_bench_starts(script):
    """With `--help` it imports all that it needs, says what it measures, and runs nothing."""
    result = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")
