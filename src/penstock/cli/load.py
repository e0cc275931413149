"""`penstock load`: replay a trace against a live server and say what it did."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from penstock.cli import fields, option
from penstock.cli.say import say_json
from penstock.cli.terminal import Terminal, table
from penstock.core.errors import PenstockError
from penstock.core.http.loop import run
from penstock.report.text import load_summary, percent, seconds
from penstock.workload.record import RequestStatus
from penstock.workload.replay import Replayer, Snapshot
from penstock.workload.session import LoadConfig, LoadPlan, describe_plan, plan_load, run_load
from penstock.workload.statistics import percentiles


@click.command()
@fields.options(LoadConfig)
@click.option(
    "--dry-run", is_flag=True, help="Read and filter the trace, report what would be sent, and send nothing."
)
@option.as_json("Print the summary as JSON, without a progress bar.")
def load(dry_run: bool, as_json: bool, **options: Any) -> None:
    """Replay a trace against a running graph, or any OpenAI server that streams usage.

    Requests are sent at the trace's own times (an open loop) with prompts made from its hash ids.
    All times printed are simulated seconds. Ctrl-C stops sending and prints what was measured so far.
    """
    plan = plan_load(fields.take(LoadConfig, options))
    if dry_run:
        say_json({"dry_run": True, **describe_plan(plan)})
        return
    summary = _run(plan, is_quiet=as_json)
    if as_json:
        say_json(summary)
    else:
        Terminal().print(load_summary(summary))
    if summary["is_partial"] or summary["requests"]["ok"] == 0:
        sys.exit(1)


def _run(plan: LoadPlan, *, is_quiet: bool) -> dict[str, Any]:
    async def main(stop: asyncio.Event) -> dict[str, Any]:
        async with asyncio.TaskGroup() as group:
            watchers: list[asyncio.Task[None]] = []

            def watch(replayer: Replayer) -> None:
                if not is_quiet:
                    watchers.append(group.create_task(show_progress(replayer)))

            summary = await run_load(plan, stop=stop, on_start=watch)
            for watcher in watchers:
                watcher.cancel()
        return summary

    try:
        return run(main)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    except asyncio.CancelledError as exc:
        raise PenstockError(
            "stopped by a second signal; results so far are in --output-dir, without a summary"
        ) from exc


_PERIOD_S = 0.25
"""Chosen: real seconds; smooth enough to watch, and a thousandth of a core."""


async def show_progress(replayer: Replayer) -> None:
    """Draw until cancelled; without a terminal, draw nothing."""
    console = Terminal(stderr=True)
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
    rows = []
    for tier, progress in seen.tiers.items():
        ends, ended = progress.ends, progress.ends.total()
        p50, p99 = percentiles(progress.ttfts_s, 50, 99) if progress.ttfts_s else (None, None)
        counts = (
            progress.sent,
            *(ends[each] for each in (RequestStatus.OK, RequestStatus.REJECTED, RequestStatus.FAILED)),
        )
        served = percent(ends[RequestStatus.OK] / ended if ended else None)
        rows.append((tier.value, *map(str, counts), served, seconds(p50), seconds(p99)))
    headings = ("tier", "sent", "ok", "rejected", "failed", "served", "TTFT p50", "p99")
    return table(headings, rows, justify="right")
