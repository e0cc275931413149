"""Compares the measured coverage of each pure package with its floor in pyproject.toml; `make coverage` calls it.

Reads the data that a run of the tests with --cov has left. Prints a line a package. Exit status 1 if one is below
its floor.
"""

from __future__ import annotations

import sys
import tomllib
from io import StringIO
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import NoDataError

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def percent(measured: Coverage, package: str) -> float:
    """Return the share of a package's lines and branches that ran, 0-100; 0 where nothing of it was imported."""
    try:
        return measured.report(include=[f"*/{package.replace('.', '/')}/*"], file=StringIO())
    except NoDataError:
        return 0.0


def main() -> int:
    """Print the table; return the exit status."""
    tool = tomllib.loads(PYPROJECT.read_text())["tool"]
    floors: dict[str, int] = tool["penstock"]["coverage_floors"]
    measured = Coverage(config_file=str(PYPROJECT))
    measured.load()
    found = {package: percent(measured, package) for package in floors}
    for package, value in found.items():
        print(f"{value:6.1f}% of {package}, at least {floors[package]}%")
    below = [package for package, value in found.items() if value < floors[package]]
    for package in below:
        path = f"*/{package.replace('.', '/')}/*"
        print(
            f"{package} is below its floor: test what `coverage report --show-missing --include '{path}'` lists"
        )
    return bool(below)


if __name__ == "__main__":
    sys.exit(main())
