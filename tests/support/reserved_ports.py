"""Ports for processes that have to be told theirs: free, and nobody else's until the tests' process ends.

A server in the tests' own process listens on port 0 instead. Ports of this module are below the local backend's range
for workers and below the system's range for outgoing connections. A lock on a file keeps each from other test processes.
"""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
from pathlib import Path
from typing import Final

from penstock.local.ports import is_free

FIRST_PORT: Final = 10_000
LAST_PORT: Final = 20_999
_FOLDER = Path(tempfile.gettempdir()) / f"penstock-test-ports-{os.getuid()}"
_held: dict[int, int] = {}
"""File descriptors by port; the system releases the locks when this process ends."""


def reserved_port() -> int:
    """Return a free port of loopback that no other test gets."""
    _FOLDER.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT + 1), 1000):
        if port not in _held and is_free(port) and _is_locked(port):
            return port
    raise AssertionError(f"no free port in {FIRST_PORT}-{LAST_PORT}: tests left servers behind?")


def _is_locked(port: int) -> bool:
    descriptor = os.open(_FOLDER / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _held[port] = descriptor
    return True
