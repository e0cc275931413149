"""The fake server of the workload's tests, and a graph; both synthetic."""

import asyncio

import orjson
import pytest

from penstock.core.http.server import HttpServer

FIRST_TOKEN_S = 0.001
"""Real seconds before the first token: no engine answers in the tenth of a millisecond that a loopback takes."""


class FakeEngine:
    """An OpenAI server with a cache of 64,000 tokens that answers by a script which a test may replace.

    Attributes:
        bodies: JSON of every completion request, in order of arrival.
        usage: What it reports on top of the truth.
        gap_s: Between two tokens, real seconds.
        tokens_per_byte: Its tokenizer: 4 bytes a token where 0.25.
        page: Its metrics.
        script: Replaces the answer; None streams.
    """

    def __init__(self):
        self.bodies = []
        self.usage = {}
        self.gap_s = 0.001
        self.tokens_per_byte = 0.25
        self.page = b'vllm:cache_config_info{num_gpu_blocks="4000",block_size="16"} 1'
        self.script = None
        self.url = ""

    async def handle(self, request, responder):
        """Answer one request."""
        if request.path == "/v1/models":
            responder.send(200, b'{"data": [{"id": "llama"}]}')
        elif request.path == "/metrics":
            responder.send(200, self.page)
        elif request.method == "GET":
            responder.send(404, b"{}")
        else:
            body = orjson.loads(request.body)
            self.bodies.append(body)
            await (self.script or self.stream)(body, responder)

    async def stream(self, body, responder):
        """Stream what is asked for, and report usage."""
        responder.start(200)
        await asyncio.sleep(FIRST_TOKEN_S)
        for _ in range(body["max_tokens"]):
            responder.write(b'data: {"choices":[{"index":0,"text":"abcd"}]}\n\n')
            await asyncio.sleep(self.gap_s)
        usage = {
            "prompt_tokens": 1 + round(len(body["prompt"]) * self.tokens_per_byte),
            "completion_tokens": body["max_tokens"],
            **self.usage,
        }
        usage = {key: value for key, value in usage.items() if value != "absent"}
        responder.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n")
        responder.end()


@pytest.fixture
async def fake_engine():
    """A running fake engine on a free port."""
    fake = FakeEngine()
    server = HttpServer(fake.handle)
    await server.start("127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.port}"
    yield fake
    await server.close(grace_s=0)
