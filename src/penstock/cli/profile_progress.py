"""The progress bar of a profile, on stderr; without a terminal, a line per step."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.profiler.session import Step


class ProfileProgress:
    """Shows each step; a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def show(self, step: Step) -> None:
        """Draw one step."""
        self._progress.update(self._task, completed=step.finished, total=step.planned, description=step.doing)
        if not self._console.is_terminal:
            self._console.print(f"{step.finished}/{step.planned} {step.doing}", highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()
