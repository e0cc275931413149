"""Recognising and ending recorded processes."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from states import LEADER, Disk

from penstock.core.errors import ConfigError, NotFoundError
from penstock.local import arbiter, liveness
from penstock.local.arbiter import Watchdog, end_unrecorded, resume
from penstock.local.launcher import Launcher
from penstock.local.liveness import MARK_VARIABLE, end, group_of, identify, is_alive, leftovers
from penstock.local.statefile import ProcessId


def test_a_reused_pid_is_another_process(spawn):
    """The start time tells them apart."""
    found = identify(spawn().pid)
    assert is_alive(found)
    assert not is_alive(ProcessId(found.pid, found.started + "0"))


def test_a_step_of_the_wall_clock_changes_no_identity(spawn, monkeypatch):
    """The kernel's time of boot moves with the clock by ten minutes; the recorded process is still itself."""
    found = identify(spawn().pid)
    booted_s = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "BOOT_TIME", None, raising=False)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: booted_s + 600)
    assert is_alive(found)


@pytest.fixture
def orphaned(spawn):
    """Return a leader that was killed, and the pid of the child that it left."""
    leader = spawn(LEADER)
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


SHARING = """
import subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=16)
fd = resource_tracker.getfd()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], pass_fds=[fd])
print(memory.name, child.pid, flush=True)
time.sleep(3600)
"""
"""A leader like vLLM's: a child holds the tracker's pipe, and the tracker removes the segment once it is closed."""


@pytest.fixture
def sharing(spawn):
    """Return a function that starts such a leader; it returns the process, its segment and its child's pid."""

    def start(code=SHARING):
        process = spawn(code)
        name, child = process.stdout.readline().decode().split()
        return process, Path("/dev/shm") / name, int(child)

    return start


@pytest.mark.parametrize("leader_is_gone", [False, True])
def test_shared_memory_of_a_killed_group_is_removed(sharing, leader_is_gone):
    """SIGKILL spares Python's resource tracker until the others are gone and it has cleared up after them."""
    process, segment, _ = sharing()
    leader = identify(process.pid)
    assert segment.exists()
    assert len(group_of(leader)) == 3
    if leader_is_gone:
        process.kill()
        process.wait()
    assert end([leader], grace_s=0.0) == []
    assert not segment.exists()


async def test_the_supervisor_leaves_no_shared_memory_of_a_worker_that_died(sharing, tmp_path, eventually):
    """The children that a dead leader left are killed, its tracker clears up, and only then it counts as ended."""
    process, segment, _ = sharing()
    launcher = Launcher(endpoint=f"ipc://{tmp_path}/a", pubsub_endpoint=f"ipc://{tmp_path}/b")
    launcher.adopt("n_decode", identify(process.pid))
    process.kill()
    process.wait()
    (ended,) = eventually(launcher.reap)
    assert (ended.name, segment.exists()) == ("n_decode", False)
    await launcher.close()


def test_a_resource_tracker_that_does_not_end_is_killed(sharing, monkeypatch):
    """A process of another group holds its pipe: the group is gone all the same."""
    monkeypatch.setattr(liveness, "CLEANING_S", 0.1)
    process, segment, holder = sharing(SHARING.replace("=[fd]", "=[fd], start_new_session=True"))
    assert end([identify(process.pid)], grace_s=0.0) == []
    os.kill(holder, signal.SIGKILL)
    segment.unlink()


def test_leftovers_are_the_recorded_and_the_marked(spawn, state_of, entry_of):
    """A child that the arbiter had no time to record is found by its mark; strangers are not."""
    recorded, marked, stranger = spawn(), spawn(**{MARK_VARIABLE: "/x/n.json"}), spawn()
    one = identify(recorded.pid)
    state = state_of("n").with_entry("n_b", entry_of("b", pid=one.pid, started=one.started))
    state = state.with_entry("n_c", entry_of("c", pid=stranger.pid, started="another boot/1"))
    found = {process.pid for process in leftovers(state, "/x/n.json")}
    assert found == {recorded.pid, marked.pid}


def test_sigterm_comes_first_and_sigkill_after_the_grace(spawn):
    """What ignores SIGTERM is killed; both are gone afterwards."""
    stubborn = spawn(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(3600)"
    )
    stubborn.stdout.readline()
    polite = spawn()
    assert end([identify(polite.pid)], grace_s=60.0) == []  # however busy the machine
    assert end([identify(stubborn.pid)], grace_s=0.2) == []
    assert stubborn.wait() == -signal.SIGKILL
    assert polite.wait() == -signal.SIGTERM


def test_a_process_that_changed_identity_is_not_signalled(spawn):
    """A stranger with a recorded pid is left alone."""
    process = spawn()
    found = identify(process.pid)
    assert end([ProcessId(found.pid, found.started + "0")], grace_s=0.1) == []
    assert process.poll() is None


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


def test_an_arbiter_that_is_still_going_is_waited_for(disk, spawn, state_of, monkeypatch):
    """The kernel closes the pipe to the watchdog before the killed process is gone; giving up then leaves nobody."""
    dying = spawn()
    found = identify(dying.pid)
    disk.write(state_of("n", pid=found.pid, started=found.started))
    looks = iter(range(3))

    def look(_seconds):
        if next(looks) == 1:
            dying.kill()
            dying.wait()

    monkeypatch.setattr(arbiter.time, "sleep", look)
    assert resume(disk).arbiter.pid == os.getpid()


def test_what_a_recorded_process_starts_is_no_stranger(disk, spawn, entry_of, monkeypatch):
    """A child in a session of its own, and one that is started while the successor looks, belong to it."""
    mark = {MARK_VARIABLE: str(disk.path)}
    leader = spawn(
        "import subprocess, sys\nfor line in sys.stdin: print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'],"
        " start_new_session=line.strip() == 'own').pid, flush=True)",
        **mark,
    )
    found = identify(leader.pid)
    entry = entry_of("decode", pid=found.pid, started=found.started)
    before = [_child_of(leader, "own")]
    marked = liveness.marked

    def looks(statefile):
        before.append(_child_of(leader, "group"))
        return marked(statefile)

    monkeypatch.setattr(liveness, "marked", looks)
    end_unrecorded(disk, disk.read().with_entry("n_decode", entry), Watchdog([], {}))
    assert all(identify(child) for child in (leader.pid, *before))
    os.kill(before[0], signal.SIGKILL)


def _child_of(leader, where):
    leader.stdin.write(f"{where}\n".encode())
    leader.stdin.flush()
    return int(leader.stdout.readline())


def test_a_graph_that_was_stopped_or_has_an_arbiter_is_left_alone(disk, state_of, monkeypatch):
    """`penstock down` removed the file, or `penstock up` was quicker."""
    monkeypatch.setattr(arbiter, "DYING_S", 0.0)
    me = identify(os.getpid())
    disk.write(state_of("n", pid=me.pid, started=me.started))
    with pytest.raises(ConfigError, match="nothing to take over"):
        resume(disk)
    disk.remove()
    with pytest.raises(NotFoundError):
        resume(disk)
