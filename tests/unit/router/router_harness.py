"""Fake workers and routers on ephemeral loopback ports, spoken to through the real HTTP stack."""

import asyncio
import itertools
import os

import orjson
from fake_workers import DONE, PARAMS, Answers, FakeWorker, token_event
from patience import until

from penstock.api import Role, RouterConfig
from penstock.core.errors import StreamBroken
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.router.core.worker import WorkerSpec
from penstock.router.proxy.auth import GRAPH_SECRET
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

SECRET = b"secret of the graph"
_JSON = ((b"content-type", b"application/json"),)


def error_of(answer):
    """Return the error of a refusal or a failure."""
    return orjson.loads(answer.body)["error"]


class Harness:
    """Starts things and stops them all."""

    def __init__(self, statefile):
        self.statefile = statefile
        self.client = ConnectionPool()
        self.answers = Answers
        self.token_event = token_event
        self.done = DONE
        self.as_router = (GRAPH_SECRET, SECRET)
        self.params = PARAMS
        self._closers = []
        self.routers = []
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
        self.routers.append(router)
        if ready:
            await router.until(lambda: not server.admission.problems())
            await router.until(lambda: not any(each.health_problem for each in server.core.pool))
        return router

    def write_state(self, workers, routers=(), *, path=None, **states):
        """Write a statefile as the local backend would, each with a later mtime; ``states`` are of workers by name."""
        entries = {
            each.name: {"role": each.role, "url": each.url, "state": states.get(each.name, "ready")}
            for each in workers
        }
        entries |= {
            f"router-{number}": {"role": "router", "url": each.url, "state": "ready"}
            for number, each in enumerate(routers)
        }
        path = path or self.statefile
        new = path.with_suffix(".new")
        new.write_bytes(orjson.dumps({"arbiter": {"pid": 1}, **entries}))
        mtime = next(self._mtimes)
        os.utime(new, (mtime, mtime))
        new.replace(path)
        return path

    async def prefilled_without_decode(self, **settings):
        """Return router, pair and a request whose prefill ends when the decode worker has gone."""
        prefill, decode = await self.pair()
        finish = prefill.hold()
        self.write_state([prefill, decode])
        router = await self.router(statefile=self.statefile, disaggregated=True, **settings)
        request = asyncio.create_task(router.post())
        await router.until(lambda: len(prefill.seen) == 1)
        self.write_state([prefill, decode], **{decode.name: "starting"})
        await router.until(lambda: not router.server.core.pool.routable(Role.DECODE, 0))
        finish.set()
        return router, [prefill, decode], request

    async def close(self):
        """Leave as a client, so that no router holds a request any more; then stop everything, newest first."""
        await self.client.close()
        try:
            for router in self.routers:
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

    async def end(self):
        """End the router, without the wait for a next request on the client's kept connections."""
        self.client.close_idle(self.url)
        await self.server.close()

    async def until(self, condition):
        """Wait for a condition."""
        await until(condition)

    async def post(self, path="/v1/completions", *, headers=_JSON, raw=None, **body):
        """Send a request and return the whole answer."""
        content = raw if raw is not None else orjson.dumps({"model": "llama", "prompt": "hello", **body})
        return await self.client.request("POST", self.url + path, body=content, headers=headers)

    async def stream(self, **body):
        """Send a streaming request and return when its head has come."""
        content = orjson.dumps({"model": "llama", "prompt": "hello", "stream": True, **body})
        return await self.client.stream("POST", self.url + "/v1/completions", body=content, headers=_JSON)

    async def hanging(self, *workers, **body):
        """Return a request once one of some workers has it, which answers nothing."""
        for each in workers:
            each.script = [Answers.hang()]
        seen = sum(len(each.seen) for each in workers)
        request = asyncio.create_task(self.post(**body))
        await self.until(lambda: sum(len(each.seen) for each in workers) > seen)
        return request

    async def begun_stream(self, **body):
        """Return a stream whose first token has come."""
        stream = await self.stream(**body)
        await anext(stream)
        return stream

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
        assert {(each.inflight_requests, each.inflight_tokens) for each in fleet} <= {(0, 0)}
        assert (len(queue), queue.tokens) == (0, 0)
