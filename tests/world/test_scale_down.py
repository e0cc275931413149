"""Scale-down under 200 live streams: nothing is lost, by hand through the target and by the planner."""

import asyncio

from patience import SLOWNESS, until

from penstock.api import Role
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget

STREAMS = 200
LONG_TOKENS, TOKENS = int(1500 * SLOWNESS), int(640 * SLOWNESS)
"""Of each stream: none may end before the last has begun."""


def prompt(number, tokens=64):
    """Return a prompt of exactly this many simulated tokens, its own for every number."""
    return f"{number:08d}" + "word" * (tokens - 2)


async def open_streams(stream, count, *, tokens, prompt_tokens=64, first=0):
    """Start streams; return them and their tasks."""
    streams = [stream(prompt(first + number, prompt_tokens), tokens) for number in range(count)]
    return streams, [asyncio.create_task(each.read()) for each in streams]


async def test_a_draining_decode_worker_leaves_before_its_streams_end(world, stream):
    """They continue on the other one: none is lost, each says what it would have said, and the drain does not wait for them."""
    router = "{drain: {migrateAfterSeconds: 1}}"
    world.up(world.manifest(decode=2, router=router), speed=1, flags=("--no-planner",))
    target = LocalTarget(StateStore(world.statefile))
    streams, tasks = await open_streams(stream, 60, tokens=LONG_TOKENS)
    await until(lambda: all(each.text for each in streams) or any(task.done() for task in tasks), "streams")
    assert [each.problem for each, task in zip(streams, tasks, strict=True) if task.done()] == [], (
        world.logs()
    )
    assert all(world.workers()[name]["inflight_requests"] for name in world.entries("decode"))

    await target.scale(Role.DECODE, 1, decision_id="d000001")
    await until(
        lambda: len(world.entries("decode", "ready", "draining")) == 1, "one decode worker", blocks=True
    )
    assert not any(task.done() for task in tasks), "the worker has gone before its streams have ended"
    await asyncio.gather(*tasks)
    await target.close()
    undisturbed, again = await open_streams(stream, 2, tokens=LONG_TOKENS)
    await asyncio.gather(*again)

    assert [each.problem for each in streams if not each.is_complete] == [], world.logs()
    assert [each.text for each in streams[:2]] == [each.text for each in undisturbed]
    assert len({len(each.text) for each in streams}) == 1
    assert world.samples("penstock_router_stream_continuations_total")["drain"] > 10
    world.down()


async def test_withdrawing_a_decode_and_a_prefill_worker_under_200_streams_loses_none(world, stream):
    """Streams of the leaving decode worker end in full; what the leaving prefill worker pulled is served."""
    world.up(world.manifest(prefill=2, decode=2, stream_interval=16), speed=1, flags=("--no-planner",))
    target = LocalTarget(StateStore(world.statefile))
    streams, tasks = await open_streams(stream, STREAMS, tokens=TOKENS)
    await until(lambda: all(each.text for each in streams), "every stream speaks")
    held = world.workers()
    assert all(held[name]["inflight_requests"] for name in world.entries("decode")), held

    await target.scale(Role.DECODE, 1, decision_id="d000001")
    more, more_tasks = await open_streams(stream, 60, tokens=32, prompt_tokens=6000, first=STREAMS)
    await until(
        lambda: all(world.workers()[n]["inflight_requests"] for n in world.entries("prefill")),
        "both prefill workers are busy",
        blocks=True,
    )
    await target.scale(Role.PREFILL, 1, decision_id="d000002")
    leaving = [*world.entries("decode", "draining"), *world.entries("prefill", "draining")]
    assert len(leaving) == 2
    assert not all(task.done() for task in tasks), "streams outlive the decision to scale down"
    await asyncio.gather(*tasks, *more_tasks)
    await target.close()

    lost = [each.problem or each.usage for each in (*streams, *more) if not each.is_complete]
    assert lost == [], world.logs()
    await until(
        lambda: len(world.entries("decode", "ready", "draining")) == 1, "one decode worker", blocks=True
    )
    await until(
        lambda: len(world.entries("prefill", "ready", "draining")) == 1, "one prefill worker", blocks=True
    )
    world.down()
