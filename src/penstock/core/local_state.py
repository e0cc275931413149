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


def state_dir() -> Path:
    """Return the folder of all statefiles: ``$PENSTOCK_LOCAL_STATE_DIR`` or ``~/.penstock/state``."""
    configured = os.environ.get(STATE_DIR_VARIABLE)
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".penstock" / "state"
