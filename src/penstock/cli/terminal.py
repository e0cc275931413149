"""What several commands print, and where: a terminal wraps tables at its width, a pipe gets whole lines."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console

PIPED_WIDTH: Final = 1000
"""Columns where nothing is known of a terminal. Chosen: longer than any line, so that none is wrapped or cut."""


def printer() -> Console:
    """Return a console on stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def tensorboard_hint(log_dir: Path | str) -> str:
    """Return the command that serves a planner's dashboard, and where it is arranged.

    TensorBoard opens on *Time series*, whatever the log says; only the fragment of the URL chooses the tab.
    """
    return f"tensorboard --logdir {log_dir}  # open http://localhost:6006/#custom_scalars"
