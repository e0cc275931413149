"""What one routing decision costs, hashing included, for fleets of growing size; one of admission; a rebalancing; memory.

    python bench/routing.py [--json]

Prompts have 12,000 tokens (48,000 bytes) and share prefixes as a conversation does. Ratios compare fleet sizes of
one run. Times are CPU times, because a busy machine interrupts.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from options import read_options

from penstock.api import AdmissionConfig, AdmissionMode, Role, RouterConfig
from penstock.router.core.build import TOGETHER, build_router
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.router import RouterCore
from penstock.router.core.waiting import QueueSettings
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.dualmap import DualMap, PairChoice
from penstock.router.policy.prefixes import Prefix, PrefixIndex, prompt_keys
from penstock.router.policy.registry import make_policy, policy_names
from penstock.router.policy.routing_policy import Arrival, RoutingPolicy, WorkerLoad

FLEETS = (8, 64, 256, 1024)
REQUESTS = 400
PROMPT_TOKENS = 12_000
ADMISSION_WORKERS = 256
ARRIVAL = Arrival((), PROMPT_TOKENS)
GOALS = "goals: p50 <= 60 us, p99 <= 300 us; dualmap at 1,024 workers <= 1.3 x 8"


def prompts(count: int) -> list[bytes]:
    """Return prompts of 48,000 bytes; each shares a random share of its beginning with others."""
    rng = random.Random(1)
    blocks = [rng.randbytes(2048) for _ in range(400)]
    made = []
    for _ in range(count):
        first = rng.randrange(20)
        shared = [blocks[(first * 20 + i) % 400] for i in range(rng.randrange(4, 20))]
        own = [rng.randbytes(2048) for _ in range(24 - len(shared))]
        made.append(b"".join(shared + own)[: 4 * PROMPT_TOKENS])
    return made


def queues_of(
    policy: RoutingPolicy, workers: int, tokens_per_s: float, *, slot_requests: int | None = None
) -> DispatchQueue[int]:
    """Return queues before idle workers whose throughput is known."""
    queues: DispatchQueue[int] = DispatchQueue(policy, QueueSettings(slot_requests=slot_requests))
    queues.workers.estimates.throughput.learn_other(tokens_per_s)
    queues.set_workers((WorkerLoad(f"worker-{i}") for i in range(workers)), 0.0)
    return queues


def decide(policy: str, workers: int, texts: list[bytes]) -> list[float]:
    """Return the CPU microseconds of each decision: hashing and placing."""
    queues = queues_of(make_policy(RouterConfig(policy=policy)), workers, 6250.0, slot_requests=1)
    took = []
    for item, text in enumerate(texts):
        now_s = item / 4
        began = time.process_time()
        queues.submit(item, Arrival(prompt_keys(text), PROMPT_TOKENS), now_s)
        took.append((time.process_time() - began) * 1e6)
        for queued in queues.dispatch(now_s):
            queues.prefilled(queued.item, now_s + 0.2)
    return took[len(took) // 4 :]


def rebalance_ms() -> float:
    """Return the milliseconds of relieving one queue of 1,000 (median of nine)."""
    took = []
    for _ in range(9):
        policy = DualMap(choice=PairChoice.CACHE_AFFINITY, rebalance=False, adaptive_prefix=False)
        queues = queues_of(policy, 8, 1e6)
        for item in range(1000):
            queues.submit(item, Arrival((1, item + 2), PROMPT_TOKENS), 0.0)
        names = [name for name in (f"worker-{i}" for i in range(8)) if queues.workers.queued_tokens(name)]
        began = time.process_time()
        queues.rebalance(0.0, names[:1])
        took.append((time.process_time() - began) * 1e3)
    return statistics.median(took)


def admission_us() -> dict[str, dict[str, float]]:
    """Return the CPU microseconds of an admission decision before 256 workers, by how many of them are busy.

    ``decision`` is that alone; ``load event`` a worker's load judged again, as after each dispatch and each release.
    """
    took: dict[str, dict[str, float]] = {}
    for name, busy in (("none", 0), ("half", ADMISSION_WORKERS // 2), ("all", ADMISSION_WORKERS)):
        admission = AdmissionConfig(mode=AdmissionMode.TOKEN_CAPACITY)
        core: RouterCore[int] = build_router(RouterConfig(admission=admission), TOGETHER)
        core.set_workers((_spec(i) for i in range(ADMISSION_WORKERS)), 0.0)
        for number, worker in enumerate(core.pool):
            worker.kv_usage_fraction, worker.metrics_at_s = 0.9 if number < busy else 0.5, 0.0
            worker.kv_capacity_tokens = 100_000
            core.load_read(worker, 0.0)
        last = next(iter(core.pool))
        took[name] = {
            "decision": _microseconds(lambda core=core: core.stages.full(Role.AGGREGATED, 0.0)),  # type: ignore[misc]
            "load event": _microseconds(lambda core=core, last=last: core.load_read(last, 0.0)),  # type: ignore[misc]
        }
        if busy == ADMISSION_WORKERS:
            took[name]["rejection"] = _microseconds(
                lambda core=core: core.acquire(0, Role.AGGREGATED, ARRIVAL, 0.0)  # type: ignore[misc]
            )
    return took


def _spec(number: int) -> WorkerSpec:
    return WorkerSpec(f"worker-{number}", Role.AGGREGATED, "", supervised=True)


def _microseconds(call: Callable[[], object]) -> float:
    """Return the CPU time of one call: the median of 21 times 500."""
    took = []
    for _ in range(21):
        began = time.process_time()
        for _ in range(500):
            call()
        took.append((time.process_time() - began) / 500 * 1e6)
    return statistics.median(took)


def index_bytes(blocks: int) -> float:
    """Return the bytes of memory per block of a full index, all told, with prompts of ``blocks`` unshared blocks."""
    rng = random.Random(2)
    tracemalloc.start()
    index = PrefixIndex(20_000)
    for _ in range(40_000 // blocks):
        index.use(Prefix(tuple(rng.getrandbits(64) for _ in range(blocks))))
    gc.collect()  # Tuples that the interpreter keeps for reuse are not the index's.
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / index.count


def main() -> None:
    """Print the table."""
    arguments = read_options(__doc__)
    texts = prompts(REQUESTS)
    hashing = statistics.median(_timed(text) for text in texts)
    rows = []
    for policy in policy_names():
        for fleet in FLEETS:
            took = sorted(decide(policy, fleet, texts))
            p50, p99 = statistics.median(took), took[int(0.99 * len(took))]
            rows.append({"policy": policy, "workers": fleet, "p50_us": p50, "p99_us": p99})
    relief = rebalance_ms()
    admission = admission_us()
    memory = {blocks: index_bytes(blocks) for blocks in (1, 4, 24)}
    if arguments.json:
        print(
            json.dumps(
                {
                    "hashing_us": hashing,
                    "decisions": rows,
                    "admission_us": admission,
                    "rebalance_1000_ms": relief,
                    "index_bytes": memory,
                }
            )
        )
        return
    print(f"hashing a 12,000-token prompt: {hashing:.1f} us (part of each figure below)")
    print(f"{'policy':<16}{'workers':>10}{'p50 us':>10}{'p99 us':>10}{'ratio to 8':>12}")
    base: dict[str, float] = {}
    for row in rows:
        first = base.setdefault(str(row["policy"]), float(row["p50_us"]))
        ratio = float(row["p50_us"]) / first
        print(
            f"{row['policy']:<16}{row['workers']:>10}{row['p50_us']:>10.1f}{row['p99_us']:>10.1f}{ratio:>12.2f}"
        )
    for busy, parts in admission.items():
        told = ", ".join(f"{part} {cost:.1f} us" for part, cost in parts.items())
        print(f"admission before {ADMISSION_WORKERS} workers, {busy} busy: {told} (goal <= 20 us)")
    print(f"rebalancing a queue of 1,000: {relief:.2f} ms (goal <= 2 ms)")
    shown = ", ".join(f"{each:.0f} with {blocks} new blocks a prompt" for blocks, each in memory.items())
    print(f"index, bytes a block: {shown} (goal <= 64)")
    print(GOALS)


def _timed(text: bytes) -> float:
    began = time.process_time()
    prompt_keys(text)
    return (time.process_time() - began) * 1e6


if __name__ == "__main__":
    main()
