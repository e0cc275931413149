"""Simulates one graph with thousands of workers behind several routers, of which one picks for all, in virtual time.

    python bench/scale.py --trace FILE [--workers 2000] [--routers 8] [--rows 20] [--json]

FILE is Mooncake's Conversation trace. Half of the workers do prefill and half decode. The load has one copy of the trace's
first rows for 16 workers, each copy with its own prefixes. The picker is 1 ms away and learns of loads and caches 0.2 s late.
Reported: for 1 router and for all of them requests, requests/s, TTFT, prefix-cache hit rate, and what simulating takes:
seconds of processor time and MiB of memory.
"""

from __future__ import annotations

import json
import resource
import time
from typing import Any

import numpy as np
from options import read_options

from penstock.api import Role
from penstock.simulator.plan import DEFAULT_PROFILE
from penstock.simulator.scenario import (
    PoolSpec,
    ProfiledModel,
    Scenario,
    SimulatedRouters,
    unbounded_router,
)
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import Workload, WorkloadSpec, prepare

WORKERS_PER_COPY = 16


def measured(workload: Workload, *, workers: int, routers: int) -> dict[str, Any]:
    """Return the figures of one simulation."""
    model = ProfiledModel(DEFAULT_PROFILE)
    pools = (
        PoolSpec(Role.PREFILL, workers // 2, model),
        PoolSpec(Role.DECODE, workers - workers // 2, model),
    )
    delays = {"propagation_delay_s": 0.2, "pick_delay_s": 0.001} if routers > 1 else {}
    scenario = Scenario(
        pools=pools,
        router=unbounded_router("prefix-cost"),
        routers=SimulatedRouters(count=routers, **delays),
    )
    began_s = time.process_time()
    recording = Simulation(scenario, workload.requests).run()
    cpu_s = time.process_time() - began_s
    requests = recording.requests
    ttft_s = np.asarray(requests.ttft_s)
    return {
        "workers": workers,
        "routers": routers,
        "requests": len(workload.requests),
        "requests_per_s": round(workload.rate_rps or 0.0, 1),
        "ttft_p50_ms": round(1e3 * float(np.nanquantile(ttft_s, 0.5))),
        "ttft_p99_ms": round(1e3 * float(np.nanquantile(ttft_s, 0.99))),
        "hit": round(float(requests.cached_tokens.sum() / requests.prompt_tokens.sum()), 3),
        "cpu_s": round(cpu_s, 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Print one line per number of routers."""
    options = read_options(__doc__, trace="mooncake", workers=2000, routers=8, rows=20)
    copies = max(1, options.workers // WORKERS_PER_COPY)
    workload = prepare(WorkloadSpec(options.trace, limit=options.rows, copies=copies), seed=0)
    rows = [
        measured(workload, workers=options.workers, routers=number) for number in sorted({1, options.routers})
    ]
    if options.json:
        print(json.dumps(rows))
        return
    print("  ".join(f"{key:>14}" for key in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>14}" for value in row.values()))


if __name__ == "__main__":
    main()
