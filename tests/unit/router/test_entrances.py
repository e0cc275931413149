"""The same limits hold for a request whatever the entrance it comes by: an HTTP connection, or a gateway's stream."""

import asyncio

import httptools
import orjson
import pytest

pytest.importorskip("grpc", reason="needs penstock[gateway]")
pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2", reason="needs penstock[gateway]")

import grpc.aio
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from penstock.api import Role, RouterConfig
from penstock.core.http.intake import Intake
from penstock.core.http.server import HttpServer, ServerLimits
from penstock.router.core.worker import WorkerSpec
from penstock.router.gateway.ext_proc_stream import GatewayStream
from penstock.router.gateway.server import GatewayPicker
from penstock.router.settings import RouterSettings

FULL = ProcessingMode.FULL_DUPLEX_STREAMED
PATH = "/v1/completions"


async def answer(request, responder):
    """Answer how many bytes came."""
    responder.send(200, b"%d" % len(request.body))


class Read:
    """What a client of the HTTP server has read."""

    def __init__(self, data):
        self.body = b""
        self.headers = {}
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(data)
        self.status = parser.get_status_code()

    def on_header(self, name, value):
        """Keep it."""
        self.headers[name.lower()] = value

    def on_body(self, data):
        """Keep it."""
        self.body += data


async def by_http(limits, headers, parts, *, held=0, stalls=False):
    """Ask the HTTP server; returns status, body, and the bytes that are held behind the answer."""
    server = HttpServer(answer, limits=limits)
    await server.start("127.0.0.1", 0)
    server.intake.hold(held)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    framing = {} if "content-length" in headers else {"transfer-encoding": "chunked"}
    fields = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **framing}.items())
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{fields}\r\n".encode())
    for part in parts:
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
    if framing and not stalls:
        writer.write(b"0\r\n\r\n")
    found = Read(await reader.read())
    writer.close()
    left = server.intake.buffered_bytes - held
    await server.close(grace_s=0)
    return found.status, found.body, left


def spoken(headers, parts, *, stalls):
    """Envoy's messages of one request, which end it unless it stalls."""
    head = ProcessingRequest()
    head.protocol_config.request_body_mode = head.protocol_config.response_body_mode = FULL
    for name, value in {":path": PATH, ":method": "POST", ":authority": "x", **headers}.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    yield head
    for part in parts:
        message = ProcessingRequest()
        message.request_body.body = part
        yield message
    if not stalls:
        last = ProcessingRequest()
        last.request_body.end_of_stream = True
        yield last


async def by_gateway(limits, headers, parts, *, held=0, stalls=False):
    """Ask as Envoy does; returns as the other."""
    intake = Intake(limits)
    intake.hold(held)

    is_answered = asyncio.Event()

    async def messages():
        for each in spoken(headers, parts, stalls=stalls):
            yield each
        await is_answered.wait()

    exchange = GatewayStream(intake)
    run = asyncio.create_task(exchange.run(messages(), answer, lambda _: True))
    answers = exchange.answers()
    found = (await anext(answers)).immediate_response
    is_answered.set()
    await run
    return found.status.code, found.body, intake.buffered_bytes - held


TEN = [b"a" * 5, b"b" * 5]
TOO_LONG = 413, "body_too_large"


def length(digits):
    """The header that announces a body."""
    return {"content-length": digits}


@pytest.mark.parametrize("ask", [by_http, by_gateway])
@pytest.mark.parametrize(
    ("limits", "asked", "more", "expected"),
    [
        ({}, ({}, TEN), {}, (200, "10")),
        ({"max_body_bytes": 9}, ({}, TEN), {}, TOO_LONG),
        ({"max_body_bytes": 9}, (length("10"), []), {}, TOO_LONG),
        ({}, (length("9" * 10_000), []), {}, TOO_LONG),
        ({"max_body_bytes": 9}, (length("0" * 10_000 + "10"), []), {}, TOO_LONG),
        ({"max_header_bytes": 600}, ({"x-big": "b" * 600}, []), {}, (431, "headers_too_large")),
        ({}, ({f"x-{number}": "" for number in range(300)}, []), {}, (431, "headers_too_large")),
        ({"max_buffered_bytes": 99}, ({}, TEN), {"held": 90}, (503, "body_buffers_full")),
        ({"receive_timeout_s": 0.1}, ({}, TEN), {"stalls": True}, (408, "receive_timeout")),
    ],
    ids=["within", "long", "announced", "absurd", "zeros", "head", "fields", "all bodies", "slow"],
)
async def test_every_entrance_has_the_same_limits(ask, limits, asked, more, expected):
    """The same status and code, and no byte is held behind the answer."""
    limits = ServerLimits(**{"max_header_bytes": 32_000, **limits})
    status, body, left = await ask(limits, *asked, **more)
    found = body.decode() if status == 200 else orjson.loads(body)["error"]["code"]
    assert (status, found, left) == (*expected, 0)


async def test_a_picker_s_gateways_share_the_limits_of_its_http_port():
    """What a slow client of the gateway holds counts for both, and ends in time."""
    config = RouterConfig.model_validate({"limits": {"headerTimeoutRealSeconds": 1}})
    spec = WorkerSpec("worker", Role.AGGREGATED, "http://127.0.0.1:9")
    settings = RouterSettings(
        model="llama", disaggregated=False, config=config, workers=(spec,), shutdown_grace_s=0.1
    )
    picker = GatewayPicker(settings, ext_proc_port=0)
    await picker.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.ext_proc_port}") as channel:
            process = channel.stream_stream(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                ProcessingRequest.SerializeToString,
                ProcessingResponse.FromString,
            )
            call = process()
            for each in spoken({}, [b"part"], stalls=True):
                await call.write(each)
            assert (await call.read()).immediate_response.status.code == 408
            assert picker.intake is picker._http.intake
    finally:
        await picker.close()
