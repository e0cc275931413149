"""A successor takes over a killed arbiter's file: when it may, when it waits, when it ends."""

import os

import pytest
from states import Disk

from penstock.core.errors import ConfigError, NotFoundError
from penstock.local import arbiter
from penstock.local.arbiter import Watchdog, end_unrecorded, resume
from penstock.local.liveness import MARK_VARIABLE, identify


@pytest.fixture
def disk(state_folder, state_of, monkeypatch):
    """Return the store of a graph whose arbiter was killed."""
    monkeypatch.setattr(arbiter, "RESUME_PERIOD_S", 0.0)
    store = Disk(state_folder / "n.json")
    store.write(state_of("n", pid=999_999_999, started="b/1", run_id="r"))
    return store


def test_the_file_is_taken_over_with_its_run_and_one_restart_more(disk):
    """The successor is the file's arbiter then; whose run it is stays."""
    taken = resume(disk).arbiter
    assert taken == disk.read().arbiter
    assert (taken.pid, taken.started) == (os.getpid(), identify(os.getpid()).started)
    assert (taken.run_id, taken.restarts) == ("r", 1)


def test_on_a_full_disk_it_tries_again_until_there_is_room(disk):
    """It leaves no sockets of the attempts that failed."""
    disk.full_writes = 3
    assert resume(disk).arbiter.restarts == 1
    assert disk.full_writes == 0
    assert len(list(disk.path.parent.glob("*.run"))) <= 1


def test_what_was_started_and_not_recorded_is_ended_and_nothing_else(disk, spawn, entry_of):
    """A recorded process and the new watchdog carry the mark too and stay."""
    mark = {MARK_VARIABLE: str(disk.path)}
    recorded, orphan = spawn(**mark), spawn(**mark)
    found = identify(recorded.pid)
    entry = entry_of("decode", pid=found.pid, started=found.started)
    watchdog = Watchdog(["true"], {**os.environ, **mark})
    watchdog.start()
    try:
        end_unrecorded(disk, disk.read().with_entry("n_decode", entry), watchdog)
        assert identify(orphan.pid) is None
        assert identify(recorded.pid) == found
        assert identify(watchdog.pid) is not None
    finally:
        watchdog.end()
    assert identify(watchdog.pid) is None


def test_a_graph_that_was_stopped_or_has_an_arbiter_is_left_alone(disk, state_of):
    """`penstock down` removed the file, or `penstock up` was quicker."""
    me = identify(os.getpid())
    disk.write(state_of("n", pid=me.pid, started=me.started))
    with pytest.raises(ConfigError, match="nothing to take over"):
        resume(disk)
    disk.remove()
    with pytest.raises(NotFoundError):
        resume(disk)
