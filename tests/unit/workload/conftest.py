"""Small traces, called synthetic, written where a test can break them."""

import asyncio
from dataclasses import fields

import orjson
import pytest

from penstock.core.http.server import HttpServer
from penstock.workload.exchange import Destination
from penstock.workload.session import LoadConfig, plan_load, run_load

SPEED = 200.0


@pytest.fixture
def mooncake_file(tmp_path):
    """A synthetic Mooncake trace of two batches, three and two requests."""
    rows = [
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
        '{"timestamp": 0, "input_length": 512, "output_length": 6, "hash_ids": [0]}',
        '{"timestamp": 0, "input_length": 1500, "output_length": 7, "hash_ids": [0, 2, 3]}',
        '{"timestamp": 3000, "input_length": 10, "output_length": 8, "hash_ids": [4]}',
        '{"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [0, 5]}',
    ]
    path = tmp_path / "synthetic.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def azure_file(tmp_path):
    """A synthetic Azure trace of three requests."""
    path = tmp_path / "synthetic.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:16:46.6805900,12,3"
    )
    return path


class FakeServer:
    """Answers as an OpenAI server does, by a script that each test sets.

    Attributes:
        bodies: JSON of every completion request, in order of arrival.
        headers: Their headers.
        script: Async function of (json body, responder) that answers a completion.
        models: Names that /v1/models lists; None answers with a page.
        ready: Status of /ready.
        lags: Lag that each process exports; "" is the server, other names are workers.
        speed: Of the router that it plays; None plays none.
        broken: Streams that continued elsewhere, counted up by each completion; None: it shows none.
        time_scales: Speed that each simulated worker exports, by name; "" is the server itself.
    """

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.script = stream_tokens
        self.models = ["llama"]
        self.ready = 404
        self.lags = {}
        self.admin = None
        self.speed = None
        self.time_scales = {}
        self.broken = None
        self.url = ""

    async def handle(self, request, responder):
        """Answer one request."""
        if request.path == "/v1/models" and self.models is None:
            responder.send(404, b"<html>")
        elif request.path == "/v1/models":
            responder.send(200, orjson.dumps({"data": [{"id": name} for name in self.models]}))
        elif request.path == "/workers" and (self.lags or self.speed is not None):
            responder.send(200, orjson.dumps(self._listed(request)))
        elif self.admin is not None and request.headers.get(b"authorization") == self.admin:
            responder.send(500, b"the admin key is for /workers alone")
        elif request.path.endswith("/metrics") and (self.lags or self.time_scales):
            responder.send(200, self._page(request.path.removesuffix("/metrics").strip("/")))
        elif request.method == "GET" and request.path != "/ready":
            responder.send(404, b"{}")
        elif request.path == "/ready":
            responder.send(self.ready, b'{"reasons":["no worker of role decode is ready"]}')
        else:
            self.bodies.append(orjson.loads(request.body))
            self.broken = None if self.broken is None else self.broken + 2
            self.headers.append(request.headers)
            await self.script(self.bodies[-1], responder)

    def _listed(self, request):
        """The answer to GET /workers: addresses for admins alone."""
        names = [name for name in (self.lags or self.time_scales) if name]
        workers = [{"name": n, "role": "decode", "url": f"{self.url}/{n}"} for n in names]
        if request.headers.get(b"authorization") != self.admin:
            workers = [{"name": each["name"], "role": "decode"} for each in workers]
        return {"workers": workers} if self.speed is None else {"workers": workers, "speed": self.speed}

    def _page(self, name):
        """The metrics of one process."""
        lines = [f"penstock_schedule_lag_p99_seconds {self.lags[name]}"] if name in self.lags else []
        if name in self.time_scales:
            lines.append(f"penstock_time_scale {self.time_scales[name]}")
        if self.broken is not None and not name:
            lines.append(f'penstock_router_stream_continuations_total{{reason="connect"}} {self.broken}')
            lines.append('penstock_router_lost_streams_total{why="deaths"} 7')
        return "\n".join(lines).encode()


async def stream_tokens(body, responder, *, cached=0):
    """Stream the tokens asked for, one event each, and usage as the simulated tokenizer counts."""
    responder.start(200)
    for _ in range(body["max_tokens"]):
        responder.write(b'data: {"choices":[{"index":0,"text":"abcd"}]}\n\n')
        await asyncio.sleep(0)
    usage = {
        "prompt_tokens": -(-len(body["prompt"]) // 4) if "prompt" in body else 1,
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    responder.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n")
    responder.end()


@pytest.fixture
async def fake_server():
    """A running fake server on a free port."""
    fake = FakeServer()
    server = HttpServer(fake.handle)
    await server.start("127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.port}"
    yield fake
    await server.close(grace_s=0)


@pytest.fixture
def fake_server_class():
    """The fake server's class, for a test that runs it in a loop of its own."""
    return FakeServer


@pytest.fixture
def config_of(fake_server):
    """Return a function: trace and changes -> configuration of a load against the fake server."""

    def make(trace, **changes):
        sent = {each.name: changes.pop(each.name) for each in fields(Destination) if each.name in changes}
        destination = Destination(**{"url": fake_server.url, **sent})
        return LoadConfig(trace=str(trace), destination=destination, speed=SPEED, **changes)

    return make


@pytest.fixture
def run_to_end(config_of):
    """Return a function that runs such a load to its end and returns its summary."""

    async def run(trace, *, stop=None, on_start=None, **changes):
        plan = plan_load(config_of(trace, **changes))
        return await run_load(plan, stop=stop or asyncio.Event(), on_start=on_start)

    return run
