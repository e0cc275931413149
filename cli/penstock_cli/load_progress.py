"""The progress bar of a replay, on stderr; drawn four times a second, by no thread of its own."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from penstock_workload.replay import Replayer, Snapshot

_PERIOD_S = 0.25
"""Chosen: real seconds; smooth enough to watch, and a thousandth of a core."""


async def show_progress(replayer: Replayer) -> None:
    """Draw until cancelled; without a terminal, draw nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    progress = Progress(
        TextColumn("{task.fields[clock]}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        console=console,
        auto_refresh=False,
        expand=True,
    )
    task = progress.add_task("replay", total=replayer.snapshot().planned)
    with progress:
        try:
            while True:
                _draw(progress, task, replayer.snapshot())
                await asyncio.sleep(_PERIOD_S)
        finally:
            _draw(progress, task, replayer.snapshot())


def _draw(progress: Progress, task: TaskID, seen: Snapshot) -> None:
    ttft = "-" if seen.ttft_p50_s is None else f"{seen.ttft_p50_s:.2f} s"
    progress.update(
        task,
        total=seen.planned,
        completed=seen.ok + seen.failed + seen.rejected,
        clock=f"{seen.elapsed_s:6.0f} s",
        counts=(
            f"[green]{seen.ok} ok[/] [red]{seen.failed} failed[/] [yellow]{seen.rejected} rejected[/]"
            f" {seen.in_flight} in flight, TTFT p50 {ttft}"
        ),
        refresh=True,
    )
