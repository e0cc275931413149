"""What time scale a machine keeps up with, and what it relays."""

import sys
from pathlib import Path

import pytest
from patience import LIMIT_S, until_asked

from penstock.cli import demo
from penstock.cli.terminal import Terminal
from penstock.local import relay_rate
from penstock.local.relay_rate import affordable_speed, needed_rate


@pytest.mark.parametrize(
    ("most", "events_per_s", "speed"),
    [
        (9.0, 1_000_000, 9.0),
        (9.0, 150_000, 9.0),
        (9.0, 149_000, 8.5),
        (9.0, 75_000, 4.5),
        (9.0, 40_000, 2.0),
        (9.0, 0, 2.0),
        (20.0, 210_000, 12.5),
        (1.5, 0, 1.5),
    ],
)
def test_a_slow_machine_gets_a_lower_speed(most, events_per_s, speed):
    """In halves, never below 2 nor above what was requested."""
    assert affordable_speed(most, events_per_s) == speed
    assert needed_rate(9.0) == 150_000


@pytest.mark.parametrize(
    ("rate", "speed", "said"),
    [
        (None, 9.0, "could not measure"),
        (75_000.0, 4.5, "relays 75,000 events/s; speed 9 needs 150,000. Using speed 4.5"),
        (900_000.0, 9.0, ""),
    ],
)
async def test_the_demo_says_why_its_speed_is_lower(monkeypatch, capsys, rate, speed, said):
    """Before it starts; a machine that keeps up, or is not known, has the speed that was requested."""

    async def measured():
        return rate

    monkeypatch.setattr(demo, "machine_rate", measured)
    options = await demo._at_affordable_speed(demo.DemoOptions(Path("graph.yaml")), Terminal())

    assert options.speed == speed
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(said) == bool(printed)


async def test_a_process_relays_events():
    """Each is counted once it has come through both sockets."""
    assert await relay_rate.relay_rate(0.0) == 0
    # A busy machine may let the time go by before the first one.
    assert await until_asked(lambda: relay_rate.relay_rate(0.02)) > 0


async def test_a_machine_is_measured_on_every_core_or_not_at_all(monkeypatch):
    """Rates add up; a process that fails leaves the machine unknown, which is not slow."""
    monkeypatch.setattr(relay_rate, "_EXIT_REAL_S", LIMIT_S)
    assert await until_asked(lambda: relay_rate.machine_rate(0.02)) > 0
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert await relay_rate.machine_rate(0.02) is None
