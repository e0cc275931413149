"""Plugin: measure the processor time and the wall time of each test, and list the dearest at the end of a run.

The list fails nothing. Processor time includes children that have ended and have been waited for; what a fixture of a
module or of the session costs is counted for the first test that asks for it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator

import pytest

PROCESSOR_LIMIT_S = 2.0
"""Chosen: what a fast test may take. There are thousands of them."""

_COST = "cost"
_STARTED = pytest.StashKey[tuple[float, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--dearest``."""
    parser.addoption(
        "--dearest", type=int, metavar="N", help="list the N tests that used most processor time"
    )


def _clocks() -> tuple[float, float]:
    """Return the processor seconds of this process and its ended children, and the wall clock's."""
    return sum(os.times()[:4]), time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Read the clocks before the test and its fixtures."""
    item.stash[_STARTED] = _clocks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the cost into the last report of a test, which reaches the main process from xdist's workers, too."""
    report = yield
    if call.when == "teardown":
        cost = [now - before for now, before in zip(_clocks(), item.stash[_STARTED], strict=True)]
        report.user_properties.append((_COST, [*cost, item.get_closest_marker("slow") is not None]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the tests that are too dear, or the ``--dearest``."""
    costs = {
        report.nodeid: value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _COST
    }
    ordered = sorted(costs.items(), key=lambda each: -each[1][0])
    if number := config.getoption("dearest"):
        total_s, wall_s = (sum(cost[index] for cost in costs.values()) for index in (0, 1))
        terminalreporter.section(f"the {number} dearest of {len(costs)} tests")
        terminalreporter.line(f"{total_s:8.1f} s of processor, {wall_s:8.1f} s of wall time: all of them")
        by_file: dict[str, float] = defaultdict(float)
        for name, (used_s, _, _) in ordered:
            by_file[name.partition("::")[0]] += used_s
        for name, used_s in sorted(by_file.items(), key=lambda each: -each[1])[:number]:
            terminalreporter.line(f"{used_s:8.1f} s of processor in {name}")
        chosen = ordered[:number]
    else:
        chosen = [(name, cost) for name, cost in ordered if cost[0] > PROCESSOR_LIMIT_S and not cost[2]]
        if chosen:
            terminalreporter.section(f"fast tests above {PROCESSOR_LIMIT_S:g} s of processor time")
    for name, (used_s, waited_s, _) in chosen:
        terminalreporter.line(f"{used_s:8.1f} s of processor, {waited_s:8.1f} s of wall time  {name}")
