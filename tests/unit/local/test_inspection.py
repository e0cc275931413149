"""Leaked and hung processes of local graphs, as `penstock doctor --local` finds them."""

import os
import signal
from dataclasses import replace

import psutil
import pytest
from patience import eventually
from reserved_ports import reserved_port
from states import LEADER

from penstock.cli.doctor_local import hung, orphans
from penstock.core.local_state import EntryState
from penstock.local.liveness import MARK_VARIABLE, identify
from penstock.local.store import StateStore


@pytest.fixture
def lead(spawn, state_folder):
    """Return a function that starts a leader with one unmarked child; returns it and the child's pid."""

    def start(namespace=None):
        mark = {} if namespace is None else {MARK_VARIABLE: str(state_folder / f"{namespace}.json")}
        process = spawn(LEADER, **mark)
        return process, int(process.stdout.readline())

    return start


@pytest.fixture
def arbiter(spawn):
    """Return the identity of a process that is in for an arbiter."""
    return identify(spawn().pid)


def entry_with(entry_of, pid, **fields):
    """Return a ready entry of a running process."""
    return entry_of("decode", state=EntryState.READY, pid=pid, started=identify(pid).started, **fields)


def test_of_a_graph_without_an_arbiter_every_process_is_a_stray(lead, state_folder, state_of, entry_of):
    """The recorded one, its child whose environment is blank, and one of a graph whose file is gone."""
    leader, child = lead()
    StateStore.of("n").write(state_of("n").with_entry("n_decode", entry_with(entry_of, leader.pid)))
    marked, _ = lead("gone")
    found = {(each.subject, each.message.split(",")[0]) for each in orphans(state_folder)}
    assert found == {
        ("graph n", f"process {leader.pid} was left behind"),
        ("graph n", f"process {child} was left behind"),
        ("graph gone", f"process {marked.pid} was left behind"),
    }
    assert {each.remedy for each in orphans(state_folder, "n")} == {"penstock down --namespace n"}


def test_of_a_running_graph_only_what_its_file_does_not_name_is_a_stray(
    lead, state_folder, state_of, entry_of, arbiter
):
    """Recorded processes and their children are supervised; a marked one besides is leaked."""
    leader, _ = lead("n")
    leaked, _ = lead("n")
    state = state_of("n", pid=arbiter.pid, started=arbiter.started)
    StateStore.of("n").write(state.with_entry("n_decode", entry_with(entry_of, leader.pid)))
    (orphan,) = orphans(state_folder)
    assert orphan.message.startswith(
        f"process {leaked.pid} was left behind, because its graph's statefile does not list it: "
    )
    assert orphan.remedy == f"kill -9 {leaked.pid}"


async def test_a_stopped_process_and_one_that_does_not_answer_hang(lead, state_of, entry_of, arbiter):
    """SIGSTOP is observed in the process itself, a port that nobody listens on by asking."""
    stopped, _ = lead()
    silent, _ = lead()
    os.kill(stopped.pid, signal.SIGSTOP)
    eventually(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
    state = state_of("n", pid=arbiter.pid, started=arbiter.started)
    url = f"http://127.0.0.1:{reserved_port()}"
    state = state.with_entry("n_a", entry_with(entry_of, stopped.pid))
    state = state.with_entry("n_b", entry_with(entry_of, silent.pid, url=url, health_path="/health"))
    expected = [
        "n_a: it is stopped by a signal or a debugger",
        f"n_b: health check of {url}/health: nothing listens there",
    ]
    assert [each.message for each in (await hung(state)).values()] == expected
    gone = replace(state, arbiter=replace(state.arbiter, pid=0))
    assert [each.message for each in (await hung(gone)).values()] == expected
