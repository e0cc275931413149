"""The graphs of a board on one pool under one way to divide it: a cell of `run.py`, which any executor may run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from boards import AZURE, BOARDS, MOONCAKE, Board, Load
from rivals import RIVALS, clairvoyant

from penstock.api import Role
from penstock.gpu_pool.allocator import Allocator, PoolTerms, allocate
from penstock.simulator.baselines import configured
from penstock.simulator.pool import PooledGraph, PoolRun, PoolSimulation
from penstock.simulator.pool_plan import PoolPlan, pool_result
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.workload import Workload, WorkloadSpec, prepare
from penstock.workload.arrivals import OnLong
from penstock.workload.traces import TraceRequest
from penstock_planner.decide.config import DecideConfig, Mode

QUIET = 0.1
"""Chosen: outside its busy hours a graph has a tenth of the rate."""
OURS, BOUND, ORACLE, AMPLE = "pool", "bound oracle", "oracle", "no limit"
STARTUP_S = 60.0


def day(trace: Workload, load: Load, slots: int, slot_s: float, seed: int) -> Sequence[TraceRequest]:
    """Return a graph's requests: its trace while it is busy, again where it is too short, and a thinned copy of it before and after.

    Args:
        trace: Where its requests come from.
        load: Of the graph.
        slots: Of the board.
        slot_s: Seconds of a slot.
        seed: Of the thinning.
    """
    rng = np.random.default_rng(seed)
    span_s = trace.requests[-1].arrival_s
    made: list[TraceRequest] = []
    for begin, end in pairwise((0.0, *load.busy, float(slots))):
        rate = load.rate if (begin, end) == load.busy else load.rate * QUIET
        rounds = math.ceil(rate * (end - begin) * slot_s / len(trace.requests)) or 1
        length_s = (end - begin) * slot_s / rounds
        for turn in range(rounds):
            for place in np.sort(rng.choice(len(trace.requests), int(rate * length_s), replace=False)):
                request = trace.requests[place]
                at_s = begin * slot_s + (turn + request.arrival_s / span_s) * length_s
                made.append(replace(request, arrival_s=at_s, line=len(made) + 1))
    return made


def graphs_of(board: Board, folder: Path, slot_s: float) -> dict[str, tuple[PooledGraph, Workload]]:
    """Return the graphs of a board and their requests."""
    traces = {
        AZURE: prepare(WorkloadSpec(str(folder / AZURE)), seed=0),
        MOONCAKE: prepare(WorkloadSpec(str(folder / MOONCAKE), None, 32_000, OnLong.TRUNCATE), seed=0),
    }
    made = {}
    for seed, (name, load) in enumerate(board.loads.items(), start=1):
        requests = day(traces[load.trace], load, board.slots, slot_s, seed)
        graph = PooledGraph(_scenario(load), requests, load.guaranteed, priority=load.priority.rank)
        made[name] = (graph, replace(traces[load.trace], requests=tuple(requests)))
    return made


def _scenario(load: Load) -> Scenario:
    model = ProfiledModel(load.profile)
    pools = (PoolSpec(Role.PREFILL, 1, model, load.gpus), PoolSpec(Role.DECODE, 1, model, load.gpus))
    config = DecideConfig(mode=Mode.ADAPTIVE, max_gpu_budget=None)
    return Scenario(
        pools=pools,
        router=unbounded_router("prefix-cost"),
        planner=configured(config, Mode.ADAPTIVE, pools),
        cold_start_s=STARTUP_S,
    )


@dataclass(frozen=True, slots=True)
class PoolCell:
    """What a run is of.

    Attributes:
        board: A name of `BOARDS`.
        policy: Way to divide the pool: a name of `RIVALS`, ours, an oracle, or as many GPUs as the planners want.
        slot_s: Seconds of a slot.
        traces: Folder of the two traces, where the cell runs.
        picture: File of a picture of the run; None: none is drawn.
    """

    board: str
    policy: str
    slot_s: float
    traces: str
    picture: str | None = None


def figures_of(spec: PoolCell) -> dict[str, Any]:
    """Return the figures of one way to divide the pool."""
    board = BOARDS[spec.board]
    made = graphs_of(board, Path(spec.traces), spec.slot_s)
    graphs = {each: graph for each, (graph, _) in made.items()}
    ample = PoolTerms(1000, startup_s=STARTUP_S)
    terms = ample if spec.policy == AMPLE else replace(ample, gpus=board.gpus)
    run = PoolSimulation(terms, graphs, allocator=_allocator(spec.policy, graphs, ample)).run()
    workloads = {each: workload for each, (_, workload) in made.items()}
    result = pool_result(PoolPlan(spec.board, terms, graphs, workloads, ()), run)
    for row in result["graphs"]:
        row["workload"] = row["workload"].rpartition("/")[2]
        row["late"] = round(row["requests"] * (1 - row["in_time"]["both"]))
    if spec.picture is not None:
        from penstock.simulator.pool_chart import draw_pool  # noqa: PLC0415 - matplotlib is an extra

        draw_pool(result, run, Path(spec.picture))
    return {"board": spec.board, "policy": spec.policy, **result}


def _allocator(policy: str, graphs: Mapping[str, PooledGraph], ample: PoolTerms) -> Allocator:
    if policy not in {BOUND, ORACLE}:
        return RIVALS.get(policy, allocate)
    run: PoolRun = PoolSimulation(ample, graphs).run()
    wants = {name: [sample.grants[name].wanted for sample in run.samples] for name in graphs}
    arrivals = {
        name: np.bincount([int(each.arrival_s) for each in graph.requests]) for name, graph in graphs.items()
    }
    return clairvoyant(wants, arrivals, is_bound=policy == BOUND)
