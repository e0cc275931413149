"""The supervisor's edits: guarded against others' edits, a lost file and a full disk."""

import math

import pytest
from states import Disk

from penstock.core.local_state import EntryState
from penstock.local.liveness import ProcessId
from penstock.local.supervisor import Record


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
    return Record(disk, disk.read())


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


def test_a_file_lost_on_a_full_disk_lives_on_in_memory_until_there_is_room(disk, record):
    """Nothing is forgotten and nothing fails meanwhile."""
    disk.full_writes = math.inf
    disk.path.unlink()
    record.restarting("n_decode", "why")
    assert record.read().entries["n_decode"].restarts == 1
    disk.full_writes = 0
    assert record.read().entries["n_decode"].restarts == 1
    assert disk.read().entries["n_decode"].restarts == 1


def test_a_folder_that_others_may_write_stalls_nothing(disk, record):
    """The file there is not trusted, so edits hold in memory until the folder is the owner's alone again."""
    disk.path.parent.chmod(0o777)
    record.restarting("n_decode", "why")
    assert record.read().entries["n_decode"].restarts == 1
    disk.path.parent.chmod(0o700)
    assert record.read().entries["n_decode"].restarts == 1
    assert disk.read().entries["n_decode"].restarts == 1


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"arbiter": {}, "n_decode": {"service": 3}}', b""])
def test_a_file_that_cannot_be_read_is_written_again(disk, record, content):
    """Whatever stands in it, the next look and the next edit go on from memory."""
    before = disk.read()
    disk.path.write_bytes(content)
    assert record.read() == before
    disk.path.write_bytes(content)
    record.restarting("n_decode", "why")
    assert disk.read().entries["n_decode"].restarts == 1
