"""A graph of real processes whose workers are killed under live streams: each stream goes on, and says what it would have said."""

import asyncio
import os
import signal

import pytest

STREAMS = 200
PROMPTS = 20
"""Each is sent ten times: what one of them says undisturbed, all have to say."""


def prompt(number):
    """Return a prompt of its own."""
    return f"{number:08d}" + "word" * 30


@pytest.mark.parametrize("roles", [("decode",), ("prefill",), ("decode", "prefill")])
async def test_killed_workers_cost_no_stream(world, stream, roles):
    """Kill -9 of one of two of each role while all streams speak: none is lost, no token is lost, wrong or doubled."""
    world.up(world.manifest(prefill=2, decode=2), speed=1, flags=("--no-planner",))
    undisturbed = [stream(prompt(number), 300) for number in range(PROMPTS)]
    await asyncio.gather(*(each.read() for each in undisturbed))
    streams = [stream(prompt(number % PROMPTS), 300) for number in range(STREAMS)]
    tasks = [asyncio.create_task(each.read()) for each in streams]
    while not all(len(each.text) > 40 for each in streams):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    for role in roles:
        os.kill(next(iter(world.entries(role, "ready").values()))["pid"], signal.SIGKILL)
    # Those that arrive while the workers are away are served, too.
    streams += [stream(prompt(number), 300) for number in range(PROMPTS)]
    await asyncio.gather(*tasks, *(each.read() for each in streams[STREAMS:]))

    assert [each.problem or each.usage for each in streams if not each.is_complete] == [], world.logs()
    expected = [each.text for each in undisturbed]
    assert [n for n, each in enumerate(streams) if each.text != expected[n % PROMPTS]] == []
    continued = sum(world.samples("penstock_router_stream_continuations_total").values())
    assert (continued > 0) is ("decode" in roles)
    assert sum(world.samples("penstock_router_lost_streams_total").values()) == 0
    world.down()
