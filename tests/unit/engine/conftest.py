"""Engines with round latencies, so that tests can be computed by hand; workers on ephemeral ports."""

import asyncio
import json
import zlib
from contextlib import asynccontextmanager

import pytest

from penstock.core.http.client import ConnectionPool
from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.core.requests import EngineRequest, EngineRole
from penstock.engine.core.timeline import Timeline
from penstock.engine.core.transfer import LinkTerms
from penstock.engine.serve.server import EngineServer
from penstock.engine.serve.settings import ServeFlags, resolve

LINK = LinkTerms(latency_s=0.5, bytes_per_s=100.0)
"""One byte per token: 100 tokens a second."""


@pytest.fixture
def flat_latency():
    """TTFT = 1 s + 1 ms per token; a decode step takes 0.1 s whatever it holds."""
    return LatencyModel(QuadraticPrefill(1.0, 0.001, 0.0), LinearDecode(0.1, 0.0, 0.0))


@pytest.fixture
def make_engine(flat_latency):
    """Make an engine of small blocks (4 tokens) and a small cache."""

    def make(
        *,
        role="aggregated",
        blocks=100,
        block_size=4,
        seqs=8,
        budget=64,
        by_priority=False,
        least_load=1,
        latency=flat_latency,
        **options,
    ):
        limits = BatchLimits(budget, seqs, block_size, by_priority, least_load)
        settings = EngineSettings(EngineRole(role), blocks, 1, limits, LeaseTerms(), LINK, **options)
        return Engine(settings, latency)

    return make


@pytest.fixture
def make_timeline(make_engine):
    """Make an engine on a timeline that starts at 0."""
    return lambda **options: Timeline(make_engine(**options))


@pytest.fixture
def request_of():
    """Make a request; its keys are private to it unless ``keys`` are given."""

    def make(name, *, prompt=8, outputs=4, arrival_s=0.0, keys=None, **options):
        if keys is None:
            keys = [zlib.crc32(f"{name}/{position}".encode()) for position in range(prompt // 4)]
        return EngineRequest(name, prompt, outputs, arrival_s, keys, **options)

    return make


@pytest.fixture
def run_all():
    """Run a timeline until nothing is due; return the outcomes."""

    def run(timeline, until_s=float("inf")):
        outcomes = []
        while (due_s := timeline.next_due_s()) is not None and due_s <= until_s:
            outcomes += timeline.run_until(due_s, max_steps=1)
            assert len(outcomes) < 100_000
        return outcomes

    return run


class Client:
    """Speaks to a worker and reads its metrics."""

    def __init__(self, server, pool):
        self.server = server
        self.pool = pool

    async def get(self, path):
        """Return the response to a GET."""
        return await self.pool.request("GET", self.server.url + path)

    async def post(self, path, body, headers=()):
        """Return the status and the decoded body of a POST; ``body`` may be bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.pool.request("POST", self.server.url + path, body=content, headers=headers)
        return response.status, json.loads(response.body), response.headers

    async def complete(self, prompt="abcdefgh", **fields):
        """Return the body of a completion that is not streamed."""
        status, body, _ = await self.post("/v1/completions", {"prompt": prompt, "ignore_eos": True, **fields})
        assert status == 200, body
        return body

    async def stream(self, path="/v1/completions", **fields):
        """Return the streaming response of a request."""
        body = json.dumps({"prompt": "abcdefgh", "ignore_eos": True, "stream": True, **fields}).encode()
        return await self.pool.stream("POST", self.server.url + path, body=body)

    async def metric(self, name, **labels):
        """Return one sample of /metrics."""
        page = (await self.get("/metrics")).body.decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in page.splitlines():
            if line.startswith((name + "{", name + " ")) and all(label in line for label in wanted):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"{name} {labels} is not on the page")

    async def until(self, name, value, **labels):
        """Wait until a sample has a value."""
        while await self.metric(name, **labels) != value:  # noqa: ASYNC110 - another process would poll too
            await asyncio.sleep(0.005)


def lease_of(duration_s):
    """Return --kv-transfer-config with a lease; long ones keep a busy machine from losing any."""
    return json.dumps({"kv_connector_extra_config": {"kv_lease_duration": duration_s}})


@pytest.fixture
def serving(no_cover):
    """Run a worker on a free port; 50 simulated seconds to a real one unless said otherwise.

    Coverage is off: its tracer would make a worker late that keeps to the host's clock.
    """

    @asynccontextmanager
    async def run(**flags):
        flags = {"model": "llama", "profile": "h200-llama-3.1-8b-tp1", "port": 0, "speed": 50.0, **flags}
        if "role" in flags:
            flags = {"kv_transfer_config": lease_of(600), **flags, "role": EngineRole(flags["role"])}
        async with asyncio.TaskGroup() as group:
            server = EngineServer(resolve(ServeFlags(**flags)), group)
            pool = ConnectionPool()
            try:
                await server.start()
                yield Client(server, pool)
            finally:
                await pool.close()
                await server.close(grace_s=0.0)

    return run


@pytest.fixture
def hand_over():
    """Run a prompt on a prefill worker; return what the decode worker is told."""

    async def run(prefill, prompt):
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = await prefill.complete(prompt, max_tokens=1, kv_transfer_params=params)
        return body["kv_transfer_params"]

    return run
