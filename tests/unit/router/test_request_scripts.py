"""Every script's way through the request machine: each step with all that it says, and each verdict."""

from enum import Enum
from pathlib import Path

import pytest
from request_driver import MEETING_SCRIPTS, SCRIPTS, SPLIT_SCRIPTS, Driver

from penstock.router.core.request_steps import SendRequest
from penstock.router.core.retries import FailedTry
from penstock.router.core.worker import Worker


def in_words(driver):
    """Return a way's steps with all that they say, then each assignment's verdicts."""
    steps = [" ".join([type(step).__name__, *_said(step)]) for step in driver.steps]
    verdicts = "/".join("+".join(each) or "none" for each in driver.verdicts)
    return [*steps, f"verdicts {verdicts}", f"avoids {len(driver.machine.tries.avoid)}"]


def _said(step):
    for name, value in zip(step._fields, step, strict=True):
        if name in ("assignment", "prefill", "response", "events"):
            continue
        if name == "kv":
            if isinstance(step, SendRequest) and value is not None:
                yield "reads_kv"
        elif isinstance(value, FailedTry):
            yield value.reason
        elif isinstance(value, Worker):
            yield "a worker"
        elif isinstance(value, tuple):
            yield from (each.partition("-")[0] for each in value)
        elif value is True:
            yield name
        elif value is not False and value is not None:
            yield value.name.lower() if isinstance(value, Enum) else str(value)


def read_ways():
    """Return the steps and verdicts that ``request_steps.txt`` has, by mode and script."""
    lines = (Path(__file__).parent / "request_steps.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith("#"))


WAYS = read_ways()
MODES = {
    "together": ({"is_split": False}, SCRIPTS),
    "split": ({"is_split": True}, SPLIT_SCRIPTS),
    "meeting": ({"is_split": True, "is_concurrent": True}, MEETING_SCRIPTS),
}


@pytest.mark.parametrize(
    ("mode", "name"), [(mode, name) for mode, (_, scripts) in MODES.items() for name in scripts]
)
def test_every_way_takes_its_steps_in_order(mode, name):
    """With all that each step says, and with the verdicts that reach each worker's circuit."""
    options, scripts = MODES[mode]
    driver = Driver(**options)
    driver.run(scripts[name][0])

    assert ", ".join(in_words(driver)) == WAYS[f"{mode}, {name}"]
