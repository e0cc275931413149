"""Prints simulated output tokens per CPU-second of the engine core, for several batch sizes.

    python bench/engine_core.py [--json]

Prompts are hashed as the server does it, and the time for that is part of the figure.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from options import read_options

from penstock.engine import profiles
from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.kv_blocks import prefix_keys
from penstock.engine.core.requests import EngineRequest, EngineRole
from penstock.engine.core.timeline import Timeline

PROFILE = "h200-llama-3.1-8b-tp1"
GOAL_TOKENS_PER_CPU_S = 300_000


@dataclass(frozen=True, slots=True)
class Workload:
    """One row: ``requests`` of ``prompt`` and ``outputs`` tokens, all there at the start."""

    label: str
    batch: int
    prompt: int
    outputs: int
    requests: int
    blocks: int | None = None


WORKLOADS = (
    Workload("batch 1", 1, 1024, 256, 60),
    Workload("batch 8", 8, 1024, 256, 400),
    Workload("batch 64", 64, 1024, 256, 800),
    Workload("batch 256", 256, 1024, 256, 1600),
    Workload("batch 64, long prompts", 64, 12_000, 343, 200),
    Workload("batch 256, preempting", 256, 2000, 400, 400, blocks=8000),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One result."""

    label: str
    tokens: int
    steps: int
    preemptions: int
    cpu_s: float
    tokens_per_cpu_s: float


def measure(work: Workload) -> Row:
    """Run one workload to its end."""
    profile = profiles.load(PROFILE)
    limits = BatchLimits(max_num_seqs=work.batch)
    blocks = work.blocks or profile.kv_capacity_tokens // limits.block_size
    settings = EngineSettings(EngineRole.AGGREGATED, blocks, profile.kv.bytes_per_token, limits)
    timeline = Timeline(Engine(settings, profile.latency()))
    prompts = [f"{number:08d}".encode() * (work.prompt // 2) for number in range(work.requests)]
    begin_s = time.process_time()
    for number, prompt in enumerate(prompts):
        keys = prefix_keys(prompt, limits.block_size)
        timeline.submit(EngineRequest(str(number), work.prompt, work.outputs, 0.0, keys))
    while (due_s := timeline.next_due_s()) is not None:
        timeline.run_until(due_s, max_steps=1000)
    cpu_s = time.process_time() - begin_s
    counters = timeline.engine.counters
    tokens = counters.generation_tokens
    return Row(work.label, tokens, counters.steps, counters.preemptions, cpu_s, tokens / cpu_s)


def main() -> None:
    """Measure all workloads and print them."""
    as_json = read_options(__doc__).json
    rows = [measure(work) for work in WORKLOADS]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'workload':26}{'tokens':>9}{'steps':>9}{'preempted':>11}{'tokens/CPU-s':>14}  goal")
    for row in rows:
        verdict = "ok" if row.tokens_per_cpu_s >= GOAL_TOKENS_PER_CPU_S else "below"
        print(
            f"{row.label:26}{row.tokens:9}{row.steps:9}{row.preemptions:11}{row.tokens_per_cpu_s:14,.0f}"
            f"  {GOAL_TOKENS_PER_CPU_S:,} {verdict}"
        )


if __name__ == "__main__":
    main()
