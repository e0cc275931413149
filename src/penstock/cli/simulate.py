"""`penstock simulate`: any policy, any trace, any number of workers, in virtual time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from penstock.cli import fields, option
from penstock.cli.progress import counting, working
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, printer
from penstock.cli.yaml_text import as_yaml
from penstock.core.errors import ConfigError
from penstock.core.flags import flag_of, flags
from penstock.simulator.cells import CellJournal
from penstock.simulator.indexed_job import JobOptions, SweepJob, inputs_of
from penstock.simulator.output import open_directory, scoreboard, to_json, write
from penstock.simulator.plan import DEFAULT_TRACE, RunPlan, SimulateOptions, make_plan, record, run_plan
from penstock.simulator.pool import PoolSimulation
from penstock.simulator.pool_output import write_pool
from penstock.simulator.pool_plan import PoolPlan, make_pool_plan, pool_result, pool_table
from penstock.simulator.shards import Shard, run_shard

_ARGUMENTS = "penstock.simulate.arguments"


class _Remembers(click.Command):
    """Keeps its arguments, of which --render-job makes those of a pod."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep them as they were given."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Remembers)
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
@fields.options(JobOptions)
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
    admission = option.given_admission(options)
    manifests, traces = options["manifest"], options["trace"]
    if pool is None:
        _check_one("--manifest", manifests)
        _check_one("--trace", traces)
    options["manifest"] = next(iter(manifests), None)
    options["trace"] = next(iter(traces), DEFAULT_TRACE)
    chosen = fields.take(SimulateOptions, options, admission=admission)
    job = fields.take(JobOptions, options)
    if job.render_job is not None or job.shard is not None:
        _refuse_given(job, {"--pool": pool, "--on": on})
        _simulate_shards(job, chosen, output_dir, processes=jobs, as_json=as_json)
        return
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


def _refuse_given(job: JobOptions, given: Mapping[str, object]) -> None:
    own = "--render-job" if job.shard is None else "--shard"
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{own}: excludes {name} {value}; remove one")


def _simulate_shards(
    job: JobOptions, chosen: SimulateOptions, output_dir: Path | None, *, processes: int | None, as_json: bool
) -> None:
    if job.render_job is None:
        assert job.shard is not None  # noqa: S101 - one of the two
        _run_one(make_plan(chosen), job.shard, output_dir, processes=processes, as_json=as_json)
        return
    _refuse_given(replace(job, shard=None), {"--shard": job.shard, "--output-dir": output_dir})
    made = _job(job, chosen, processes=processes or 1)
    if as_json:
        say_json(made.objects())
    else:
        say(as_yaml(made.objects()), nl=False)


def _run_one(
    plan: RunPlan, shard: Shard, output_dir: Path | None, *, processes: int | None, as_json: bool
) -> None:
    if output_dir is None:
        raise ConfigError("--shard: needs --output-dir, the folder that all shards share; add it")
    with counting("runs", len(plan.runs[shard.index :: shard.count]), is_quiet=as_json) as on_done:
        result, done = run_shard(plan, shard, output_dir, processes=processes, on_done=on_done)
    if result is None:
        say(f"{done} of {len(plan.runs)} runs are done", err=as_json)
    elif as_json:
        say_json(to_json(result))
    else:
        printer().print(scoreboard(result))


def _job(job: JobOptions, chosen: SimulateOptions, *, processes: int) -> SweepJob:
    assert job.render_job is not None  # noqa: S101 - the caller asked
    plan = make_plan(chosen)
    arguments = click.get_current_context().meta[_ARGUMENTS]
    names = [*([] if chosen.manifest is None else [str(chosen.manifest)]), *inputs_of(plan)]
    made = SweepJob(
        name=job.render_job,
        claim=job.claim or job.render_job,
        image=job.image,
        pods=job.pods,
        runs=len(plan.runs),
        processes=processes,
        arguments=_without(arguments, {*map(flag_of, flags(JobOptions)), "--jobs", "--json"}),
        files={name: _content(name) for name in dict.fromkeys(names) if Path(name).is_file()},
    )
    for path in made.large:
        say(
            f"{path}: {len(made.files[path]) / 1000000.0:.1f} MB, too large for a ConfigMap; copy it "
            f"to {made.name}/{path} on claim {made.claim} first",
            err=True,
        )
    return made


def _content(name: str) -> bytes:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(
            f"--render-job: {name} must have the same relative path in a pod; run this command in the "
            "file's folder, and give only its name"
        )
    return Path(name).read_bytes()


def _without(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Return arguments without options of these names and their values."""
    left, rest = [], iter(arguments)
    for each in rest:
        name, equals, _ = each.partition("=")
        if name not in names:
            left.append(each)
        elif not equals and name != "--json":
            next(rest)
    return left


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
