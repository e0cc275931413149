"""The supervisor's loop over a fake launcher: every wait of a stop is bounded."""

import asyncio
import io
import math
import signal
import time
from dataclasses import replace

import pytest
from rich.console import Console
from states import Disk

from penstock.core.local_state import EntryState
from penstock.local import plan, process_log
from penstock.local import supervisor as supervisor_module
from penstock.local.launcher import ExitedProcess
from penstock.local.plan import ObservedProcess, ProcessAction, ProcessStep
from penstock.local.pool import PoolFile, PoolMember, PoolStore
from penstock.local.render import render
from penstock.local.statefile import ProcessId
from penstock.local.status import summarise
from penstock.local.store import StateStore, cache_folder
from penstock.local.supervisor import StatefileRecord, Supervisor


class Unkillable:
    """A launcher whose processes resist every signal."""

    def __init__(self):
        self.sent = []

    def adopt(self, name, process):
        """Take charge of it."""

    def send(self, name, number):
        """Note the signal."""
        self.sent.append((name, number))

    def reap(self):
        """Nothing ever ends."""
        return []


@pytest.fixture
def store(state_of, entry_of):
    """Return the store of a graph with one ready worker."""
    made = StateStore.of("n")
    entry = entry_of("decode", state=EntryState.READY, pid=7, started="b/1")
    made.write(state_of("n").with_entry("n_decode", entry))
    return made


async def test_a_stop_does_not_wait_for_ever_for_a_process_that_resists_sigkill(store, monkeypatch):
    """After SIGTERM, the grace and SIGKILL the supervisor ends; `down` then names what is left."""
    monkeypatch.setattr(supervisor_module, "UNKILLABLE_S", 0.0)
    monkeypatch.setattr(supervisor_module, "TICK_S", 0.0)
    launcher = Unkillable()
    monkeypatch.setattr(plan, "GRACE_FLOOR_S", 0.0)
    supervisor = Supervisor(store, launcher, store.read())
    supervisor.adopt()
    supervisor.request_stop(force=True)
    await supervisor.run()
    assert launcher.sent == [("n_decode", signal.SIGTERM), ("n_decode", signal.SIGKILL)]


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "exit code 0: no model given"), (-signal.SIGTERM, "killed by SIGTERM")]
)
def test_a_process_that_ends_by_itself_is_quoted_whatever_its_code(store, tmp_path, code, reason):
    """An engine that prints its usage ends with 0, and the reason says why; a signal is not a fault of the process."""
    state = store.read()
    process_log.log_path(str(tmp_path), "n_decode").write_text("no model given\n")
    state = replace(state, arbiter=replace(state.arbiter, log_dir=str(tmp_path)))
    supervisor = Supervisor(store, Unkillable(), state)
    assert supervisor._exit_reason(ExitedProcess("n_decode", 7, code), ObservedProcess(pid=7)) == reason


@pytest.mark.parametrize(("code", "is_kept"), [(0, True), (-signal.SIGKILL, False), (None, False)])
async def test_what_an_engine_compiled_is_dropped_unless_it_ended_by_itself(
    store, monkeypatch, code, is_kept
):
    """A file torn by a kill would end each of its successors."""
    launcher = Unkillable()
    monkeypatch.setattr(launcher, "reap", lambda: [ExitedProcess("n_decode", 7, code)])
    monkeypatch.setattr(launcher, "forget", lambda _name: asyncio.sleep(0), raising=False)
    supervisor = Supervisor(store, launcher, store.read())
    supervisor.adopt()
    own, other = cache_folder("n") / "n_decode", cache_folder("n") / "n_decode_1"
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "compiled").touch()
    await supervisor.stop_tick()
    assert (own.exists(), other.exists()) == (is_kept, True)


def test_of_an_adopted_process_errors_since_then_are_quoted_alone(store, tmp_path):
    """Its exit code is unknown, so what it logged of its work, and what an earlier run died of, is not a reason."""
    log = process_log.log_path(str(tmp_path), "n_decode")
    log.write_text("ValueError: of an earlier run\n")
    state = store.read()
    state = replace(state, arbiter=replace(state.arbiter, log_dir=str(tmp_path)))
    supervisor = Supervisor(store, Unkillable(), state)
    supervisor.adopt()
    ended, unknown = ExitedProcess("n_decode", 7, None), "ended; its exit code is unknown"
    with log.open("a") as file:
        file.write("worker ready\n")
        file.flush()
        assert supervisor._exit_reason(ended, ObservedProcess(pid=7)) == unknown
        file.write("MemoryError\n")
        file.flush()
        assert supervisor._exit_reason(ended, ObservedProcess(pid=7)) == f"{unknown}: MemoryError"


async def test_a_stop_that_had_begun_goes_on_after_a_kill_of_the_arbiter(store):
    """The successor reads `stopping` and stops, in place of serving again."""
    state = store.read()
    stopping = replace(state, arbiter=replace(state.arbiter, stopping=True))
    store.write(stopping)
    launcher = Unkillable()
    supervisor = Supervisor(store, launcher, stopping)
    supervisor.adopt()
    await supervisor.stop_tick()
    assert launcher.sent == [("n_decode", signal.SIGTERM)]


