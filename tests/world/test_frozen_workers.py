"""Workers that freeze, as on a lost node: no connection closes, nothing answers, and clients wait no longer than allowed."""

import asyncio
import signal

import pytest
from patience import within

BOUND_S = 3
"""`unreachableRealSeconds` here."""
SLACK_S = within(4)
"""For the health check under way, its time limit, and a busy machine."""
SPEED = 2
GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: world}
spec:
  model: {name: m, servedName: m}
  runtime: simulated
  engine: {profile: h200-llama-3.1-8b-tp1}
  router: {health: {unreachableRealSeconds: BOUND}}
  services: {frontend: {role: router}, prefill: {role: prefill}, decode: {role: decode}}
""".replace("BOUND", str(BOUND_S))


@pytest.fixture
def fleet(world, eventually, free_port):
    """A router before two prefill and two decode workers that nobody supervises; the processes by name."""
    (world.folder / "graph.yaml").write_text(GRAPH)
    processes, flags = {}, []
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        role, port = name[:-2], free_port()
        own = ("--role", role, "--port", port, "--speed", SPEED)
        processes[name] = world.start("engine", "serve", "m", *own, name=name)
        flags += ["--worker", f"{role}=http://127.0.0.1:{port}"]
    own = ("--graph", world.folder / "graph.yaml", "--port", world.port, "--speed", SPEED)
    processes["router"] = world.start("router", "serve", *own, *flags, name="router")
    eventually(lambda: world.is_serving() and all(w["state"] == "ready" for w in world.workers().values()))
    return processes


async def _clients(world, stream, frozen, *, tokens):
    """Keep 12 streams under way, freeze a worker among them; return its inflight requests then, and all streams."""
    done, over = [], asyncio.Event()

    async def client(number):
        while not over.is_set():
            one = stream(f"client {number} request {len(done)} " + "word " * 200, tokens)
            await one.read()
            done.append(one)

    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(client(number))
        await asyncio.sleep(4)
        frozen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(BOUND_S + SLACK_S + 3)
        over.set()
    return done


async def test_streams_at_a_frozen_decode_worker_go_on_elsewhere_in_time(world, fleet, stream):
    """None of those that had begun is lost, nobody waits longer than allowed, and all else is served."""
    streams = await _clients(world, stream, fleet["decode-0"], tokens=300)
    assert [each.problem for each in streams if not each.is_complete] == []
    assert 1 <= sum(world.samples("penstock_router_stream_continuations_total").values()) <= 12
    assert max(each.longest_gap_s for each in streams) < BOUND_S + SLACK_S
    assert world.workers()["decode-0"]["state"] == "unhealthy"
    fleet["decode-0"].send_signal(signal.SIGCONT)


async def test_no_request_is_lost_to_a_frozen_prefill_worker(world, fleet, stream):
    """Its prompts have had no token: they are computed elsewhere."""
    streams = await _clients(world, stream, fleet["prefill-0"], tokens=20)
    assert [each.problem for each in streams if not each.is_complete] == []
    assert max(each.longest_gap_s for each in streams) < BOUND_S + SLACK_S
