"""`penstock planner memory`: show, export and reset what a planner learnt, or make it from a trace."""

from __future__ import annotations

from pathlib import Path

import click
import orjson

from penstock.api.manifests import load_graph
from penstock.cli import option
from penstock.cli.planner_folder import LOG_DIR, NAMESPACE, ledger_folder
from penstock.cli.progress import working
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, write_text
from penstock_planner import learnt


@click.group()
def memory() -> None:
    """Show, export or reset what a planner has learnt. `planner run --memory FILE` starts from an export."""


@memory.command()
@LOG_DIR
@NAMESPACE
@option.as_json("Print the JSON that `export` writes.")
def show(log_dir: Path | None, namespace: str | None, *, as_json: bool) -> None:
    """Show what was learnt, by role."""
    known = learnt.learnt(ledger_folder(log_dir, namespace))
    if as_json:
        say_json(learnt.as_json(known))
    else:
        say(learnt.in_words(known))


@memory.command()
@LOG_DIR
@NAMESPACE
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@option.as_json("Print FILE's path and the JSON that was written to it.")
def export(log_dir: Path | None, namespace: str | None, file: Path, *, as_json: bool) -> None:
    """Write what was learnt to FILE, for the planner of another graph of the same model."""
    text = learnt.as_json(learnt.learnt(ledger_folder(log_dir, namespace)))
    write_text(f"FILE {file}", file, text.decode())
    if as_json:
        say_json({"file": str(file), "learnt": orjson.loads(text)})


@memory.command("from-trace")
@click.argument("trace")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Graph whose planner will start from the export.",
)
@click.option(
    "--rate",
    "rate_rps",
    metavar="RPS",
    type=click.FloatRange(min=0, min_open=True),
    help="Mean rate, requests/s.  [default: the trace's]",
)
@click.option(
    "--cold-start-s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Time from requesting a replica until it is ready, seconds.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of requests.  [default: all]")
def from_trace(
    trace: str, file: Path, *, manifest: Path, rate_rps: float | None, cold_start_s: float, limit: int | None
) -> None:
    """Write to FILE what the graph's planner would have learnt from TRACE, as `penstock simulate --trace` reads it.

    Use it for the first hour of a graph that has no ledger yet. The throughput is taken from the latency profile until
    it is observed on the workers.
    """
    from penstock.simulator.warm_start import learnt_from_trace  # noqa: PLC0415 - only where it is used

    graph = load_graph(manifest)
    with working(f"simulating {trace} with the planner of {graph.name}", Terminal(stderr=True)):
        known = learnt_from_trace(graph, trace, rate_rps=rate_rps, cold_start_s=cold_start_s, limit=limit)
    write_text(f"FILE {file}", file, learnt.as_json(known).decode())
    say(learnt.in_words(known))


@memory.command()
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="The planner's log folder, or a ledger file.",
)
def reset(log_dir: Path) -> None:
    """Discard what the planner has learnt, from its next start on; the ledger keeps its history. Stop the planner first."""
    learnt.reset(log_dir)
    say("discarded; the next start begins with nothing learnt")
