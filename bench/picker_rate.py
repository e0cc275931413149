"""How many requests of other routers one picker decides per second of its processor, by the number of workers.

    python bench/picker_rate.py [--workers 8,64,1024] [--requests 6000]

Frames of 32 requests each, as a relay under load sends them: prompts of 20 keys, half of which are shared by one prompt in
200, and what follows of each (its prompt is computed, its worker is sound, it ends). No socket, no relay.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time

from options import read_options

from penstock.api import Role, RouterConfig
from penstock.core.http.loop import run
from penstock.router.admission import OwnPicker
from penstock.router.core.build import TOGETHER, build_router
from penstock.router.core.retries import Verdict
from penstock.router.core.worker import WorkerSpec
from penstock.router.picker import messages as wire
from penstock.router.picker.relay import RemotePicker
from penstock.router.picker.server import PickerServer
from penstock.router.policy.arrival import Arrival

BATCH, PREFIXES, STEP_S = 32, 200, 0.01


class Unsent(asyncio.Transport):
    """A connection to nobody."""

    def write(self, data: object) -> None:
        """Drop what is sent."""

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def is_closing(self) -> bool:
        """Never."""
        return False


def _ask(rng: random.Random, number: int) -> wire.Ask:
    prefix = rng.randrange(PREFIXES)
    chain = tuple(prefix * 1000 + at for at in range(10)) + tuple(rng.getrandbits(60) for _ in range(10))
    prompt = wire.prompt_of(Arrival(chain, 512 * len(chain)))
    return wire.Ask(number, Role.AGGREGATED, prompt)


def _end(number: int) -> tuple[wire.Message, ...]:
    return (
        wire.Prefilled(number, None, True),
        wire.WorkerOutcome(number, Verdict.SUCCEEDED),
        wire.Release(number),
    )


async def seconds_each(workers: int, requests: int) -> float:
    """Return the processor seconds of one request."""
    now_s = 0.0
    core = build_router(RouterConfig(), TOGETHER)
    specs = [WorkerSpec(f"w{at}", Role.AGGREGATED, "http://w", supervised=True) for at in range(workers)]
    core.set_workers(specs, now_s)
    picker_server = PickerServer(
        RemotePicker(OwnPicker(core, lambda: now_s)), lambda: now_s, "picker", lambda: None
    )
    picker_server.term = 1
    channel = picker_server.open().channel
    channel.connection_made(Unsent())
    channel.data_received(wire.frames([wire.Follow(1, "picker", "relay", 1.0)]))
    rng = random.Random(0)
    batches = [range(first, first + BATCH) for first in range(1, requests, BATCH)]
    asks = [wire.frames(_ask(rng, number) for number in batch) for batch in batches]
    ends = [wire.frames(itertools.chain.from_iterable(_end(number) for number in batch)) for batch in batches]
    began_s = time.process_time()
    for at, ask in enumerate(asks):
        channel.data_received(ask)
        await asyncio.sleep(0)
        if at >= 2:
            channel.data_received(ends[at - 2])
            await asyncio.sleep(0)
        now_s += STEP_S
    return (time.process_time() - began_s) / (len(batches) * BATCH)


def main() -> None:
    """Measure and print."""
    arguments = read_options(__doc__, workers="8,64,1024", requests=6000)
    for workers in map(int, arguments.workers.split(",")):
        each_s = run(lambda _: seconds_each(workers, arguments.requests))  # noqa: B023 - run at once
        print(f"{workers:>5} workers: {1e6 * each_s:.0f} us a request, {1 / each_s:,.0f} a second")


if __name__ == "__main__":
    main()
