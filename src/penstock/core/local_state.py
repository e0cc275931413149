"""Words of the local backend's state folder that more than one package reads: where it lies, what a file says."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Final

STATE_DIR_VARIABLE: Final = "PENSTOCK_LOCAL_STATE_DIR"

ARBITER_KEY: Final = "arbiter"
"""The one top-level key of a statefile that is not a process entry."""


PLANNER_STATE_FILE: Final = "state.json"
"""In the planner's log folder: what it does now and what it changed last."""


class EntryState(StrEnum):
    """Where one process stands; the arbiter's supervisor moves it on."""

    REQUESTED = "requested"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


EMPTY_STATES: Final = frozenset({EntryState.FAILED, EntryState.STOPPED})
"""States without a process and without GPUs; their names are free for the next replica."""


FULL_BYTES: Final = 1 << 20
"""Room below which a disk counts as full. Chosen: a statefile and a few decisions."""


def full_disk(folder: Path | str) -> str | None:
    """Return as text that a folder's disk has no room for what is written there; None: it has, or cannot be asked."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    if disk.f_bavail * disk.f_frsize < FULL_BYTES:
        return f"the disk of {folder} is full: {disk.f_bavail * disk.f_frsize:,} bytes are free"
    if disk.f_files and not disk.f_favail:
        return f"the disk of {folder} is full: it has no inode left"
    return None


def state_dir() -> Path:
    """Return the folder of all statefiles: ``$PENSTOCK_LOCAL_STATE_DIR`` or ``~/.penstock/state``."""
    configured = os.environ.get(STATE_DIR_VARIABLE)
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".penstock" / "state"


def make_private(path: Path) -> None:
    """Make a folder, and parents that are missing, for this user alone."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
