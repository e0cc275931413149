"""Conventions of the local backend's state folder that several packages share: its path, file names and states."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Final

STATE_DIR_VARIABLE: Final = "PENSTOCK_LOCAL_STATE_DIR"

ARBITER_KEY: Final = "arbiter"
"""The only top-level key of a statefile that is not a process entry."""


PLANNER_STATE_FILE: Final = "state.json"
"""Name of the file in the planner's log folder with its current activity and its last change."""


class EntryState(StrEnum):
    """State of one process of a local graph, as the process that starts and supervises it (the arbiter) records it.

    Attributes:
        REQUESTED: The process has been requested but not started.
        STARTING: The process has started and is not ready.
        READY: The process is ready.
        DRAINING: The process finishes its requests and gets no new ones.
        FAILED: The process ended with an error or never became ready.
        STOPPED: The process has ended as requested.
    """

    REQUESTED = "requested"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


EMPTY_STATES: Final = frozenset({EntryState.FAILED, EntryState.STOPPED})
"""States without a process and without GPUs; the next replica can reuse such an entry's name."""


def state_dir() -> Path:
    """Return the folder of all statefiles: ``$PENSTOCK_LOCAL_STATE_DIR`` or ``~/.penstock/state``."""
    configured = os.environ.get(STATE_DIR_VARIABLE)
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".penstock" / "state"


def make_private(path: Path) -> None:
    """Create a folder and its missing parents with access for this user only; existing folders are not changed."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
