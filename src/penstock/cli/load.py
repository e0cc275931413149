"""`penstock load`: replay a trace against a live server and say what it did."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console

from penstock.cli import option
from penstock.cli.load_progress import show_progress
from penstock.core.errors import PenstockError
from penstock.core.http.loop import run
from penstock.report.text import load_summary
from penstock.workload.arrivals import Spread
from penstock.workload.exchange import TIER_HEADER, TargetEndpoint
from penstock.workload.overload import parse_overload
from penstock.workload.replay import Replayer
from penstock.workload.selection import OnLong, Selection
from penstock.workload.session import LoadConfig, LoadPlan, describe_plan, plan_load, run_load
from penstock.workload.tier_mix import parse_mix
from penstock.workload.traces import OnBadRow


@click.command()
@click.option(
    "--trace", required=True, help="A trace file (Mooncake JSONL or Azure CSV), or the built-in `mooncake`."
)
@click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the router or server."
)
@option.speed(more="; give the servers' own")
@click.option("--model", help="Model to ask for.  [default: the first that the server lists]")
@click.option(
    "--endpoint",
    type=option.choice(TargetEndpoint),
    default="completions",
    show_default=True,
    help="OpenAI endpoint; on chat the server's template adds prompt tokens.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for results.jsonl and summary.json.  [default: nothing is written]",
)
@click.option(
    "--start-s",
    type=float,
    default=0.0,
    show_default=True,
    help="Begin of the window, seconds into the trace.",
)
@click.option(
    "--duration-s", type=float, help="Length of the window, seconds of the trace.  [default: to its end]"
)
@click.option(
    "--sample",
    type=float,
    default=1.0,
    show_default=True,
    metavar="FRACTION",
    help="Share of the requests that is kept, above 0 and at most 1.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of sampling, Poisson spreading and prompt texts."
)
@click.option(
    "--on-bad-row",
    type=option.choice(OnBadRow),
    default="refuse",
    show_default=True,
    help="What to do with rows that cannot be read; skipped ones are listed in the summary.",
)
@option.trace_shape(
    limit="Most requests, after all other choices.", on_long=None, spread="even for Mooncake, none for Azure"
)
@click.option(
    "--rate",
    "rate_rps",
    type=float,
    metavar="RPS",
    help="Mean arrivals per simulated second, by stretching time.  [default: the trace's]",
)
@click.option("--rate-scale", type=float, help="Factor on the arrival rate, instead of --rate.  [default: 1]")
@click.option(
    "--overload",
    metavar="FACTOR",
    help="Offer this multiple of the server's capacity, as 3x: first a closed loop of the same requests measures how "
    "many it answers per second, then the trace is replayed at the factor times that rate.  [default: the trace's rate]",
)
@click.option(
    "--capacity-concurrency",
    type=click.IntRange(1, 10_000),
    default=128,
    show_default=True,
    help="Requests in flight while --overload measures the capacity; four times as many are sent.",
)
@click.option(
    "--tiers",
    metavar="TIER=WEIGHT[,...]",
    help="Let requests ask for priority tiers in these proportions, as premium=20,standard=50,background=30.  "
    "[default: they ask for none]",
)
@click.option(
    "--tier-header", default=TIER_HEADER, show_default=True, help="Header in which they ask; the router's."
)
@click.option(
    "--concurrency", type=int, help="Most requests in flight; closes the loop.  [default: open loop]"
)
@click.option(
    "--timeout-s", type=float, default=600.0, show_default=True, help="Longest request, simulated seconds."
)
@option.secret(
    "api-key", "PENSTOCK_API_KEY", "File with the bearer token, which is never written to another."
)
@option.secret(
    "admin-key",
    "PENSTOCK_ADMIN_KEY",
    "File with the router's admin key, where it has one: with it the workers' own lag is measured too.",
)
@click.option(
    "--no-itl",
    is_flag=True,
    help="Leave the inter-token gaps out of results.jsonl; the summary keeps their percentiles.",
)
@click.option(
    "--dry-run", is_flag=True, help="Read and shape the trace, say what would be sent, and send nothing."
)
@option.as_json("Print the summary as JSON, without a progress bar.")
def load(**options: Any) -> None:
    """Replay a trace against a running graph, or any OpenAI server that streams usage.

    Requests are sent at the trace's own times (an open loop) with prompts made from its hash ids.
    All times printed are simulated seconds. Ctrl-C stops sending and prints what was measured so far.
    """
    dry_run, as_json = options.pop("dry_run"), options.pop("as_json")
    plan = plan_load(_config(options))
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


def _config(options: dict[str, Any]) -> LoadConfig:
    on_long, spread = options.pop("on_long"), options.pop("spread")
    selection = Selection(
        start_s=options.pop("start_s"),
        duration_s=options.pop("duration_s"),
        sample=options.pop("sample"),
        max_input_tokens=options.pop("max_input_tokens"),
        on_long=None if on_long is None else OnLong(on_long),
        limit=options.pop("limit"),
    )
    overload, tiers = options.pop("overload"), options.pop("tiers")
    return LoadConfig(
        overload=None if overload is None else parse_overload(overload),
        tiers=None if tiers is None else parse_mix(tiers),
        selection=selection,
        spread=None if spread is None else Spread(spread),
        endpoint=TargetEndpoint(options.pop("endpoint")),
        on_bad_row=OnBadRow(options.pop("on_bad_row")),
        with_gaps=not options.pop("no_itl"),
        **options,
    )


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
    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
