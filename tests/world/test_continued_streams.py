"""A graph of real processes whose workers are killed under live streams: each stream continues, and says what it would have said."""

import asyncio
import itertools
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from patience import SLOWNESS, until

SAMPLE = Path(__file__).parents[2] / "manifests/samples/disaggregated.yaml"

STREAMS = 200
TOKENS = int(300 * SLOWNESS)
"""Of each stream: none may end before the last has begun."""
PROMPTS = 20
"""Each is sent ten times: what one of them says undisturbed, all have to say."""


def prompt(number):
    """Return a prompt of its own."""
    return f"{number:08d}" + "word" * 30


def up_sample(world, *, decode=1, has_tiers=False):
    """Start README's sample graph, with this many decode workers, and with tiers if asked."""
    graph = yaml.safe_load(SAMPLE.read_text())
    graph["spec"]["services"]["decode"]["replicas"] = decode
    if has_tiers:
        graph["spec"]["router"]["tiers"] = {"enabled": True}
    manifest = world.folder / "graph.yaml"
    manifest.write_text(yaml.safe_dump(graph))
    world.statefile = world.statefile.with_name(f"{graph['metadata']['name']}.json")
    world.up(manifest, speed=1, flags=("--no-planner",))


@pytest.mark.parametrize("roles", [("decode",), ("prefill",), ("decode", "prefill")])
async def test_killed_workers_cost_no_stream(world, stream, roles):
    """Kill -9 of one of two of each role while all streams speak: none is lost, no token is lost, wrong or doubled."""
    world.up(world.manifest(prefill=2, decode=2), speed=1, flags=("--no-planner",))
    undisturbed = [stream(prompt(number), TOKENS) for number in range(PROMPTS)]
    await asyncio.gather(*(each.read() for each in undisturbed))
    streams = [stream(prompt(number % PROMPTS), TOKENS) for number in range(STREAMS)]
    tasks = [asyncio.create_task(each.read()) for each in streams]
    await until(lambda: all(len(each.text) > 40 for each in streams), "every stream speaks")
    assert not any(task.done() for task in tasks)
    for role in roles:
        os.kill(next(iter(world.entries(role, "ready").values()))["pid"], signal.SIGKILL)
    # Those that arrive while the workers are away are served, too.
    streams += [stream(prompt(number), TOKENS) for number in range(PROMPTS)]
    await asyncio.gather(*tasks, *(each.read() for each in streams[STREAMS:]))

    assert [each.problem or each.usage for each in streams if not each.is_complete] == [], world.logs()
    expected = [each.text for each in undisturbed]
    assert [n for n, each in enumerate(streams) if each.text != expected[n % PROMPTS]] == []
    continued = sum(world.samples("penstock_router_stream_continuations_total").values())
    assert (continued > 0) is ("decode" in roles)
    assert sum(world.samples("penstock_router_lost_streams_total").values()) == 0
    world.down()


@pytest.mark.parametrize(
    ("count", "decode", "has_tiers"), [(60, 1, False), (12, 1, True), (60, 2, False)], ids=str
)
async def test_the_loss_of_all_decode_workers_costs_no_stream(world, stream, count, decode, has_tiers):
    """Kill -9 of the only decode worker of README's sample, or of both at once: all streams wait for it, and none is lost."""
    up_sample(world, decode=decode, has_tiers=has_tiers)

    def asked(number):
        tier = ("premium", "standard", "background")[number % 3] if has_tiers else ""
        return stream(prompt(number % PROMPTS), TOKENS, model="llama", tier=tier)

    undisturbed = [asked(number) for number in range(PROMPTS)]
    await asyncio.gather(*(each.read() for each in undisturbed))
    streams = [asked(number) for number in range(count)]
    tasks = [asyncio.create_task(each.read()) for each in streams]
    await until(lambda: all(len(each.text) > 40 for each in streams), "every stream speaks")
    assert not any(task.done() for task in tasks)
    for entry in world.entries("decode").values():
        os.kill(entry["pid"], signal.SIGKILL)
    await asyncio.gather(*tasks)

    assert [each.problem or each.usage for each in streams if not each.is_complete] == [], world.logs()
    assert [n for n, each in enumerate(streams) if each.text != undisturbed[n % PROMPTS].text] == []
    assert sum(world.samples("penstock_router_stream_continuations_total").values()) >= count
    assert sum(world.samples("penstock_router_lost_streams_total").values()) == 0
    world.down()


