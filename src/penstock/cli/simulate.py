"""`penstock simulate`: any policy, any trace, any number of workers, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.cli import fields, option
from penstock.cli.terminal import printer
<<<<<<< HEAD
from penstock.core.errors import ConfigError
from penstock.planner.decide.registry import policy_names
from penstock.simulator.faults import BudgetChange, Fault, FaultPeriod, Faults
=======
from penstock.simulator.options import SimulateOptions
>>>>>>> h/cli
from penstock.simulator.output import open_directory, to_json, write
from penstock.simulator.plan import RunPlan, make_plan, record, run_plan
from penstock.simulator.text import scoreboard


@click.command()
<<<<<<< HEAD
@click.option(
    "--trace",
    default="mooncake",
    show_default=True,
    help="A trace file (Mooncake JSONL or Azure CSV), the packaged `mooncake`, or a synthetic process: "
    "poisson|gamma|bursts|constant|sine|step|ramp|stairs|day with :KEY=VALUE,… as poisson:rate=4,count=2000,input_tokens=2048,share=0.5.",
)
@click.option(
    "--policy",
    metavar="all|NAME[,NAME…]",
    help="Router policies to compare, by their names in a manifest."
    "  [default: all; with several planners least-loaded, or the manifest's]",
)
@click.option(
    "--qps",
    callback=_numbers,
    metavar="RPS[,RPS…]",
    help="Mean rates to try, requests/s.  [default: the trace's]",
)
@click.option(
    "--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs of each, with seeds 0, 1, …"
)
@click.option(
    "--prefill", type=click.IntRange(1), help="Prefill workers at time 0.  [default: 4, or the manifest's]"
)
@click.option(
    "--decode", type=click.IntRange(1), help="Decode workers at time 0.  [default: 4, or the manifest's]"
)
@click.option(
    "--aggregated",
    type=click.IntRange(1),
    help="Aggregated workers instead.  [default: prefill and decode workers]",
)
@click.option(
    "--profile",
    help="Latency profile, or dualmap-7b|dualmap-14b: the artefact's prefill-only server, aggregated."
    "  [default: a100-llama-8b-bf16-tp1, or the manifest's]",
)
@click.option(
    "--kv-tokens", type=click.IntRange(1), help="KV capacity of one worker, tokens.  [default: the profile's]"
)
@click.option(
    "--block-size",
    type=click.IntRange(1, 512),
    default=128,
    show_default=True,
    help="Tokens per KV block; divides 512.",
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Take workers, profile, router and planner from a graph.",
)
@click.option(
    "--planner",
    "planners",
    is_flag=False,
    flag_value=DEFAULT_PLANNER,
    callback=_names,
    metavar="[all|NAME[,NAME…]]",
    help="Let the planner scale, with the manifest's rules or the defaults; with names, compare planners: "
    f"{', '.join(policy_names())}.  [default: nothing scales]",
)
@click.option(
    "--max-gpus",
    type=click.IntRange(1),
    help="GPU budget, never exceeded.  [default: the planner's, else none]",
)
@click.option(
    "--cold-start-s",
    type=float,
    default=30.0,
    show_default=True,
    help="From asking for a replica until it serves, virtual seconds.",
)
@click.option(
    "--resize", "resizes", multiple=True, metavar="S:ROLE=N", help="Set a pool's size at a time; repeatable."
)
@click.option(
    "--fail",
    "failures",
    multiple=True,
    metavar="S[-BACK]:WORKER",
    help="Kill a worker, and bring it back; repeatable.",
)
@click.option(
    "--fault",
    "periods",
    multiple=True,
    metavar="KIND:FROM-TO",
    help=f"Let something go wrong for a while: {', '.join(kind.value for kind in Fault)}; repeatable.",
)
@click.option(
    "--restart",
    "restarts",
    type=float,
    multiple=True,
    metavar="S",
    help="Replace the planner's process at this time, seconds; repeatable.  [default: never]",
)
@click.option(
    "--budget-change",
    "budget",
    multiple=True,
    metavar="S=N",
    help="Change the GPU budget at a time; repeatable.",
)
@click.option(
    "--node-gpus",
    type=click.IntRange(1),
    help="GPUs of all nodes; replicas beyond them cannot be placed.  [default: enough]",
)
@click.option(
    "--slo-s",
    type=float,
    help="TTFT that counts as in time, virtual seconds.  [default: 5, or the manifest's]",
)
@click.option(
    "--itl-slo-s",
    type=click.FloatRange(0, min_open=True),
    help="Mean gap between a request's tokens that counts as in time, virtual seconds.  [default: any]",
)
@click.option(
    "--tiers",
    metavar="TIER=WEIGHT[,...]",
    help="Let requests ask for priority tiers in these proportions, as premium=20,standard=50,background=30; the manifest "
    "says what the router makes of them.  [default: they ask for none]",
)
@click.option(
    "--propagation-delay-s",
    type=float,
    default=0.0,
    show_default=True,
    help="Age of what routers know beyond what they sent themselves, virtual seconds.",
)
@click.option(
    "--routers",
    callback=_counts,
    metavar="N[,N…]",
    default="1",
    show_default=True,
    help="Routers side by side; each knows its peers' requests only as they propagate. Several numbers are compared.",
)
@click.option(
    "--owners",
    type=click.IntRange(0),
    help="Of those, the routers that keep the workers' queues, each some of them, and to which the others pass requests "
    "on; live as many as the routers' processors call for. 0: each keeps queues of its own.  [default: 1, or 0 where the "
    "manifest says router.peers.forward: false]",
)
@click.option(
    "--queue-order",
    type=option.choice(QueueOrder),
    help="Of each worker's queue in the router.  [default: in-time-first, or the manifest's]",
)
@click.option("--no-rebalance", is_flag=True, help="Turn off moving queued requests (dualmap).")
@click.option(
    "--slot-tokens",
    type=click.IntRange(1),
    help="Prompt tokens handed to one worker at a time; a longer prompt goes alone.  [default: 8192, or the manifest's]",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(1),
    help="Requests that may wait in the router; more are rejected.  [default: no bound]",
)
@click.option(
    "--max-wait-s", type=float, help="Longest wait in the router, virtual seconds.  [default: no bound]"
)
=======
@fields.options(SimulateOptions)
>>>>>>> h/cli
@option.admission(without=("retry_after_seconds",))
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for JSON, pictures and page.  [default: nothing is written]",
)
@option.as_json("Print the result as JSON, without progress.")
def simulate(output_dir: Path | None, jobs: int | None, as_json: bool, **options: Any) -> None:
    """Replay a workload in virtual time and score router policies and the planner.

    The engines, policies and planner rules are those that run live. Same options, same output, byte for byte.
    """
    admission = option.given_admission(options)
    plan = make_plan(fields.take(SimulateOptions, options, admission=admission))
    if output_dir is not None:
        open_directory(output_dir)
    result = _run(plan, jobs, is_quiet=as_json)
    files: list[Path] = []
    if output_dir is not None:
        files = write(result, record(plan), output_dir)
    if as_json:
        click.echo(to_json(result), nl=False)
        return
    printer().print(scoreboard(result))
    for path in files:
        click.echo(f"wrote {path}")


def _run(plan: RunPlan, jobs: int | None, *, is_quiet: bool) -> dict[str, Any]:
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        return run_plan(plan, processes=jobs)
    with Progress(
        TextColumn("runs"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("runs", total=len(plan.runs))
        return run_plan(plan, processes=jobs, on_done=lambda done: progress.update(task, completed=done))
