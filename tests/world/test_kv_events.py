"""The router follows the KV events of simulated workers: in one process to see what it believes, then as a graph."""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager

import pytest
from patience import until, until_asked

from penstock.api import RouterConfig
from penstock.core.http.client import ConnectionPool
from penstock.core.simulated_tokens import token_ids
from penstock.engine.serve.server import EngineServer
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.router.policy.prefixes import Prefix, token_keys
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

pytest.importorskip("msgspec", reason="the extra kv-events is not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

CACHE_BLOCKS = 160
"""2,560 tokens: one prompt of 2,048 alongside the first 512 of another."""
EVENTS = {"tokenizer": "simulated", "kvEventsPort": 5557}
POLICY = {"policy": "prefix-cost", "health": {"intervalSeconds": 5}}


def prompt(name, tokens):
    """Return a text of this many simulated tokens that no other name shares."""
    text = "".join(f"{name}{number:06d}." for number in itertools.islice(itertools.count(), tokens))
    return text[: 4 * tokens]


def port_of(endpoint):
    """Return an endpoint's port."""
    return int(endpoint.rpartition(":")[2])


class Engine:
    """A worker in this process that can be started again on its ports."""

    def __init__(self, name, pool, *, replays=False):
        self.name = name
        self.pool = pool
        self.server = None
        self.replays = replays
        self.ports = {"port": 0, "kv_events_port": "*", "kv_replay_port": "*"}
        self._group = None

    @property
    def events_config(self):
        """What the flag says."""
        config = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{self.ports['kv_events_port']}",
        }
        replay = {"replay_endpoint": f"tcp://127.0.0.1:{self.ports['kv_replay_port']}"}
        return {**config, **replay} if self.replays else config

    async def start(self):
        """Listen and publish, where it did before if it did."""
        self._group = await asyncio.TaskGroup().__aenter__()
        flags = ServeFlags(
            model="m",
            profile="h200-llama-3.1-8b-tp1",
            port=self.ports["port"],
            speed=100.0,
            num_gpu_blocks_override=CACHE_BLOCKS,
            kv_events_config=json.dumps(self.events_config),
        )
        self.server = EngineServer(resolve(flags), self._group)
        await self.server.start()
        publisher = self.server.worker.publisher
        self.ports = {"port": self.server.port, "kv_events_port": port_of(publisher.endpoint)}
        self.ports["kv_replay_port"] = port_of(publisher.replay_endpoint) if self.replays else "*"

    async def stop(self):
        """End without a word."""
        await self.server.close(grace_s=0.0)
        await self._group.__aexit__(None, None, None)

    async def complete(self, text):
        """Send a prompt past the router."""
        body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
        answer = await self.pool.request("POST", f"{self.server.url}/v1/completions", body=body)
        assert answer.status == 200, answer.body

    def entry(self):
        """Return what the statefile says of it."""
        cmd = ["engine", "--kv-events-config", json.dumps(self.events_config)]
        url = self.server.url
        return {"role": "aggregated", "state": "ready", "url": url, "ports": self.ports, "cmd": cmd}


