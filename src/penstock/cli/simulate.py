"""`penstock simulate`: any policy, any trace, any number of workers, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from penstock.cli import fields, option
from penstock.cli.progress import counting, working
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, printer
from penstock.core.errors import ConfigError
from penstock.simulator.cells import CellJournal
from penstock.simulator.output import open_directory, scoreboard, to_json, write
from penstock.simulator.plan import DEFAULT_TRACE, RunPlan, SimulateOptions, make_plan, record, run_plan
from penstock.simulator.pool import PoolSimulation
from penstock.simulator.pool_output import write_pool
from penstock.simulator.pool_plan import PoolPlan, make_pool_plan, pool_result, pool_table


@click.command()
@fields.options(SimulateOptions, several=("trace", "manifest"))
@click.option(
    "--pool",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="GpuPool that several graphs share; give --manifest and --trace once for each graph.  [default: "
    "one graph alone]",
)
@option.admission(without=("retry_after_seconds",))
@click.option("--jobs", type=click.IntRange(1), help="Number of processes.  [default: one per core]")
@click.option(
    "--on",
    metavar="dask[://HOST:PORT]",
    help="Run on a Dask cluster: a local one on this machine, or the cluster of a scheduler.  [default: "
    "local processes without Dask]",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for JSON, pictures and finished runs; a killed sweep resumes from it.  [default: nothing "
    "is written]",
)
@option.as_json("Print the result as JSON, without progress.")
def simulate(
    pool: Path | None,
    output_dir: Path | None,
    jobs: int | None,
    on: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a workload in virtual time and score router policies and the planner.

    It uses the same engines, policies and planner rules as a live graph. The same options give the same output, byte
    for byte.
    """
    admission = option.admission_options(options)
    manifests, traces = options["manifest"], options["trace"]
    if pool is None:
        _check_one("--manifest", manifests)
        _check_one("--trace", traces)
    options["manifest"] = next(iter(manifests), None)
    options["trace"] = next(iter(traces), DEFAULT_TRACE)
    chosen = fields.take(SimulateOptions, options, admission=admission)
    if pool is not None:
        _simulate_pool(make_pool_plan(chosen, pool, manifests, traces), output_dir, as_json=as_json)
        return
    plan = make_plan(chosen)
    if output_dir is not None:
        open_directory(output_dir)
    journal = None if output_dir is None else CellJournal(output_dir)
    result = _run(plan, is_quiet=as_json, processes=jobs, on=on, journal=journal)
    files: list[Path] = []
    if output_dir is not None:
        files = write(result, record(plan), output_dir)
    if as_json:
        say_json(to_json(result))
        return
    printer().print(scoreboard(result))
    for path in files:
        say(f"wrote {path}")


def _check_one(flag: str, given: Sequence[object]) -> None:
    if len(given) > 1:
        raise ConfigError(f"{flag}: given {len(given)} times; add --pool for several graphs, or give one")


def _simulate_pool(plan: PoolPlan, output_dir: Path | None, *, as_json: bool) -> None:
    if output_dir is not None:
        open_directory(output_dir)
    with working(f"simulating {len(plan.graphs)} graphs of a pool", Terminal(stderr=True, quiet=as_json)):
        run = PoolSimulation(plan.terms, plan.graphs, changes=plan.changes, reclaim_s=plan.reclaim_s).run()
    result = pool_result(plan, run)
    files = [] if output_dir is None else write_pool(result, run, output_dir)
    if as_json:
        say_json(to_json(result))
        return
    printer().print(pool_table(result))
    for path in files:
        say(f"wrote {path}")


def _run(plan: RunPlan, *, is_quiet: bool, **where: Any) -> dict[str, Any]:
    with counting("runs", len(plan.runs), is_quiet=is_quiet) as on_done:
        return run_plan(plan, on_done=on_done, **where)
