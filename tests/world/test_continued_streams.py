"""A graph of real processes whose workers are killed under live streams: each stream goes on, and says what it would have said."""

import asyncio
import os
import signal

import pytest

STREAMS = 60


def prompt(number):
    """Return a prompt of its own."""
    return f"{number:08d}" + "word" * 30


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_worker_costs_no_stream(world, stream, role):
    """Kill -9 of one of two while all streams speak: none is lost, and all say what an undisturbed stream says."""
    world.up(world.manifest(prefill=2, decode=2), speed=1, flags=("--no-planner",))
    undisturbed = [stream(prompt(number), 200) for number in range(3)]
    await asyncio.gather(*(each.read() for each in undisturbed))
    streams = [stream(prompt(number), 200) for number in range(STREAMS)]
    tasks = [asyncio.create_task(each.read()) for each in streams]
    while not all(len(each.text) > 40 for each in streams):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.05)
    victim = next(iter(world.entries(role, "ready").values()))
    os.kill(victim["pid"], signal.SIGKILL)
    await asyncio.gather(*tasks)

    lost = [each.problem or each.usage for each in streams if not each.is_complete]
    assert lost == [], world.logs()
    assert [each.text for each in streams[:3]] == [each.text for each in undisturbed]
    continued = sum(world.samples("penstock_router_stream_continuations_total").values())
    assert (continued > 0) is (role == "decode")
    world.down()
