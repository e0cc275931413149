"""Fake workers and routers on ephemeral loopback ports, spoken to through the real HTTP stack."""

import asyncio
import itertools
import os
import sys
import time
from pathlib import Path

import orjson
import pytest
import uvloop

from penstock.api import Role, RouterConfig
from penstock.core.errors import StreamBroken
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.http.server import HttpServer
from penstock.router.core.worker import WorkerSpec
from penstock.router.proxy.auth import GRAPH_SECRET
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

sys.path.insert(0, str(Path(__file__).parent))

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-1",
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
DONE = b"data: [DONE]\n\n"
SECRET = b"secret of the graph"
_JSON = ((b"content-type", b"application/json"),)


class Seen:
    """One completion request as a worker saw it."""

    def __init__(self, request):
        self.path = request.path
        self.headers = request.headers
        self.raw = request.body
        self.body = orjson.loads(request.body)


class FakeWorker:
    """Answers like vLLM; ``script`` holds handlers for the next requests, before ``otherwise``."""

    def __init__(self, role, number):
        self.role = role
        self.name = f"{role}-{number}"
        self.script = []
        self.otherwise = self.complete
        self.seen = []
        self.disconnects = 0
        self.health_status = 200
        self.kv_usage = "0.25"
        self.cache_config = 'block_size="16",num_gpu_blocks="1000"'
        self.expired_leases = 0
        self.generated = 0
        self.page_delay_s = 0.0
        self.prompt_tokens = 40
        self.cached_tokens = 16
        self.server = HttpServer(self._handle)

    @property
    def url(self):
        """Where it listens."""
        return f"http://127.0.0.1:{self.server.port}"

    async def _handle(self, request, responder):
        if request.path == "/health" and self.health_status is None:
            await Answers.hang()(request, responder)
        elif request.path == "/health":
            responder.send(self.health_status, b"")
        elif request.path == "/metrics":
            await asyncio.sleep(self.page_delay_s)
            page = f'vllm:kv_cache_usage_perc{{engine="0"}} {self.kv_usage}\n'
            page += f'vllm:cache_config_info{{engine="0",{self.cache_config}}} 1\n'
            page += f'vllm:generation_tokens_total{{engine="0"}} {self.generated}\n'
            if self.expired_leases is not None:
                page += f'vllm:nixl_num_kv_expired_reqs_total{{engine="0"}} {self.expired_leases}\n'
            responder.send(200, page.encode(), content_type="text/plain")
        else:
            self.seen.append(Seen(request))
            responder.on_disconnect(self._count_disconnect)
            handler = self.script.pop(0) if self.script else self.otherwise
            await handler(request, responder)

    def _count_disconnect(self):
        self.disconnects += 1

    def usage(self, output_tokens):
        """What it counts for one answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def complete(self, request, responder):
        """Stream or send as many tokens as asked for."""
        body = orjson.loads(request.body)
        count = body.get("max_tokens", 3)
        if not body.get("stream"):
            params = PARAMS if self.role == "prefill" else None
            choice = {"index": 0, "text": "x" * count, "finish_reason": "length"}
            answer = {"choices": [choice], "usage": self.usage(count), "kv_transfer_params": params}
            responder.send(200, orjson.dumps(answer))
            return
        responder.start(200)
        for number in range(count):
            responder.write(token_event(number))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": self.usage(count)}
            responder.write(b"data: " + orjson.dumps(usage) + b"\n\n")
        responder.write(DONE)
        responder.end()


def token_event(number):
    """One event with one token."""
    return b'data: {"choices":[{"index":0,"text":"tok%d","finish_reason":null}]}\n\n' % number


class Answers:
    """Handlers for a worker's script."""

    @staticmethod
    def status(status, body=b'{"error":{"message":"worker says no"}}', headers=()):
        """Answer with a status."""

        async def handler(request, responder):
            responder.send(status, body, headers=headers)

        return handler

    @staticmethod
    def drop():
        """Close the connection without an answer."""

        async def handler(request, responder):
            responder.abort()

        return handler

    @staticmethod
    def hang(started=None):
        """Answer nothing until the client has left."""

        async def handler(request, responder):
            gone = asyncio.Event()
            responder.on_disconnect(gone.set)
            if started is not None:
                started.set()
            await gone.wait()

        return handler

    @staticmethod
    def events_then(*data, event, broken=False):
        """Stream some bytes, wait for an event, then end in order, or break the connection."""

        async def handler(request, responder):
            responder.start(200)
            for each in data:
                responder.write(each)
            await event.wait()
            if broken:
                responder.abort()
            else:
                responder.write(DONE)
                responder.end()

        return handler


