"""Settings of all tests, and a report of those that cost more processor time than a unit test should.

The report fails nothing. It counts processor time, children included, since a loaded machine lengthens every other
kind of time. Tests marked slow are exempt.
"""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Generator
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from penstock.core import plugins

# No test fails because a machine is slow; pytest-timeout bounds those that hang. Properties get the same examples in
# each run, so that a change is judged by what it changes; `make explore` looks for new ones.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("penstock", PATIENT, derandomize=True)
settings.register_profile("explore", PATIENT, max_examples=1000, print_blob=True)
settings.load_profile("penstock")

# Under nohup SIGHUP is ignored, in a shell's background job SIGINT, and every process that a test starts inherits that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

_ENVIRONMENT = {Path(sysconfig.get_path(each)).resolve() for each in ("purelib", "platlib")}


def _of_penstock_and_the_test(*, group: str) -> EntryPoints:
    """Return the plug-ins of Penstock and of what a test put on the path, not those that a machine happens to have."""
    return EntryPoints(
        each
        for each in entry_points(group=group)
        if each.dist is None
        or each.dist.name == "penstock"
        or Path(str(each.dist.locate_file(""))).resolve() not in _ENVIRONMENT
    )


plugins.entry_points = _of_penstock_and_the_test
plugins.registered.cache_clear()

_KEPT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _kept_signal_handlers() -> Generator[None]:
    """Give the process its handlers back: a command that has ended may leave a signal ignored, as `up` does."""
    before = {each: signal.getsignal(each) for each in _KEPT}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


PROCESSOR_LIMIT_S = 2.0
"""Chosen: what a unit test may take. There are thousands of them."""

_PROPERTY = "processor_s"
_STARTED = pytest.StashKey[float]()


def _processor_s() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what was used before the test and its fixtures."""
    item.stash[_STARTED] = _processor_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write what an expensive test used into its report, which reaches the main process from xdist's workers, too."""
    report = yield
    if call.when == "call" and item.get_closest_marker("slow") is None:
        used_s = _processor_s() - item.stash[_STARTED]
        if used_s > PROCESSOR_LIMIT_S:
            report.user_properties.append((_PROPERTY, used_s))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the expensive tests, the worst first."""
    used = {
        report.nodeid: value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    }
    if used:
        terminalreporter.section(f"tests above {PROCESSOR_LIMIT_S:g} s of processor time")
        for name, used_s in sorted(used.items(), key=lambda each: -each[1]):
            terminalreporter.line(f"{used_s:6.1f} s  {name}")
