"""What following the KV events of a fleet costs a router: processor and memory, for fleets of growing size.

    python bench/kv_events.py [--json]

Each worker's cache is full: with each step it stores a prompt of 2,048 tokens in 128 blocks, half of them shared with the prompt
before, and evicts as many as it stores. Batches are vLLM's (maps, hashes of 32 bytes) and go through what reads them, the
keys and the index; the last row sends them through a ZMQ socket first. Ratios compare rows of one run. Times are CPU
times, because a busy machine interrupts. All data is synthetic.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import msgspec
import zmq
import zmq.asyncio
from options import read_options

from penstock.api import RouterConfig
from penstock.router.admission import Admission
from penstock.router.core.build import TOGETHER, build_router
from penstock.router.kv_listener import KvListener
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import PrefixIndex

FLEETS = (1, 100, 1000)
UNIT, PROMPT = 16, 2048
BLOCKS = PROMPT // UNIT
CACHE_TOKENS = (32_768, 262_144)
"""Of a small cache, for a thousand workers at once, and of an A100's with an 8B model, for a few."""
STEPS = 4000
STATED_TOKENS_PER_S = 2000
"""New tokens that each worker of a thousand computes."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What following costs.

    Attributes:
        workers: In the fleet.
        cpu_us_per_step: Of one batch: up to 128 blocks stored, as many evicted.
        cpu_s_per_million_tokens: Of new tokens.
    """

    workers: int
    cpu_us_per_step: float
    cpu_s_per_million_tokens: float


def steps(worker: int, cache_tokens: int = CACHE_TOKENS[0]) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield one worker's messages for ever: the first fill its cache, the others evict what they store."""
    encode, held, number = msgspec.msgpack.encode, [], 0
    shared = BLOCKS // 2
    parent: bytes | None = None
    while True:
        start = number * BLOCKS
        first = shared if parent is not None and number % 2 else 0
        names = [b"%d.%d" % (worker, block) + bytes(24) for block in range(start, start + BLOCKS - first)]
        stored = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent if first else None,
            "token_ids": [(worker * 31 + start * 7 + place) % 100_000 for place in range(len(names) * UNIT)],
            "block_size": UNIT,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(names),
        }
        parent = names[shared - 1]
        held.append(names)
        events = [stored]
        if len(held) * BLOCKS * UNIT > cache_tokens:
            gone = {"type": "BlockRemoved", "block_hashes": held.pop(0)[::-1], "medium": "GPU"}
            events.insert(0, gone)
        yield b"kv", number.to_bytes(8, "big"), encode([1.5, events, 0])
        number += 1


def listener() -> KvListener:
    """Return one without workers; it applies what it is given."""
    core = build_router(RouterConfig(), TOGETHER)
    return KvListener(Admission(core, lambda: 0.0), lambda _: None, port=1)


def following(cache_tokens: int) -> KvEvents:
    """Return the events of one worker."""
    return KvEvents(PrefixIndex(cache_tokens // 512), engine_block_tokens=UNIT)


def cpu(workers: int, fleet_steps: int = STEPS) -> Cost:
    """Return the cost of a fleet whose workers publish in turn, their caches full."""
    events, found = listener(), [following(CACHE_TOKENS[0]) for _ in range(workers)]
    sources = [steps(worker) for worker in range(workers)]
    fill = CACHE_TOKENS[0] // PROMPT
    for each, source in zip(found, sources, strict=True):
        for _ in range(fill):
            events.apply(each, next(source))
    rounds = max(1, fleet_steps // workers)
    messages = [[next(source) for source in sources] for _ in range(rounds)]
    gc.collect()
    began_s = time.process_time()
    for batch in messages:
        for each, message in zip(found, batch, strict=True):
            events.apply(each, message)
    took_s = time.process_time() - began_s
    return cost(workers, took_s, rounds * workers)


def cost(workers: int, took_s: float, count: int) -> Cost:
    """Return the cost of this many batches; every other one shares half of its prompt."""
    tokens = count * PROMPT * 0.75
    return Cost(workers, took_s / count * 1e6, took_s / tokens * 1e6)


async def by_socket(count: int = STEPS) -> Cost:
    """Return the cost of one worker's batches that come through a socket; the worker's sending counts as well."""
    context = zmq.asyncio.Context()
    sender, receiver = context.socket(zmq.PUB), context.socket(zmq.SUB)
    for each in (sender, receiver):
        each.set_hwm(0)
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    receiver.setsockopt(zmq.SUBSCRIBE, b"")
    receiver.connect(f"tcp://127.0.0.1:{port}")
    await asyncio.sleep(0.5)
    source, events, known = steps(0), listener(), following(CACHE_TOKENS[0])
    messages = [next(source) for _ in range(count)]
    began_s = time.process_time()
    for message in messages:
        await sender.send_multipart(message)
    for _ in messages:
        events.apply(known, await asyncio.wait_for(receiver.recv_multipart(), 10))
    took_s = time.process_time() - began_s
    context.destroy(linger=0)
    return cost(1, took_s, count)


def memory(workers: int, cache_tokens: int) -> float:
    """Return the bytes for each engine block of full caches."""
    events = listener()
    gc.collect()
    tracemalloc.start()
    found = []
    for worker in range(workers):
        found.append(following(cache_tokens))
        source = steps(worker, cache_tokens)
        for _ in range(cache_tokens // PROMPT + 1):
            events.apply(found[-1], next(source))
    del source
    gc.collect()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held_bytes / sum(map(len, found))


def main() -> None:
    """Measure and print."""
    arguments = read_options(__doc__)
    costs = [cpu(workers) for workers in FLEETS]
    socket = asyncio.run(by_socket())
    per_block = [memory(100, CACHE_TOKENS[0]), memory(8, CACHE_TOKENS[1])]
    if arguments.json:
        print(
            json.dumps(
                {
                    "cpu": [asdict(each) for each in costs],
                    "socket": asdict(socket),
                    "bytes_per_block": dict(zip(CACHE_TOKENS, per_block, strict=True)),
                }
            )
        )
        return
    for each in costs:
        ratio = each.cpu_us_per_step / costs[0].cpu_us_per_step
        print(
            f"{each.workers:5} workers: {each.cpu_us_per_step:7.1f} us a batch, "
            f"{each.cpu_s_per_million_tokens:.3f} s per million tokens, {ratio:.2f} x one worker"
        )
    ratio = socket.cpu_us_per_step / costs[0].cpu_us_per_step
    print(f"through a socket, sending counted: {socket.cpu_us_per_step:7.1f} us a batch, {ratio:.2f} x")
    share = costs[-1].cpu_s_per_million_tokens * STATED_TOKENS_PER_S * FLEETS[-1] / 1e6
    print(f"{FLEETS[-1]} workers, each {STATED_TOKENS_PER_S} new tokens a second: {share:.2f} of one core")
    for tokens, size in zip(CACHE_TOKENS, per_block, strict=True):
        of_worker = size * tokens / UNIT
        print(
            f"caches of {tokens} tokens: {size:.0f} bytes a block of {UNIT} tokens, "
            f"{of_worker / 2**20:.1f} MiB a worker, {FLEETS[-1] * of_worker / 2**30:.1f} GiB for {FLEETS[-1]}"
        )


if __name__ == "__main__":
    main()
