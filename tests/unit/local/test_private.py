"""Local state belongs to one user: foreign owners and modes are refused, sockets lie where nobody else gets."""

import os
import stat
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.local import private
from penstock.local.store import StateStore


@pytest.fixture
def store(state_folder):
    """Return the store of namespace n in the test's folder."""
    return StateStore.of("n")


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
    monkeypatch.setattr(private.os, "geteuid", lambda: mine + 1)
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
        private.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("length", [10, 200])
def test_the_sockets_lie_in_a_folder_of_the_owner_on_a_path_that_fits(tmp_path, length, monkeypatch):
    """Beside the statefile, or among the temporary files where that path would exceed 107 bytes."""
    monkeypatch.setattr(private.tempfile, "tempdir", "/tmp")
    folder = tmp_path / ("x" * length)
    folder.mkdir()
    endpoints = private.make_endpoints(folder / "n.json", 7)
    made = Path(endpoints[0].removeprefix("ipc://")).parent
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    for endpoint in endpoints:
        assert len(endpoint.removeprefix("ipc://")) <= private.SOCKET_PATH_BYTES
    private.remove_endpoints(endpoints[0])
    assert not made.exists()


def test_a_machine_without_a_short_path_is_told_so(tmp_path, monkeypatch):
    """The message has the bound and the variables that move the folder."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(private.tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="at most 107; set TMPDIR or PENSTOCK_LOCAL_STATE_DIR"):
        private.make_endpoints(long / "n.json", 7)
    assert list(long.iterdir()) == []
