"""`penstock up` against another one, and cut short: one graph serves or none, and nothing is left of the other."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S


def test_of_two_ups_at_once_on_one_port_one_serves_and_the_other_says_why(world, eventually):
    """A router that could not bind is not ready because the other one answers; its graph leaves nothing."""
    manifest = world.manifest()
    flags = ("--port", world.port, "--no-planner", "--speed", 20, "--timeout", LIMIT_S)
    names = ("world", "other")
    ups = [
        world.start(
            "up", manifest, *flags, "--namespace", name, "--log-dir", world.folder / f"log-{name}", name=name
        )
        for name in names
    ]
    codes = [process.wait(LIMIT_S) for process in ups]
    words = {name: (world.folder / f"{name}.out").read_text() for name in names}
    assert sorted(code == 0 for code in codes) == [False, True], words
    winner, loser = sorted(names, key=lambda name: codes[names.index(name)])
    assert "in use" in words[loser]
    assert "serves m" in words[winner]
    states = world.statefile.parent
    assert [path.name for path in states.glob("*.json")] == [f"{winner}.json"]
    assert world.marked(states / f"{loser}.json") == {}
    assert world.run("down", "--namespace", winner).returncode == 0
    assert world.marked(states / f"{winner}.json") == {}


# The phases of a start: no arbiter yet, an arbiter that has claimed the namespace, workers that run.
PHASES = {
    "begun": lambda world: True,
    "claimed": lambda world: world.statefile.exists(),
    "running": lambda world: world.entries("decode", "ready"),
}


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGTERM, "begun"),
        (signal.SIGHUP, "claimed"),
        (signal.SIGTERM, "running"),
        pytest.param(signal.SIGHUP, "begun", marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, "claimed", marks=pytest.mark.nightly),
        pytest.param(signal.SIGHUP, "running", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_during_up_leaves_nothing_running(world, eventually, phase, number):
    """Whenever it comes, `up` ends with 128 and its number, without processes, statefile or sockets."""
    # The prefill service never becomes ready, so that `up` is under way for as long as the test needs.
    manifest = world.manifest()
    text = manifest.read_text().replace("role: prefill,", "role: prefill, startupSeconds: 80000,")
    manifest.write_text(text)
    flags = ("--port", world.port, "--no-planner", "--log-dir", world.log_dir, "--speed", 10)
    process = world.start("up", manifest, *flags, name="up")
    eventually(lambda: _handles(process.pid, number), "up handles signals")
    eventually(lambda: PHASES[phase](world), phase)
    os.kill(process.pid, number)
    assert process.wait(LIMIT_S) == 128 + number, (world.folder / "up.out").read_text()
    assert world.marked() == {}
    assert list(world.statefile.parent.glob("*")) == []
    assert str(world.statefile) not in _command_lines()


@pytest.mark.parametrize("phase", ["begun", "claimed", pytest.param("running", marks=pytest.mark.nightly)])
def test_down_during_up_ends_the_start(world, eventually, phase):
    """Whenever it comes, `down` finds the start, `up` ends and says so, and neither leaves anything."""
    manifest = world.manifest()
    text = manifest.read_text().replace("role: prefill,", "role: prefill, startupSeconds: 80000,")
    manifest.write_text(text)
    flags = ("--port", world.port, "--no-planner", "--log-dir", world.log_dir, "--speed", 10)
    process = world.start("up", manifest, *flags, name="up")
    eventually(
        lambda: world.statefile.with_suffix(".starting").exists() or process.poll(), "the start is recorded"
    )
    eventually(lambda: PHASES[phase](world) or process.poll(), phase)
    done = world.run("down")
    assert done.returncode == 0, done.stderr
    assert f"stopped `penstock up` (pid {process.pid}), which was still starting world" in done.stdout
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert "world: stopped by SIGTERM while starting" in (world.folder / "up.out").read_text()
    assert world.marked() == {}
    assert list(world.statefile.parent.glob("*")) == []
    assert str(world.statefile) not in _command_lines()


def _handles(pid, number):
    """Return whether the process has a handler of its own for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


def _command_lines():
    found = psutil.process_iter(["cmdline"])
    return "\n".join(" ".join(process.info["cmdline"] or ()) for process in found)
