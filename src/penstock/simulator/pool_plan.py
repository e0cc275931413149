"""`penstock simulate --pool`: builds the run from the pool's manifest, its graphs' manifests and their traces; reports its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.api import GraphDeployment, pool_entries
from penstock.api.manifests import load_graph, load_pool
from penstock.core.errors import ConfigError
from penstock.gpu_pool.allocator import PoolTerms
from penstock.report.text import percent, seconds
from penstock.simulator.baselines import DEFAULT_PLANNER
from penstock.simulator.observer import Recording
from penstock.simulator.plan import SimulateOptions, make_plan
from penstock.simulator.pool import POOL_TICK_S, PooledGraph, PoolRun, PoolSample
from penstock.simulator.scenario import BudgetChange
from penstock.simulator.scoreboard import known, measures, rounded
from penstock.simulator.simulation import CutDrain
from penstock.simulator.workload import Workload, prepare
from penstock_planner.decide.decision import count_of

SCHEMA: Final = "penstock-pool/1"


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One simulated run of several graphs that share a pool of GPUs.

    Attributes:
        name: Name of the pool.
        terms: Size of the pool and rules for sharing it.
        graphs: Graphs by name.
        workloads: Workload of each graph, by its name.
        notes: Sentences about the workloads for the reader.
        changes: Changes of the pool's GPUs during the run.
        reclaim_s: Simulated seconds after which a drain is cut short if the graph of the draining worker holds more GPUs than its grant;
            None never cuts drains.
    """

    name: str
    terms: PoolTerms
    graphs: Mapping[str, PooledGraph]
    workloads: Mapping[str, Workload]
    notes: tuple[str, ...]
    changes: tuple[BudgetChange, ...] = ()
    reclaim_s: float | None = None


