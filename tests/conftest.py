"""Settings of all tests."""

from __future__ import annotations

import signal
import sysconfig
from collections.abc import Generator
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from penstock.core import plugins

pytest_plugins = ("costs", "leftovers", "repeated")

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
