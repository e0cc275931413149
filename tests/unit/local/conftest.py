"""Fixtures of the local backend's tests: statefiles, entries, and a state folder of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from patience import eventually

from penstock.local.statefile import ProcessEntry, StateFile

sys.path.insert(0, str(Path(__file__).parent))

from states import SLEEP, make_entry, make_state


@pytest.fixture
def state_of() -> Callable[..., StateFile]:
    """Return `make_state`."""
    return make_state


@pytest.fixture
def entry_of() -> Callable[..., ProcessEntry]:
    """Return `make_entry`."""
    return make_entry


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep every statefile of a test in the test's own folder."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(folder))
    return folder


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Yield a function that starts a program in a group of its own; what is left of the groups is killed."""
    started = []

    def start(code: str = SLEEP, **env: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code]
        variables = {**os.environ, **env}
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        # A program is seen a moment before the kernel shows its variables.
        eventually(psutil.Process(process.pid).environ)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., object]:
    """Return `eventually`."""
    return eventually