CHAOS_S = 480.0
EACH_S = 10.0
"""Between two faults: twice a stream's length. Some streams lose two workers all the same, and run alone for a moment then."""
FAULTS = (("kill", "decode"), ("kill", "prefill"), ("kill", "decode", "prefill"), ("drain", "decode"))
GRAPHS = {
    "two of each role": FAULTS,
    # Their only decode worker has no other to hand its streams to, and takes nothing new while it drains.
    "one of each role": FAULTS[:3],
    "README's sample": FAULTS[:3],
}


def _up(world, graph):
    """Start one of `GRAPHS`; return its workers of each role, and its model."""
    count = 2 if graph == "two of each role" else 1
    if graph == "README's sample":
        up_sample(world)
        return count, "llama"
    router = "{drain: {migrateAfterSeconds: 1}}"
    manifest = world.manifest(prefill=count, decode=count, router=router)
    world.up(manifest, speed=1, flags=("--no-planner",))
    return count, "m"


async def _ask(stream_of, first, kept, until_s, note):
    """Ask one stream after the other until the time is over, on the kept connection if there is one."""
    for number in itertools.count(first):
        if time.monotonic() > until_s:
            break
        one = stream_of(number)
        await one.read(kept)
        note(one, number)
    if kept is not None:
        kept.close()


def _outcome(one, undisturbed):
    """Return what came of a stream."""
    if not one.is_complete:
        return f"lost: {one.problem or one.usage}"
    return "right" if one.text == undisturbed.text else "wrong"


@pytest.mark.nightly
@pytest.mark.parametrize("graph", GRAPHS)
async def test_minutes_of_kills_and_drains_cost_no_stream(world, stream, kept_connection, graph):
    """One fault after another under streams: none is lost, no token is lost, wrong or doubled; only the faults differ."""
    count, model = _up(world, graph)
    undisturbed = [stream(prompt(number), 200, model=model) for number in range(PROMPTS)]
    await asyncio.gather(*(each.read() for each in undisturbed))
    assert all(each.is_complete for each in undisturbed)
    until_s, found, faults = time.monotonic() + CHAOS_S, Counter(), Counter()

    def one_of(number):
        return stream(prompt(number % PROMPTS), 200, model=model)

    async def ask(first):
        kept = kept_connection() if first % 2 else None
        await _ask(
            one_of,
            first,
            kept,
            until_s,
            lambda one, number: found.update([_outcome(one, undisturbed[number % PROMPTS])]),
        )

    async def disturb():
        for fault in itertools.cycle(GRAPHS[graph]):
            await asyncio.sleep(EACH_S)
            if time.monotonic() > until_s - EACH_S:
                return
            await asyncio.to_thread(world.wait_ready, prefill=count, decode=count)
            chosen = [next(iter(world.entries(role, "ready").items())) for role in fault[1:]]
            faults[" ".join(fault)] += 1
            for name, entry in chosen:
                if fault[0] == "kill":
                    os.kill(entry["pid"], signal.SIGKILL)
                else:
                    await asyncio.to_thread(world.post, f"{world.url}/workers/{name}/drain")
                    await asyncio.sleep(EACH_S / 2)
                    await asyncio.to_thread(world.post, f"{world.url}/workers/{name}/undrain")

    await asyncio.gather(disturb(), *(ask(first) for first in range(PROMPTS)))
    continued = world.samples("penstock_router_stream_continuations_total")
    print(graph, dict(found), dict(faults), {"continued": continued})  # noqa: T201 - the figures of a night
    assert set(found) == {"right"}, (found, world.logs())
    assert set(continued) >= ({"upstream_broken"} if count == 1 else {"drain", "upstream_broken"})
    assert min(faults[" ".join(each)] for each in GRAPHS[graph]) > 1
    world.down()