class Harness:
    """Starts things and stops them all."""

    def __init__(self):
        self.client = ConnectionPool()
        self.answers = Answers
        self.token_event = token_event
        self.done = DONE
        self.as_router = (GRAPH_SECRET, SECRET)
        self.params = PARAMS
        self._closers = []
        self._routers = []
        self._mtimes = itertools.count(1_000)
        self._numbers = {role: itertools.count() for role in ("prefill", "decode", "aggregated")}

    async def worker(self, role):
        """Start a fake worker."""
        worker = FakeWorker(role, next(self._numbers[role]))
        await worker.server.start("127.0.0.1", 0)
        self._closers.append(lambda: worker.server.close(grace_s=0))
        return worker

    async def pair(self):
        """Start a prefill and a decode worker."""
        return await self.worker("prefill"), await self.worker("decode")

    async def served(self, *roles, **settings):
        """Start a worker of each role, and a router before them; return all, the router last."""
        workers = [await self.worker(role) for role in roles]
        return *workers, await self.router(*workers, **settings)

    async def router(self, *workers, statefile=None, config=None, ready=True, tracing=None, **settings):
        """Start a router, and wait until it would serve and all its workers are well."""
        specs = tuple(WorkerSpec(each.name, Role(each.role), each.url) for each in workers)
        roles = {each.role for each in workers}
        server = RouterServer(
            RouterSettings(
                model="llama",
                disaggregated=settings.pop("disaggregated", "aggregated" not in roles),
                config=RouterConfig.model_validate(config or {}),
                statefile=statefile,
                workers=() if statefile else specs,
                **{"graph_secret": SECRET, **settings},
            ),
            tracing,
        )
        await server.start()
        self._closers.append(server.close)
        router = Router(server, self.client)
        self._routers.append(router)
        if ready:
            await router.until(lambda: not server.admission.problems())
            await router.until(lambda: not any(each.health_problem for each in server.core.pool))
        return router

    def write_state(self, path, workers, routers=(), **states):
        """Write a statefile as the local backend would, each with a later mtime; ``states`` are of workers by name."""
        entries = {
            each.name: {"role": each.role, "url": each.url, "state": states.get(each.name, "ready")}
            for each in workers
        }
        entries |= {
            f"router-{number}": {"role": "router", "url": each.url, "state": "ready"}
            for number, each in enumerate(routers)
        }
        new = path.with_suffix(".new")
        new.write_bytes(orjson.dumps({"arbiter": {"pid": 1}, **entries}))
        mtime = next(self._mtimes)
        os.utime(new, (mtime, mtime))
        new.replace(path)
        return path

    async def prefilled_without_decode(self, path, **settings):
        """Return router, pair and a request whose prefill ends when the decode worker has gone."""
        prefill, decode = await self.pair()
        finish = asyncio.Event()

        async def slow_prefill(request, responder):
            await finish.wait()
            await prefill.complete(request, responder)

        prefill.script = [slow_prefill]
        self.write_state(path, [prefill, decode])
        router = await self.router(statefile=path, disaggregated=True, **settings)
        request = asyncio.create_task(router.post())
        await router.until(lambda: len(prefill.seen) == 1)
        self.write_state(path, [prefill, decode], **{decode.name: "starting"})
        await router.until(lambda: not router.server.core.pool.routable(Role.DECODE, 0))
        finish.set()
        return router, [prefill, decode], request

    async def close(self):
        """Leave as a client, so that no router holds a request any more; then stop everything, newest first."""
        await self.client.close()
        try:
            for router in self._routers:
                await router.assert_idle()
        finally:
            for close in reversed(self._closers):
                await close()


class Router:
    """A running router and the requests that tests send it."""

    def __init__(self, server, client):
        self.server = server
        self.client = client
        self.url = f"http://127.0.0.1:{server.port}"

    async def until(self, condition, within_s=30.0):
        """Wait for a condition."""
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, "condition not met in time"
            await asyncio.sleep(0.005)

    async def post(self, path="/v1/completions", *, headers=_JSON, raw=None, **body):
        """Send a request and return the whole answer."""
        content = raw if raw is not None else orjson.dumps({"model": "llama", "prompt": "hello", **body})
        return await self.client.request("POST", self.url + path, body=content, headers=headers)

    async def stream(self, **body):
        """Send a streaming request and return when its head has come."""
        content = orjson.dumps({"model": "llama", "prompt": "hello", "stream": True, **body})
        return await self.client.stream("POST", self.url + "/v1/completions", body=content, headers=_JSON)

    async def broken(self, stream):
        """Return the rest of a stream, which does not come to its end."""
        received = b""
        try:
            async for piece in stream:
                received += piece
        except StreamBroken:
            return received
        raise AssertionError(f"the stream came to its end: {received!r}")

    async def get(self, path, *, headers=()):
        """Return a page."""
        return await self.client.request(
            "GET", self.url + path, headers=headers, timeouts=Timeouts(total_s=5)
        )

    async def workers(self):
        """Return /workers by name."""
        answer = orjson.loads((await self.get("/workers")).body)
        return {each["name"]: each for each in answer["workers"]}

    async def metric(self, name, **labels):
        """Return one sample's value; 0 when the series does not exist."""
        page = (await self.get("/metrics")).body.decode()
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        start = f"{name}{{{shown}}} " if shown else f"{name} "
        values = [line.removeprefix(start) for line in page.splitlines() if line.startswith(start)]
        return float(values[0]) if values else 0.0

    async def assert_idle(self):
        """Every counter of what is under way is back at zero."""
        fleet, queue = self.server.core.pool, self.server.core.entry_queue
        await self.until(lambda: not len(queue) and not any(each.inflight_requests for each in fleet))
        assert [(each.inflight_requests, each.inflight_tokens) for each in fleet] == [(0, 0)] * len(
            list(fleet)
        )
        assert (len(queue), queue.tokens) == (0, 0)


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def harness(no_cover):
    """Fake workers and routers; all stopped at the end. Coverage is off, as these tests run in real time."""
    harness = Harness()
    yield harness
    await harness.close()


@pytest.fixture
def write_graph(harness, tmp_path):
    """Write the workers and routers into one statefile."""

    def write(workers, routers):
        return harness.write_state(tmp_path / "state.json", workers, routers)

    return write
