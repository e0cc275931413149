"""Three graphs on one pool under one way to divide it: a cell of `run.py`, which any executor may run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rivals import RIVALS

from penstock.api import Role
from penstock.gpu_pool.allocator import PoolTerms, allocate
from penstock.simulator.baselines import configured
from penstock.simulator.pool import PooledGraph, PoolSimulation
from penstock.simulator.pool_plan import PoolPlan, pool_result
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.workload import Workload, WorkloadSpec, prepare
from penstock.workload.arrivals import OnLong
from penstock.workload.traces import TraceRequest
from penstock_planner.decide.config import DecideConfig, Mode

AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"
SLOTS = 3
QUIET = 0.1
"""Chosen: outside its busy slot a graph has a tenth of the rate."""
AMPLE = "no limit"
MODEL = ProfiledModel("a100-llama-8b-bf16-tp1")


def day(
    trace: Workload, *, busy_slot: int, rate: float, slot_s: float, share: float = 1.0, seed: int
) -> Sequence[TraceRequest]:
    """Return a graph's requests: its trace in its busy slot, a thinned copy of it in every other.

    Args:
        trace: Where its requests come from.
        busy_slot: Counted from 0.
        rate: Requests/s while it is busy.
        slot_s: Seconds of a slot.
        share: Of its slot in which it is busy.
        seed: Of the thinning.
    """
    rng = np.random.default_rng(seed)
    span_s = trace.requests[-1].arrival_s
    made: list[TraceRequest] = []
    for slot in range(SLOTS):
        is_busy = slot == busy_slot
        length_s = share * slot_s if is_busy else slot_s
        count = int((rate if is_busy else rate * QUIET) * length_s)
        chosen = np.sort(rng.choice(len(trace.requests), min(count, len(trace.requests)), replace=False))
        for place in chosen:
            request = trace.requests[place]
            at_s = slot * slot_s + request.arrival_s / span_s * length_s
            made.append(replace(request, arrival_s=at_s, line=len(made) + 1))
    return sorted(made, key=lambda each: each.arrival_s)


def graphs_of(folder: Path, guaranteed: int, slot_s: float) -> dict[str, tuple[PooledGraph, Workload]]:
    """Return the graphs: conversations in the first slot, long prompts in the second, in its first third a viral model too."""
    azure = prepare(WorkloadSpec(str(folder / AZURE)), seed=0)
    mooncake = prepare(WorkloadSpec(str(folder / MOONCAKE), None, 32_000, OnLong.TRUNCATE), seed=0)
    days = {
        "chat": (azure, day(azure, busy_slot=0, rate=5.0, slot_s=slot_s, seed=1)),
        "agents": (mooncake, day(mooncake, busy_slot=1, rate=2.5, slot_s=slot_s, seed=2)),
        "viral": (azure, day(azure, busy_slot=1, rate=20.0, slot_s=slot_s, share=1 / 3, seed=3)),
    }
    pools = (PoolSpec(Role.PREFILL, 1, MODEL), PoolSpec(Role.DECODE, 1, MODEL))
    config = DecideConfig(mode=Mode.ADAPTIVE, max_gpu_budget=None)
    scenario = Scenario(
        pools=pools,
        router=unbounded_router("prefix-cost"),
        planner=configured(config, Mode.ADAPTIVE, pools, None),
        cold_start_s=60.0,
    )
    return {
        name: (
            PooledGraph(scenario, requests, guaranteed),
            replace(trace, requests=tuple(requests)),
        )
        for name, (trace, requests) in days.items()
    }


@dataclass(frozen=True, slots=True)
class PoolCell:
    """What a run is of.

    Attributes:
        policy: Way to divide the pool: a name of `RIVALS`, ours, or as many GPUs as the planners want.
        gpus: Of the pool.
        slot_s: Seconds of a slot.
        traces: Folder of the two traces, where the cell runs.
    """

    policy: str
    gpus: int
    slot_s: float
    traces: str


def figures_of(spec: PoolCell) -> dict[str, Any]:
    """Return the figures of one way to divide the pool."""
    made = graphs_of(Path(spec.traces), spec.gpus // 3, spec.slot_s)
    terms = PoolTerms(1000 if spec.policy == AMPLE else spec.gpus, startup_s=60.0)
    graphs = {each: graph for each, (graph, _) in made.items()}
    allocator = RIVALS.get(spec.policy, allocate)
    run = PoolSimulation(terms, graphs, allocator=allocator).run()
    workloads = {each: workload for each, (_, workload) in made.items()}
    result = pool_result(PoolPlan("bench", terms, graphs, workloads, ()), run)
    for row in result["graphs"]:
        row["workload"] = row["workload"].rpartition("/")[2]
        row["late"] = round(row["requests"] * (1 - row["in_time"]["both"]))
    return {"policy": spec.policy, **result}
