"""The first second of `penstock up`, while it still imports and reads manifests: it shares a lock on the state folder.

`penstock down`, which finds nothing else, waits for the process that holds it. The command line imports this first, so it imports
little itself; a killed process lets go of its lock, and there is no file to leave behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from typing import Final

from penstock.core.local_state import make_private, state_dir

WAIT_S: Final = 20.0
"""Real seconds for a start to name its graph. Chosen: importing takes one, ten on a busy machine."""
_POLL_S: Final = 0.1


class StartMarker:
    """Whether this process is about to start a graph; closed once others can find the start by its graph's name."""

    def __init__(self) -> None:
        """Begin; where the folder cannot be made or locked, the start itself says why."""
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            make_private(state_dir())
            self._descriptor = _open()
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Let go of the folder; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def wait(until: Callable[[], bool]) -> None:
    """Wait while a `penstock up` begins and ``until`` is false, at most ``WAIT_S``."""
    deadline_s = time.monotonic() + WAIT_S
    while not until() and _one_begins() and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _one_begins() -> bool:
    try:
        descriptor = _open()
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _open() -> int:
    return os.open(state_dir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