class Scene:
    """Two engines and a router that learns of them from a statefile."""

    def __init__(self, router, engines, pool):
        self.router = router
        self.engines = engines
        self.pool = pool

    def believed(self, engine, text):
        """Return how many blocks of a prompt the router believes a worker to hold."""
        index = self.router.core.entry_queue.workers.index_of(engine.name)
        prefix = Prefix(token_keys(token_ids(text.encode()), engine_block_tokens=16))
        return 0 if index is None else index.held(prefix)

    async def complete(self, text):
        """Send a prompt through the router; return who holds it now."""
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": 1}).encode()
        url = f"http://127.0.0.1:{self.router.port}/v1/completions"
        headers = ((b"content-type", b"application/json"),)
        answer = await self.pool.request("POST", url, body=body, headers=headers)
        assert answer.status == 200, answer.body
        keys = token_ids(text.encode())
        (holder,) = (each for each in self.engines if self.believed(each, text) == len(keys) // 512)
        return holder

    async def joined(self):
        """Return once events of every worker arrive; a subscription takes a moment."""
        for engine in self.engines:
            sent = []

            async def is_followed(engine=engine, sent=sent):
                sent.append(prompt(f"{engine.name}{len(sent)}", 512))
                await engine.complete(sent[-1])
                return any(self.believed(engine, text) for text in sent)

            await until_asked(is_followed, f"events of {engine.name} arrive")


@pytest.fixture
def scene(tmp_path):
    """Make a scene."""

    @asynccontextmanager
    async def make(*, replays=False, before=()):
        pool = ConnectionPool()
        engines = [Engine("a", pool, replays=replays), Engine("b", pool, replays=replays)]
        for engine in engines:
            await engine.start()
            for text in before:
                await engine.complete(text)
        statefile = tmp_path / "state.json"
        statefile.write_text(json.dumps({each.name: each.entry() for each in engines}))
        config = RouterConfig.model_validate({**EVENTS, **POLICY})
        router = RouterServer(
            RouterSettings(model="m", disaggregated=False, config=config, statefile=statefile)
        )
        await router.start()
        made = Scene(router, engines, pool)
        try:
            await until(lambda: not router.admission.problems(), "the router serves")
            if not before:
                await made.joined()
            yield made
        finally:
            await pool.close()
            await router.close()
            for engine in engines:
                await engine.stop()

    return make


async def test_what_a_worker_evicts_is_no_longer_believed(scene):
    """Another router's prompts push ours out of the worker: ours is forgotten there, theirs are known."""
    ours, theirs = prompt("ours", 1024), prompt("theirs", 2048)
    async with scene() as made:
        holder = await made.complete(ours)
        assert made.believed(holder, ours) == 2

        await holder.complete(theirs)
        await until(lambda: made.believed(holder, theirs) == 4, "their blocks are known")

        # 160 blocks less their 128 leave room for the first half of ours.
        assert made.believed(holder, ours) == 1
        await holder.complete(prompt("more", 2048))
        await until(lambda: made.believed(holder, ours) == 0, "ours is forgotten")
        assert await made.complete(ours) in made.engines


async def test_a_connection_that_broke_is_caught_up_with(scene):
    """The worker restarts, unnoticed by discovery, and computes before the router is back: its first batches are known."""
    ours, first = prompt("ours", 1024), prompt("first", 1024)
    async with scene(replays=True) as made:
        holder = await made.complete(ours)
        await holder.stop()
        await until(lambda: made.believed(holder, ours) == 0, "ours is forgotten")
        await holder.start()
        await holder.complete(first)

        await until(lambda: made.believed(holder, first) == 2, "what it computed is known")
        assert made.believed(holder, ours) == 0


async def test_a_worker_that_starts_anew_is_forgotten_and_followed(scene):
    """On its old ports, unseen by discovery, and with its first batch lost before the router is back."""
    ours = prompt("ours", 1024)
    async with scene() as made:
        holder = await made.complete(ours)
        await holder.stop()
        await until(lambda: made.believed(holder, ours) == 0, "ours is forgotten")
        await holder.start()
        await made.joined()

        assert made.believed(holder, ours) == 0


GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: world}
spec:
  model: {name: m, servedName: m, contextTokens: 2100}
  runtime: simulated
  services:
    frontend: {role: router}
    worker: {role: aggregated, replicas: 2}
  engine: {profile: h200-llama-3.1-8b-tp1, kvBlocks: 160}
  router: {tokenizer: simulated, kvEventsPort: 5557}
  planner: {enabled: false}
"""


def test_a_graph_of_processes_follows_its_workers(world, eventually):
    """Each worker has a port of its own; the router knows what was sent past it, cleared, and lost in a crash."""
    manifest = world.folder / "graph.yaml"
    manifest.write_text(GRAPH)
    world.up(manifest, speed=20)
    eventually(lambda: len(world.entries("aggregated", "ready")) == 2, "two workers are ready")
    entries = world.entries("aggregated")
    ports = {name: entry["ports"]["kv_events_port"] for name, entry in entries.items()}
    assert len(set(ports.values())) == 2

    def blocks():
        return world.samples("penstock_router_worker_prefix_blocks")

    def send(name, tokens=1024):
        world.complete(entries[name]["url"], prompt=prompt(name, tokens), max_tokens=1)

    for name in entries:
        send(name)
    eventually(lambda: blocks() == dict.fromkeys(entries, 2.0), f"both are followed: {blocks()}")

    cleared, killed = entries
    world.post(f"{entries[cleared]['url']}/reset_prefix_cache")
    eventually(lambda: blocks() == {cleared: 0.0, killed: 2.0}, f"one is cleared: {blocks()}")

    world.kill(killed)
    eventually(lambda: world.entries("aggregated")[killed]["restarts"] == 1, "the other is restarted")
    eventually(lambda: len(world.entries("aggregated", "ready")) == 2, "both are ready")
    eventually(lambda: blocks() == dict.fromkeys(entries, 0.0), f"both are empty: {blocks()}")
    entries = world.entries("aggregated")
    send(killed)
    eventually(lambda: blocks()[killed] == 2, f"the new process is followed: {blocks()}")
    assert world.samples("penstock_router_kv_events_malformed_total") == {"": 0}
    world.down()