def make_pool_plan(
    options: SimulateOptions, pool_file: Path, manifests: Sequence[Path], traces: Sequence[str]
) -> PoolPlan:
    """Return a run of several graphs that share a pool of GPUs, as the options of `penstock simulate --pool` describe it.

    Args:
        options: Options of the command line, which hold for every graph.
        pool_file: Manifest of the pool.
        manifests: Manifests of the pool's graphs.
        traces: One trace for each manifest, in the same order.

    Raises:
        ConfigError: the numbers of manifests and traces differ, two graphs have the same name, an option asks for several runs or for a
            budget, or the graphs start with more GPUs than the pool has.
        InvalidSpecError: a manifest is invalid, or the pool does not fit its graphs.
    """
    _check(options, manifests, traces)
    pool, graphs = load_pool(pool_file), [load_graph(file, draws=True) for file in manifests]
    names = [graph.name for graph in graphs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--manifest: two graphs are called {twice}; rename one")
    entries = pool_entries(pool, graphs)
    pooled, workloads, notes = {}, {}, []
    for graph, trace in zip(graphs, traces, strict=True):
        made = make_plan(_of_graph(options, trace, graph), graph=graph)
        spec = made.runs[0]
        workload = prepare(spec.workload, seed=0, qps=spec.qps)
        planner = spec.scenario.planner
        assert planner is not None  # noqa: S101 - as asked for
        scenario = replace(
            spec.scenario, planner=replace(planner, max_gpu_budget=None, no_operation=False), max_gpus=None
        )
        entry = entries[graph.name]
        pooled[graph.name] = PooledGraph(
            scenario,
            workload.requests,
            entry.guaranteed_gpus,
            entry.max_gpus_of(pool.written_gpus, graph),
            entry.priority.rank,
        )
        workloads[graph.name] = workload
        notes += [f"{graph.name}: {note}" for note in made.notes]
    start = sum(each.starts_with for each in pooled.values())
    if start > pool.written_gpus:
        raise ConfigError(
            f"--pool: the graphs start with {start} GPUs, {pool.name} has {pool.written_gpus}; lower their replicas"
        )
    return PoolPlan(
        pool.name,
        PoolTerms(pool.written_gpus, pool.spec.hold_seconds, pool.spec.reclaim.order),
        pooled,
        workloads,
        tuple(notes),
        tuple(options.faults.budget),
        pool.spec.reclaim.grace_seconds,
    )


def _check(options: SimulateOptions, manifests: Sequence[Path], traces: Sequence[str]) -> None:
    if not manifests or len(traces) != len(manifests):
        raise ConfigError(
            f"--pool: {len(manifests)} --manifest and {len(traces)} --trace; give each graph's manifest and its trace, in one order"
        )
    if options.max_gpus is not None:
        raise ConfigError("--max-gpus: the pool is the budget; leave it out with --pool")
    several = len(options.rate_rps) > 1 or len(options.routers) > 1 or len(options.planners) > 1
    if several or options.seeds > 1 or "," in (options.policy or ""):
        raise ConfigError(
            "--pool: one run; give one --rate, --seeds, --routers, --planner and --policy at most"
        )


def _of_graph(options: SimulateOptions, trace: str, graph: GraphDeployment) -> SimulateOptions:
    return replace(
        options,
        trace=trace,
        faults=replace(options.faults, budget=()),
        policy=options.policy or graph.spec.router.policy,
        planners=options.planners or (DEFAULT_PLANNER,),
    )


def pool_result(plan: PoolPlan, run: PoolRun) -> dict[str, Any]:
    """Return the figures of each graph and of the GPU pool as plain data, computed from the simulated run ``run`` of ``plan``.

    The keys of the result are ``pool`` (figures of the pool), ``graphs`` (a list with the figures of each graph), ``notes`` and
    ``schema``. The keys of a graph include:
        guaranteed: GPUs that the pool gives to the graph whenever its planner wants them.
        lost: Number of requests that were accepted and failed.
        borrowed_gpu_hours: GPU-hours that the graph held above its guarantee.
        lacked_s: Seconds in which the graph wanted GPUs of its guarantee that it did not hold.
        gave_back: Number of times that the graph's grant was lowered below the GPUs that it wanted.
        cut: Drains that were cut short after the pool's ``reclaim.graceSeconds``: the number of these drains, the number of
            requests on their workers, and how many of these requests failed.
    """
    rows = [_row(name, graph, plan, run) for name, graph in plan.graphs.items()]
    held = [sum(sample.held.values()) for sample in run.samples]
    hours = POOL_TICK_S / 3600
    return {
        "schema": SCHEMA,
        "notes": list(plan.notes),
        "pool": {
            "name": plan.name,
            "gpus": plan.terms.gpus,
            "hold_s": plan.terms.startup_s,
            "held_most": max(held),
            "held_mean": rounded(float(np.mean(held))),
            "gpu_hours": rounded(sum(held) * hours),
            "rejected": sum(row["rejected"] for row in rows),
            "lost": sum(row["lost"] for row in rows),
        },
        "graphs": rows,
    }


def _row(name: str, graph: PooledGraph, plan: PoolPlan, run: PoolRun) -> dict[str, Any]:
    recording, workload = run.recordings[name], plan.workloads[name]
    figures = measures(recording, graph.scenario, warmup=workload.warmup)
    ttft = known(recording.requests.ttft_s)
    rejected = int(recording.requests.is_rejected.sum())
    held = np.array([sample.held[name] for sample in run.samples])
    hours = POOL_TICK_S / 3600
    return {
        "graph": name,
        "workload": workload.name,
        "requests": len(workload.requests),
        "guaranteed": graph.guaranteed,
        "in_time": figures["in_time"],
        "ttft_s": {
            rank: rounded(float(np.quantile(ttft, share))) if ttft.size else None for rank, share in _RANKS
        },
        "rejected": rejected,
        "lost": figures["lost"] - rejected,
        "gpu_hours": rounded(float(held.sum()) * hours),
        "held_most": int(held.max()),
        "borrowed_gpu_hours": rounded(float(np.maximum(0, held - graph.guaranteed).sum()) * hours),
        "lacked_s": sum(POOL_TICK_S for sample in run.samples if _lacks(sample, name, graph.guaranteed)),
        "gave_back": _gave_back(run.samples, name),
        "cut": _cut(run.cuts[name], recording),
        "changes": figures["changes"],
    }


_RANKS: Final = (("p50", 0.5), ("p99", 0.99))


def _cut(cuts: Sequence[CutDrain], recording: Recording) -> dict[str, int]:
    had = sorted({index for each in cuts for index in each.requests})
    lost = len(had) - int(recording.requests.is_ok[had].sum())
    return {"drains": len(cuts), "requests": len(had), "lost": lost}


def _lacks(sample: PoolSample, name: str, guaranteed: int) -> bool:
    return sample.held[name] < min(guaranteed, sample.grants[name].wanted)


def _gave_back(samples: Sequence[PoolSample], name: str) -> int:
    pairs = pairwise(samples)
    grants = ((before.grants[name], after.grants[name]) for before, after in pairs)
    return sum(after.gpus < min(before.gpus, after.wanted) for before, after in grants)


def pool_table(result: Mapping[str, Any]) -> RenderableType:
    """Return the result of `pool_result` as a table for a terminal."""
    table = Table(box=None, padding=(0, 1, 0, 0), caption_justify="left", caption=_CAPTION)
    for place, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in result["graphs"]:
        table.add_row(
            row["graph"],
            percent(row["in_time"]["both"]),
            seconds(row["ttft_s"]["p50"]),
            seconds(row["ttft_s"]["p99"]),
            f"{row['gpu_hours']:.2f}",
            f"{row['borrowed_gpu_hours']:.2f}",
            str(row["held_most"]),
            seconds(row["lacked_s"]),
            str(row["gave_back"]),
            str(row["rejected"]),
            str(row["lost"]),
        )
    pool = result["pool"]
    summary = (
        f"pool {pool['name']}: {pool['gpus']} GPUs, held {pool['held_mean']:.1f} in the mean and {pool['held_most']} at most, "
        f"{pool['gpu_hours']:.2f} GPU-h, {pool['rejected']} requests rejected, {pool['lost']} lost"
    )
    cut = [
        Text(
            f"{row['graph']}: {count_of(row['cut']['drains'], 'drain')} cut by reclaim.graceSeconds, which had "
            f"{count_of(row['cut']['requests'], 'request')}, {row['cut']['lost']} of them lost",
            style="yellow",
        )
        for row in result["graphs"]
        if row["cut"]["drains"]
    ]
    return Group(*(Text(note) for note in result["notes"]), table, Text(summary), *cut)


_COLUMNS: Final = (
    "graph",
    "in time",
    "p50",
    "p99",
    "GPU-h",
    "borrowed",
    "most",
    "lacked",
    "gave back",
    "rejected",
    "lost",
)
_CAPTION: Final = (
    "in time: TTFT and the gap between tokens; borrowed: GPU-h above the guarantee; lacked: time with less of the guarantee "
    "than was wanted; virtual time"
)