async def test_a_drain_that_the_pool_cuts_is_ended_and_told(store, state_of, entry_of):
    """By SIGTERM at once; the statefile counts it, and `status`, `penstock pool` and the planner's sentences say who and why."""
    gpus = {"gpus": (0,), "state": EntryState.DRAINING, "served": True, "grace_s": 900.0}
    entry = entry_of("decode", pid=7, started="b/1", **gpus)
    state = state_of("n", pool="p", budget=0, reclaim_s=30.0, speed=1.0).with_entry("n_decode", entry)
    store.write(state)
    PoolStore.of("p").found(PoolFile("p", 8, 0.0, {"n": PoolMember(0, 8, 0, (), is_arriving=False)}))
    launcher = Unkillable()
    supervisor = Supervisor(store, launcher, state)
    supervisor.adopt()
    await supervisor._act(ProcessAction(ProcessStep.CUT_DRAIN, "n_decode"), time.monotonic())
    assert supervisor._observed["n_decode"].is_cut
    assert launcher.sent == [("n_decode", signal.SIGTERM)]
    said = "n_decode has drained for 30 s, the pool's reclaim.graceSeconds, and is terminated; its streams are resumed on another worker or lost"
    assert PoolStore.of("p").claim("n", None).note.endswith(f"; {said}")
    assert PoolStore.of("p").cuts() == [f"n: 1 drain cut; the last: {said}"]
    status = summarise(store.read(), running=True, router=None, planner=None, decisions=())
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render(status))
    assert f"1 drain cut; the last: {said}" in console.export_text()


@pytest.fixture
def disk(state_folder, state_of, entry_of):
    """Return the store of a graph with one ready worker."""
    store = Disk(state_folder / "n.json")
    entry = entry_of("decode", state=EntryState.READY, pid=7, started="b/1", ports={"port": 21000})
    store.write(state_of("n").with_entry("n_decode", entry))
    return store


@pytest.fixture
def record(disk):
    """Return the supervisor's record of it."""
    return StatefileRecord(disk, disk.read())


def test_on_a_full_disk_a_crashed_worker_can_be_restarted(disk, record):
    """The edits hold in memory and say what is wanted, though the file keeps its old content."""
    disk.full_writes = math.inf
    record.restarting("n_decode", "killed by SIGKILL")
    assert record.claim_start("n_decode").state is EntryState.STARTING
    record.started("n_decode", ProcessId(8, "b/2"))
    record.change("n_decode", state=EntryState.READY)
    entry = record.read().entries["n_decode"]
    assert (entry.state, entry.pid, entry.restarts) == (EntryState.READY, 8, 1)
    assert disk.read().entries["n_decode"].pid == 7


def test_a_process_whose_start_could_not_be_recorded_for_a_held_lock_is_recorded_later(
    disk, record, monkeypatch
):
    """Else the successor of a killed arbiter ends a living worker as one that nobody recorded."""
    with disk.locked():
        monkeypatch.setattr(disk, "locked", lambda: StateStore.locked(disk, 0.0))
        record.started("n_decode", ProcessId(8, "b/2"))
    assert disk.read().entries["n_decode"].pid == 7
    assert record.read().entries["n_decode"].pid == 8
    assert disk.read().entries["n_decode"].pid == 8


def test_edits_held_in_memory_reach_the_file_with_what_others_wrote(disk, record, entry_of):
    """Once there is room both the supervisor's and the planner's edits stand in the file."""
    disk.full_writes = math.inf
    record.started("n_decode", ProcessId(8, "b/2"))
    disk.full_writes = 0
    disk.update(lambda state: (state.change("n_decode", state=EntryState.DRAINING), None))
    disk.update(lambda state: (state.with_entry("n_decode_1", entry_of("decode")), None))
    assert record.read() == disk.read()
    assert list(disk.read().entries) == ["n_decode", "n_decode_1"]
    decode = disk.read().entries["n_decode"]
    assert (decode.pid, decode.state) == (8, EntryState.DRAINING)


@pytest.mark.parametrize(("mode", "is_full"), [(0o700, True), (0o777, False)])
def test_edits_live_on_in_memory_while_the_file_is_lost_or_its_folder_is_not_trusted(
    disk, record, mode, is_full
):
    """A file that is gone on a full disk, or a folder that others may write: nothing is forgotten, nothing fails."""
    disk.path.parent.chmod(mode)
    if is_full:
        disk.full_writes = math.inf
        disk.path.unlink()
    record.restarting("n_decode", "why")
    assert record.read().entries["n_decode"].restarts == 1
    disk.path.parent.chmod(0o700)
    disk.full_writes = 0
    assert record.read().entries["n_decode"].restarts == 1
    assert disk.read().entries["n_decode"].restarts == 1


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"arbiter": {}, "n_decode": {"service": 3}}', b""])
def test_a_file_that_cannot_be_read_is_written_again(disk, record, content):
    """Whatever is in it, the next look and the next edit continue from memory."""
    before = disk.read()
    disk.path.write_bytes(content)
    assert record.read() == before
    disk.path.write_bytes(content)
    record.restarting("n_decode", "why")
    assert disk.read().entries["n_decode"].restarts == 1
