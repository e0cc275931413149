"""`penstock capacity`: replicas, GPUs and cost of a load under targets, from a profile."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import Any

import click

from penstock.cli import fields, option
from penstock.cli.completion import PROFILE
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, table
from penstock.core.errors import ConfigError
from penstock.performance.capacity import (
    CapacityPlan,
    OfferedLoad,
    UnreachableError,
    plan_capacity,
    router_cores,
)
from penstock.performance.quality import sweep_warnings
from penstock.performance.recommend import Targets
from penstock.performance.sweep import Sweep
from penstock.profiler.files import read_sweep


@click.command()
@click.option(
    "--profile",
    "sources",
    multiple=True,
    required=True,
    metavar="PATH",
    shell_complete=PROFILE,
    help="Output of `penstock profile` or of Dynamo's profiler, or the name of a latency profile that "
    "`penstock engine profiles` lists. Repeat it to compare engine sizes of one model.",
)
@fields.options(Targets)
@fields.options(OfferedLoad)
@click.option(
    "--aggregated", is_flag=True, help="Plan one pool that both prefills and decodes.  [default: as profiled]"
)
@click.option("--max-gpus", type=click.IntRange(1), help="GPUs available.  [default: any number]")
@click.option(
    "--gpu-hour-price",
    type=click.FloatRange(0, min_open=True),
    help="Price of one GPU-hour, in any currency.  [default: no cost is shown]",
)
@option.as_json("Print JSON.")
def capacity(sources: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Plan how many replicas of which engine size serve a load within targets, and report what limits them.

    Waiting times are included: bursts of arrivals queue for prefill, and at times more requests than the mean
    decode at once.
    """
    sweep = _sweep(sources, is_aggregated=options["aggregated"])
    targets, load = fields.take(Targets, options), fields.take(OfferedLoad, options)
    plan: CapacityPlan | None = None
    try:
        plan = plan_capacity(sweep, targets, load)
        miss = _over_budget(plan, options["max_gpus"])
    except UnreachableError as exc:
        miss = str(exc)
    price, cores = options["gpu_hour_price"], router_cores(load.rps, targets.osl)
    routers = {"cores": cores, "replicas": math.ceil(2 * cores)}
    if as_json:
        say_json({**_plain(plan, miss, price), "routers": routers})
    else:
        if plan is not None:
            _print(plan, price)
        if miss is not None:
            say(f"penstock: {miss}", err=True)
        say(f"routers: {routers['replicas']}, which keep {cores:.2f} cores busy")
    if miss is not None:
        sys.exit(1)


def _sweep(sources: tuple[str, ...], *, is_aggregated: bool) -> Sweep:
    sweeps = [read_sweep(source) for source in sources]
    engines = sorted((engine for sweep in sweeps for engine in sweep.engines), key=lambda each: each.gpus)
    sizes = [engine.gpus for engine in engines]
    if len(set(sizes)) != len(sizes):
        raise ConfigError(
            f"--profile: the sizes are {', '.join(map(str, sizes))}; give each engine size once"
        )
    models = sorted({sweep.model for sweep in sweeps})
    if len(models) > 1:
        raise ConfigError(
            f"--profile: profiles of {len(models)} models ({', '.join(models)}); give profiles of one model"
        )
    sweep = Sweep(tuple(engines), models[0], is_aggregated or sweeps[0].is_aggregated)
    for warning in sweep_warnings(sweep):
        say(f"warning: {warning}", err=True)
    return sweep


def _over_budget(plan: CapacityPlan, most: int | None) -> str | None:
    if most is None or plan.gpus <= most:
        return None
    return (
        f"the load needs {plan.gpus} GPUs, {plan.gpus - most} more than --max-gpus {most}: prefill is "
        f"bound by {plan.prefill.binds}, decode by {plan.decode.binds}; raise it, lower --rps, or "
        "allow more --ttft-slo or --itl-slo"
    )


def _plain(plan: CapacityPlan | None, miss: str | None, price: float | None) -> dict[str, Any]:
    return {
        "plan": None if plan is None else {**asdict(plan), "gpus": plan.gpus},
        "cost_per_hour": None if plan is None or price is None else plan.gpus * price,
        "miss": miss,
    }


def _print(plan: CapacityPlan, price: float | None) -> None:
    pools = [("prefill", "TTFT", plan.prefill), ("decode", "ITL", plan.decode)]
    if plan.is_aggregated:
        pools = [("aggregated", "TTFT", plan.prefill)]
    rows = [
        (
            role,
            str(pool.gpus),
            str(pool.replicas),
            f"{what} {pool.latency_s * 1000:.1f} ms",
            f"{pool.utilisation:.0%}",
            pool.binds,
        )
        for role, what, pool in pools
    ]
    Terminal().print(table(("role", "TP", "replicas", "expected", "in use", "bound by"), rows))
    cost = f", {plan.gpus * price:,.2f} an hour" if price is not None else ""
    say(f"{plan.gpus} GPUs{cost}")
