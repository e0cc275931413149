"""Recognising and ending recorded processes."""

import os
import signal
import subprocess
import sys

import pytest

from penstock_local import liveness
from penstock_local.liveness import MARK_VARIABLE, ProcessId, end, identify, is_alive, leftovers


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
    assert not is_alive(ProcessId(found.pid, found.create_time - 60))


def test_a_zombie_is_not_alive(sleeper, eventually):
    """A process that ended and was not reaped counts as gone."""
    process = sleeper("pass")
    eventually(lambda: identify(process.pid) is None)


def test_leftovers_are_the_recorded_and_the_marked(sleeper, state_of, entry_of):
    """A child that the arbiter had no time to record is found by its mark; strangers are not."""
    recorded, marked, stranger = sleeper(), sleeper(**{MARK_VARIABLE: "/x/n.json"}), sleeper()
    one = identify(recorded.pid)
    state = state_of("n").with_entry("n_b", entry_of("b", pid=one.pid, create_time=one.create_time))
    state = state.with_entry("n_c", entry_of("c", pid=stranger.pid, create_time=1.0))
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
    assert end([ProcessId(found.pid, found.create_time - 60)], grace_s=0.1) == []
    assert process.poll() is None


def test_an_arbiter_without_a_pid_is_not_alive(state_of):
    """A file that no arbiter has claimed is stale."""
    assert not liveness.arbiter_is_alive(state_of("n"))
