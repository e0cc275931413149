"""Three graphs on one pool, from real traces shifted by a slot of time, one of them viral, under four ways to divide it.

Needs PENSTOCK_TRACES, the folder of Azure's conversation trace and Mooncake's. Writes results.json and RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
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

FOLDER = Path(__file__).parent
AZURE, MOONCAKE = "AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"
SLOTS = 3
QUIET = 0.1
"""Chosen: outside its busy slot a graph has a tenth of the rate."""
OURS = "pool"
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


def cell(name: str, gpus: int, slot_s: float, folder: Path) -> dict[str, Any]:
    """Return the figures of one way to divide the pool."""
    made = graphs_of(folder, gpus // 3, slot_s)
    terms = PoolTerms(1000 if name == AMPLE else gpus, startup_s=60.0)
    graphs = {each: graph for each, (graph, _) in made.items()}
    allocator = RIVALS.get(name, allocate)
    run = PoolSimulation(terms, graphs, allocator=allocator).run()
    workloads = {each: workload for each, (_, workload) in made.items()}
    result = pool_result(PoolPlan("bench", terms, graphs, workloads, ()), run)
    for row in result["graphs"]:
        row["workload"] = row["workload"].rpartition("/")[2]
        row["late"] = round(row["requests"] * (1 - row["in_time"]["both"]))
    return {"policy": name, **result}


def page(results: Sequence[Mapping[str, Any]], gpus: int, slot_s: float) -> str:
    """Return the results as Markdown."""
    names = [row["graph"] for row in results[0]["graphs"]]
    lines = [
        "# GPU pools: three graphs, busy one after the other",
        "",
        f"Written by `python bench/pools/run.py`. Three slots of {slot_s / 60:g} minutes: Azure's conversation trace at 5 requests/s in the",
        "first, Mooncake's at 2.5 (prompts cut at 32,000 tokens) in the second, and Azure's at 20 for the first third of it, viral; else each has a",
        "tenth of its rate. Simulated A100 workers of one GPU, mode adaptive,",
        f"start-up 60 s. {gpus} GPUs in all, a guarantee (or budget) of {gpus // 3} each, one priority. Late: requests out of time.",
        "",
        f"| divided by | {' | '.join(f'{name}: in time' for name in names)} | late | GPU-hours | lost |",
        "|---" * (len(names) + 4) + "|",
    ]
    for result in results:
        rows = {row["graph"]: row for row in result["graphs"]}
        shares = [f"{100 * rows[name]['in_time']['both']:.1f}%" for name in names]
        late = sum(row["late"] for row in rows.values())
        cells = [
            result["policy"],
            *shares,
            str(late),
            f"{result['pool']['gpu_hours']:.1f}",
            str(result["pool"]["lost"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"`{AMPLE}`: as many GPUs as the planners want, the bound of any division."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run every way to divide the pool and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=9, help="of the pool; default: 9")
    parser.add_argument("--slot-s", type=float, default=1200.0, help="seconds of a slot; default: 1200")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the page goes")
    parser.add_argument("--jobs", type=int, default=1, help="processes; default: 1")
    parser.add_argument("--only", nargs="*", default=None, help="ways to divide the pool; default: all")
    given = parser.parse_args()
    traces = Path(os.environ["PENSTOCK_TRACES"])
    names = given.only or [*RIVALS, OURS, AMPLE]
    with ProcessPoolExecutor(given.jobs) as executor:
        every = [[value] * len(names) for value in (given.gpus, given.slot_s, traces)]
        results = list(executor.map(cell, names, *every))
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = page(results, given.gpus, given.slot_s)
    (given.folder / "RESULTS.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
