"""The statefile on disk: place, lock, whole replacement, owner, faults that a user can mend."""

import json
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, ConflictError
from penstock.local import store as store_module
from penstock.local.liveness import identify
from penstock.local.store import StateStore


@pytest.fixture
def store(state_folder):
    """Return the store of namespace n in the test's folder."""
    return StateStore.of("n")


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a" * 64])
def test_a_namespace_must_be_a_dns_label(name):
    """It becomes a file name, so nothing else is accepted."""
    with pytest.raises(ConfigError, match="--namespace"):
        StateStore.of(name)


def test_an_update_is_written_whole_and_answers(store, state_of, entry_of):
    """The change sees the file, its answer comes back, readers see the result; the file is store_module."""
    store.write(state_of("n"))
    answer = store.update(lambda state: (state.with_entry("n_b", entry_of("b")), len(state.entries)))
    assert answer == 0
    assert list(store.read().entries) == ["n_b"]
    assert store.path.stat().st_mode & 0o077 == 0


def test_concurrent_updates_are_all_kept(store, state_of, entry_of):
    """The lock makes read-change-write one step, across threads as across processes."""
    store.write(state_of("n"))

    def add(worker):
        for number in range(10):
            name = f"n_{worker}_{number}"
            store.update(lambda state, name=name: (state.with_entry(name, entry_of("b")), None))

    threads = [threading.Thread(target=add, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.read().entries) == 40


def test_a_lock_that_is_held_too_long_is_a_conflict(store, state_of, monkeypatch):
    """A stuck process delays no other for ever."""
    store.write(state_of("n"))
    with store.locked(), pytest.raises(ConflictError, match="held by another process"), store.locked(0.05):
        pass


def test_removing_leaves_neither_file_nor_lock_and_can_be_repeated(store, state_of):
    """After the arbiter has ended nothing is left; a later writer makes a new lock."""
    store.write(state_of("n"))
    store.remove()
    store.remove()
    assert list(store.path.parent.glob("n.json*")) == []
    store.write(state_of("n"))
    assert store.read() is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"arbiter": "\xff"}', "not JSON .*utf-8"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_file_is_named_with_a_remedy(store, content, words):
    """One clear error, and the quiet reader takes it as no file."""
    store.path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        store.read()
    assert store.read_quietly() is None


def test_a_full_disk_keeps_the_old_content(store, state_of, entry_of, monkeypatch):
    """A failed write is an error that says so; nothing half written is ever read."""
    store.write(state_of("n"))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device; the old content stays"):
        store.write(state_of("n").with_entry("n_b", entry_of("b")))
    assert store.read() == state_of("n")
    assert list(store.path.parent.glob("*.tmp")) == []


def test_a_live_arbiters_file_cannot_be_claimed_and_a_stale_one_can(store, state_of):
    """The pair of pid and start time decides: a reused pid is not the arbiter."""
    me = identify(os.getpid())
    live = state_of("n", pid=me.pid, started=me.started)
    store.write(live)
    with pytest.raises(ConfigError, match="already running"):
        store.claim(state_of("n"))
    store.write(replace(live, arbiter=replace(live.arbiter, started=me.started + "0")))
    store.claim(state_of("n", budget=3))
    assert json.loads(store.path.read_text())["arbiter"]["budget"] == 3


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o666])
def test_a_statefile_that_others_may_write_is_refused(store, state_of, mode):
    """It names commands that the arbiter runs; the message has the mode and the remedy."""
    store.write(state_of("n"))
    store.path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o} lets other users write it; run: chmod go-w"):
        store.read()


def test_a_state_folder_that_others_may_write_is_refused_by_every_reader_and_writer(store, state_of):
    """Else they could put a file of their own into it."""
    store.write(state_of("n"))
    store.path.parent.chmod(0o777)
    for attempt in (store.read, store.refuse_running, lambda: store.write(state_of("n"))):
        with pytest.raises(ConfigError, match="chmod go-w"):
            attempt()


def test_what_another_user_owns_is_refused(store, state_of, monkeypatch):
    """The owner is named with the remedy."""
    store.write(state_of("n"))
    mine = os.geteuid()
    monkeypatch.setattr(store_module.os, "geteuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {mine}, not to user {mine + 1}"):
        store.read()


def test_a_link_in_the_place_of_a_statefile_is_not_followed(store, state_of, tmp_path):
    """A link could name a file that another program writes."""
    other = tmp_path / "other.json"
    other.write_text("{}")
    store.path.symlink_to(other)
    with pytest.raises(ConfigError, match="cannot be read"):
        store.read()


def test_new_folders_are_for_the_owner_alone(tmp_path):
    """Missing parents too, whatever the umask."""
    before = os.umask(0)
    try:
        store_module.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("length", [10, 200])
def test_the_sockets_lie_in_a_folder_of_the_owner_on_a_path_that_fits(tmp_path, length, monkeypatch):
    """Alongside the statefile, or among the temporary files where that path would exceed 107 bytes."""
    monkeypatch.setattr(store_module.tempfile, "tempdir", "/tmp")
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    endpoints = store_module.make_endpoints(folder / "n.json", 7)
    made = Path(endpoints[0].removeprefix("ipc://")).parent
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    for endpoint in endpoints:
        assert len(endpoint.removeprefix("ipc://")) <= store_module.SOCKET_PATH_BYTES
    store_module.remove_endpoints(endpoints[0])
    assert not made.exists()


def test_a_machine_without_a_short_path_is_told_so(tmp_path, monkeypatch):
    """The message has the bound and the variables that move the folder."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(store_module.tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="at most 107; set TMPDIR or PENSTOCK_LOCAL_STATE_DIR"):
        store_module.make_endpoints(long / "n.json", 7)
    assert list(long.iterdir()) == []
