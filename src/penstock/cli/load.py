"""`penstock load`: replay a trace against a live server and say what it did."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click
from rich.console import Console

from penstock.cli import fields, option
from penstock.cli.load_progress import show_progress
from penstock.core.errors import PenstockError
from penstock.core.http.loop import run
from penstock.report.text import load_summary
from penstock.workload.replay import Replayer
from penstock.workload.session import LoadConfig, LoadPlan, describe_plan, plan_load, run_load


@click.command()
@fields.options(LoadConfig)
@click.option(
    "--dry-run", is_flag=True, help="Read and shape the trace, say what would be sent, and send nothing."
)
@option.as_json("Print the summary as JSON, without a progress bar.")
def load(dry_run: bool, as_json: bool, **options: Any) -> None:
    """Replay a trace against a running graph, or any OpenAI server that streams usage.

    Requests are sent at the trace's own times (an open loop) with prompts made from its hash ids.
    All times printed are simulated seconds. Ctrl-C stops sending and prints what was measured so far.
    """
    plan = plan_load(fields.take(LoadConfig, options))
    if dry_run:
        _print_json({"dry_run": True, **describe_plan(plan)})
        return
    summary = _run(plan, is_quiet=as_json)
    if as_json:
        _print_json(summary)
    else:
        Console().print(load_summary(summary))
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


def _print_json(value: dict[str, Any]) -> None:
    option.echo_json(value)
