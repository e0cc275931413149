"""Prints what simulating costs: a trace on 8 prefill and 8 decode workers, one core, CPU and wall seconds.

Run: python bench/simulator.py [--trace FILE] [--policy NAME ...] [--block-size 128 16]
The budget of 20 s is for Mooncake's whole Conversation trace (12,031 requests), which is not in the
repository: give its path. Without one the packaged 608 rows are run.
"""

from __future__ import annotations

import time

from options import read_options

from penstock.api import Role
from penstock.router.policy.registry import policy_names
from penstock.simulator.plan import DEFAULT_PROFILE
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, unbounded_router
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import WorkloadSpec, prepare

BUDGET_S = 20.0
WORKERS = 8
WHOLE_TRACE = 12_031


def main() -> None:
    """Print one line per block size and policy."""
    options = read_options(__doc__, trace="mooncake", policy=policy_names()[:1], block_size=(128, 16))
    workload = prepare(WorkloadSpec(options.trace), seed=0)
    count = len(workload.requests)
    budget = f"budget {BUDGET_S:g} s" if count == WHOLE_TRACE else "no budget: not the whole trace"
    print(f"{workload.name}: {count} requests, {WORKERS}+{WORKERS} workers ({budget})")
    print(
        f"{'policy':<16}{'block':>6}{'cpu s':>8}{'wall s':>8}{'events':>9}{'req/s':>8}{'hit':>7}{'p50 ms':>8}"
    )
    for policy in options.policy:
        for block_size in options.block_size:
            model = ProfiledModel(DEFAULT_PROFILE, block_size=block_size)
            pools = (PoolSpec(Role.PREFILL, WORKERS, model), PoolSpec(Role.DECODE, WORKERS, model))
            wall, cpu = time.perf_counter(), time.process_time()
            recording = Simulation(
                Scenario(pools=pools, router=unbounded_router(policy)), workload.requests
            ).run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            requests = recording.requests
            hit = requests.cached_tokens.sum() / requests.prompt_tokens.sum()
            p50_ms = 1e3 * sorted(requests.ttft_s)[count // 2]
            print(
                f"{policy:<16}{block_size:>6}{cpu:>8.2f}{wall:>8.2f}{recording.events:>9}{count / wall:>8.0f}"
                f"{hit:>7.3f}{p50_ms:>8.0f}"
            )


if __name__ == "__main__":
    main()
