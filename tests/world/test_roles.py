"""A graph of real processes whose workers change roles under live streams: none is lost, whatever happens on the way."""

import asyncio
import os
import signal

import pytest
from patience import SLOWNESS, until

from penstock.api import Role
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget

STREAMS = 40
TOKENS = int(200 * SLOWNESS)
"""Of each stream: none may end before the last has begun."""


def prompt(number):
    """Return a prompt of its own."""
    return f"{number:08d}" + "word" * 30


async def speaking(stream, first=0):
    """Start streams; return them, all in the middle of their answers, and their tasks."""
    streams = [stream(prompt(first + number), TOKENS) for number in range(STREAMS)]
    tasks = [asyncio.create_task(each.read()) for each in streams]
    await until(lambda: all(len(each.text) > 40 for each in streams), "every stream speaks")
    return streams, tasks


@pytest.mark.parametrize("is_killed", [False, True], ids=["as it should", "killed while it drains"])
async def test_a_decode_worker_that_becomes_prefill_s_costs_no_stream(world, stream, is_killed):
    """It finishes its streams, or dies and they continue elsewhere; in both cases prefill has it, with its GPU, and uses it."""
    world.up(world.manifest(prefill=1, decode=2, switchable="true"), speed=1, flags=("--no-planner",))
    target = LocalTarget(StateStore(world.statefile))
    before = {name: entry["resources"] for name, entry in world.entries("decode", "ready").items()}
    streams, tasks = await speaking(stream)
    await target.switch(
        Role.DECODE, Role.PREFILL, replicas={Role.DECODE: 1, Role.PREFILL: 2}, decision_id="d000001"
    )
    await target.close()
    (name,) = world.entries("decode", "draining")
    pid = world.entries("decode", "draining")[name]["pid"]
    if is_killed:
        os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*tasks)
    await until(lambda: name in world.entries("prefill", "ready"), "prefill has the worker", blocks=True)
    switched = world.entries("prefill", "ready")[name]
    assert (switched["pid"] == pid) is not is_killed
    assert switched["resources"] == before[name]

    await until(
        lambda: world.workers().get(name, {}).get("role") == "prefill",
        "the router knows the new role",
        blocks=True,
    )
    more, more_tasks = await speaking(stream, first=STREAMS)
    await asyncio.gather(*more_tasks)
    lost = [each.problem or each.usage for each in (*streams, *more) if not each.is_complete]
    assert lost == [], world.logs()
    assert len(world.entries("decode", "ready")) == 1
    world.down()
