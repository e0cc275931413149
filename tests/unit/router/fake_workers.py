"""Workers that answer like vLLM, as a test's script says."""

import asyncio

import orjson

from penstock.core.http.server import HttpServer

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
        self.version = None
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
        is_health = request.path in {"/health", "/ready"}
        if is_health and self.health_status is None:
            await Answers.hang()(request, responder)
        elif is_health:
            responder.send(self.health_status, b"")
        elif request.path == "/version":
            said = {"version": self.version} if self.version else {}
            responder.send(200 if said else 404, orjson.dumps(said))
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

    def hold_stream(self):
        """Stream one token to the next request, and end once the event that is returned is set."""
        end = asyncio.Event()
        self.script.append(Answers.stream(token_event(0), event=end, then=DONE))
        return end

    def hold(self, answer=None):
        """Let the next request wait for the event that is returned, then answer it, in full where nothing else is said."""
        event = asyncio.Event()

        async def handler(request, responder):
            await event.wait()
            await (answer or self.complete)(request, responder)

        self.script.append(handler)
        return event

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
    def status(
        status,
        body=b'{"error":{"message":"worker says no"}}',
        headers=(),
        content_type="application/json",
    ):
        """Answer with a status."""

        async def handler(request, responder):
            responder.send(status, body, headers=headers, content_type=content_type)

        return handler

    @staticmethod
    def drop():
        """Close the connection without an answer."""

        async def handler(request, responder):
            responder.abort()

        return handler

    @staticmethod
    def hang():
        """Answer nothing until the client has left."""

        async def handler(request, responder):
            gone = asyncio.Event()
            responder.on_disconnect(gone.set)
            await gone.wait()

        return handler

    @staticmethod
    def stream(*data, event=None, then=b"", broken=False):
        """Stream some bytes and, once an event is set, some more; then end in order, or break the connection."""

        async def handler(request, responder):
            responder.start(200)
            for each in data:
                responder.write(each)
            if event is not None:
                await event.wait()
            responder.write(then)
            if broken:
                responder.abort()
            else:
                responder.end()

        return handler
