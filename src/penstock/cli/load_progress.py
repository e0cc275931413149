"""The progress bar of a replay, on stderr; drawn four times a second, by no thread of its own."""

from __future__ import annotations

import asyncio

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from penstock.report.text import percent, seconds
from penstock.workload.record import RequestStatus
from penstock.workload.replay import Replayer, Snapshot
from penstock.workload.statistics import percentiles

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
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                _draw(live, progress, task, replayer.snapshot())
                await asyncio.sleep(_PERIOD_S)
        finally:
            _draw(live, progress, task, replayer.snapshot())


def _draw(live: Live, progress: Progress, task: TaskID, seen: Snapshot) -> None:
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
    )
    live.update(Group(progress, tier_table(seen)) if seen.tiers else progress, refresh=True)


def tier_table(seen: Snapshot) -> Table:
    """Return what became of each tier's requests so far; latencies are of the newest of them."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("tier", "sent", "ok", "rejected", "failed", "served", "TTFT p50", "p99"):
        table.add_column(heading, justify="left" if heading == "tier" else "right")
    for tier, progress in seen.tiers.items():
        ok, ended = progress.ends[RequestStatus.OK], progress.ends.total()
        p50, p99 = percentiles(progress.ttfts_s, 50, 99) if progress.ttfts_s else (None, None)
        table.add_row(
            tier.value,
            str(progress.sent),
            str(ok),
            str(progress.ends[RequestStatus.REJECTED]),
            str(progress.ends[RequestStatus.FAILED]),
            percent(ok / ended if ended else None),
            seconds(p50),
            seconds(p99),
        )
    return table
