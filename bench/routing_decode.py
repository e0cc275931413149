"""What the weight of uneven decodes does: every workload with and without it before 8 engines, in one run of virtual time.

    python bench/routing_decode.py [--folder DIR] [--rows N] [--json]

Agents (synthetic): 40 of 50 turns, each 512 tokens longer than the last and 150 of answer in the mean, started within 30 s, a turn
some 4 s (or 2.5 s) after the last. `--folder` holds Mooncake's traces and the Tool&Agent surrogate; without it agents alone are run.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from options import read_options

from penstock.api import Role, RouterConfig
from penstock.router.policy import policies
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock.workload.traces import TraceRequest

TRACES = {
    "Conversation": ("mooncake_conversation_trace.jsonl", (4, 8, 13)),
    "arXiv": ("mooncake_arxiv_first1000.jsonl", (10, 16)),
    "surrogate": ("toolagent_SURROGATE.jsonl", (12, 24)),
}
WORKERS = 8


def agents(gap_s: float) -> list[TraceRequest]:
    """Return the turns of all agents, in order."""
    rng = np.random.default_rng(0)
    turns, block = [], 10_000
    for _ in range(40):
        at_s, ids = float(rng.uniform(0, 30)), (0, 1, 2, 3)
        for _ in range(50):
            ids, block = (*ids, block), block + 1
            turns.append((at_s, max(8, int(rng.exponential(150))), ids))
            at_s += float(rng.exponential(gap_s)) + 1.0
    turns.sort()
    return [
        TraceRequest(at_s, 512 * len(ids), output, ids, line)
        for line, (at_s, output, ids) in enumerate(turns, 1)
    ]


def figures(requests: list[TraceRequest], profile: str) -> dict[str, float]:
    """Return percentiles of TTFT, TPOT and E2E, seconds and milliseconds."""
    pool = PoolSpec(Role.AGGREGATED, WORKERS, ProfiledModel(profile))
    jobs = Simulation(Scenario([pool], RouterConfig()), requests)
    found = jobs.run().requests
    served = found.is_ok & (found.output_tokens > 1)
    ttft_s, e2e_s = found.ttft_s[served], found.e2e_s[served]
    tpot_ms = 1000 * (e2e_s - ttft_s) / (found.output_tokens[served] - 1)
    values = {"ttft_s": ttft_s, "tpot_ms": tpot_ms, "e2e_s": e2e_s}
    return {
        f"{name}_p{percent}": round(float(np.percentile(each, percent)), 3)
        for name, each in values.items()
        for percent in (50, 90, 99)
    }


def main() -> None:
    """Print a row of each workload without and with the weight."""
    options = read_options(__doc__, folder=None, rows=1500)
    loads = {f"agents, {gap_s + 1:g} s": (agents(gap_s), "a100-llama-8b-bf16-tp1") for gap_s in (3.0, 1.5)}
    for name, (file, rates) in TRACES.items() if options.folder else ():
        spec = WorkloadSpec(str(Path(options.folder) / file), max_input_tokens=20_480, limit=options.rows)
        for qps in rates:
            requests = list(prepare(spec, seed=0, qps=qps).requests)
            loads[f"{name}, {qps}"] = requests, "a100-qwen2.5-7b-bf16-tp1"
    chosen, rows = policies.EXCESS_WEIGHT, {}
    for name, (requests, profile) in loads.items():
        for weight in (0.0, chosen):
            policies.EXCESS_WEIGHT = weight
            rows[f"{name} | {weight:g}"] = figures(requests, profile)
    if options.json:
        print(json.dumps(rows))
        return
    print("| workload | weight | " + " | ".join(next(iter(rows.values()))) + " |")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{each:g}" for each in row.values()) + " |")


if __name__ == "__main__":
    main()
