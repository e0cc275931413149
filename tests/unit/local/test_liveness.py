"""Recognising and ending recorded processes."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from penstock_local import liveness
from penstock_local.liveness import MARK_VARIABLE, ProcessId, end, group_of, identify, is_alive, leftovers


@pytest.fixture
def sleeper():
    """Yield a function that starts a sleeping process; it is ended afterwards."""
    started = []

    def start(code="import time; time.sleep(60)", **env):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}"],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def test_a_reused_pid_is_another_process(sleeper):
    """The start time tells them apart."""
    found = identify(sleeper().pid)
    assert is_alive(found)
    assert not is_alive(ProcessId(found.pid, found.started + "0"))


def test_a_step_of_the_wall_clock_changes_no_identity(sleeper, monkeypatch):
    """The kernel's time of boot moves with the clock by ten minutes; the recorded process is still itself."""
    found = identify(sleeper().pid)
    booted_s = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "BOOT_TIME", None, raising=False)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: booted_s + 600)
    assert is_alive(found)


def test_another_boot_makes_every_recorded_process_another(sleeper):
    """After a restart of the machine neither a pid nor a group of the same number is the recorded one."""
    found = identify(sleeper().pid)
    earlier = ProcessId(found.pid, "another boot/" + found.started.partition("/")[2])
    assert not is_alive(earlier)
    assert group_of(earlier) == []


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
print(child.pid, flush=True)
time.sleep(60)
"""
"""A leader like vLLM's: the child's environment is blank, so it carries no mark."""


@pytest.fixture
def orphaned(sleeper):
    """Return a leader that was killed, and the pid of the child that it left."""
    leader = sleeper(PARENT)
    child = int(leader.stdout.readline())
    found = identify(leader.pid)
    leader.kill()
    leader.wait()
    yield found, child
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def test_children_of_a_killed_leader_are_leftovers_and_are_ended(orphaned, state_of, entry_of):
    """They are found by the recorded group alone, for their environment is blank."""
    leader, child = orphaned
    state = state_of("n").with_entry("n_b", entry_of("b", pid=leader.pid, started=leader.started))
    assert [member.pid for member in group_of(leader)] == [child]
    left = leftovers(state, "/x/n.json")
    assert left == [leader]
    assert end(left, grace_s=1.0) == []
    assert identify(child) is None
    assert leftovers(state, "/x/n.json") == []


def test_a_zombie_is_not_alive(sleeper, eventually):
    """A process that ended and was not reaped counts as gone."""
    process = sleeper("pass")
    eventually(lambda: identify(process.pid) is None)


def test_leftovers_are_the_recorded_and_the_marked(sleeper, state_of, entry_of):
    """A child that the arbiter had no time to record is found by its mark; strangers are not."""
    recorded, marked, stranger = sleeper(), sleeper(**{MARK_VARIABLE: "/x/n.json"}), sleeper()
    one = identify(recorded.pid)
    state = state_of("n").with_entry("n_b", entry_of("b", pid=one.pid, started=one.started))
    state = state.with_entry("n_c", entry_of("c", pid=stranger.pid, started="another boot/1"))
    found = {process.pid for process in leftovers(state, "/x/n.json")}
    assert found == {recorded.pid, marked.pid}


def test_sigterm_comes_first_and_sigkill_after_the_grace(sleeper):
    """What ignores SIGTERM is killed; both are gone afterwards."""
    stubborn = sleeper(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    stubborn.stdout.readline()
    polite = sleeper()
    assert end([identify(stubborn.pid), identify(polite.pid)], grace_s=0.2) == []
    assert stubborn.wait() == -signal.SIGKILL
    assert polite.wait() == -signal.SIGTERM


def test_a_process_that_changed_identity_is_not_signalled(sleeper):
    """A stranger with a recorded pid is left alone."""
    process = sleeper()
    found = identify(process.pid)
    assert end([ProcessId(found.pid, found.started + "0")], grace_s=0.1) == []
    assert process.poll() is None


def test_an_arbiter_without_a_pid_is_not_alive(state_of):
    """A file that no arbiter has claimed is stale."""
    assert not liveness.arbiter_is_alive(state_of("n"))
