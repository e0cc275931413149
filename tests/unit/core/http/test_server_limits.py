import asyncio
import gc
import resource
from contextlib import suppress

import orjson
import pytest

from penstock.core.http import server_connection
from penstock.core.http.request_reader import RequestReader
from penstock.core.http.server import HttpServer, ServerLimits

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer(request, responder):
    """Answer at once."""
    responder.send(200, b"ok")


def code_of(response):
    """Check the form of a refusal; return its status and code."""
    status, headers, body = response
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert headers["connection"] == "close"
    return status, error["code"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400, "malformed_request")),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", (400, "malformed_request")),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", (400, "malformed_request")),
        (b"GET / HTTP/1.1\r\n\r\n", (400, "missing_host")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", (400, "malformed_host")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", (400, "malformed_host")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost:\r\n\r\n", (400, "malformed_host")),
        (b"GET / HTTP/1.1\r\nHost: user@x\r\n\r\n", (400, "malformed_host")),
        (b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n", (400, "malformed_host")),
        (b"GET / HTTP/1.0\r\nHost: x y\r\n\r\n", (400, "malformed_host")),
        (b"GET http://user@x/ HTTP/1.1\r\nHost: x\r\n\r\n", (400, "malformed_target")),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", (505, "version_unsupported")),
        (b"GET / HTTP/0.9\r\n\r\n", (505, "version_unsupported")),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            (501, "transfer_coding_unsupported"),
        ),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\n" + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n",
            (400, "malformed_request"),
        ),
        (
            b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            (400, "malformed_request"),
        ),
        (b"GET http://a:99999/ HTTP/1.1\r\nHost: x\r\n\r\n", (400, "malformed_target")),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", (400, "connect_unsupported")),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1x\r\n\r\n", (400, "malformed_request")),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            (400, "malformed_request"),
        ),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
            (400, "malformed_request"),
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n", (413, "body_too_large")),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\nExpect: 100-continue\r\n\r\n",
            (413, "body_too_large"),
        ),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"x" * 101,
            (413, "body_too_large"),
        ),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Big: " + b"b" * 1000 + b"\r\n\r\n", (431, "headers_too_large")),
        (b"GET /" + b"u" * 1000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\n\r\n", (417, "expectation_failed")),
    ],
)
async def test_what_is_refused(ask, raw, expected):
    """Each breach of syntax or bound has its status and code, and ends the connection."""
    client = await ask(answer, raw, max_header_bytes=500, max_body_bytes=100)
    assert code_of(await client.response()) == expected
    assert await client.rest() == b""


@pytest.mark.parametrize(
    "host", [b"", b"a_b.example:80", b"[::1]:8000", b"127.0.0.1", b"x ", b"%41", b"router.default.svc:"]
)
async def test_every_valid_host_is_served(ask, host):
    """A host is a name, an address or nothing, with a port or without."""
    client = await ask(answer, b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert (await client.response())[0] == 200


async def test_a_body_that_is_not_wanted_is_not_read(stack, connect):
    """A request is answered from its head, before its body comes, and its connection ends."""
    seen = []

    async def refuse(request, responder):
        seen.append((request.path, request.body))
        responder.send(401, b"no")

    server = HttpServer(refuse, wants_body=lambda request: b"authorization" in request.headers)
    await server.start("127.0.0.1", 0)
    stack.push_async_callback(server.close, grace_s=0.2)
    client = await connect(server)
    client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\nExpect: 100-continue\r\n\r\n")
    client.send(b"x" * 100_000)
    status, headers, _ = await client.response()
    assert (status, headers["connection"]) == (401, "close")
    assert await client.rest() == b""
    client = await connect(server)
    client.send(b"POST /b HTTP/1.1\r\nHost: x\r\nAuthorization: k\r\nContent-Length: 2\r\n\r\nok")
    assert (await client.response())[0] == 401
    assert seen == [("/a", b""), ("/b", b"ok")]


async def test_bodies_of_all_connections_are_bounded_together(serve, connect, until):
    """What does not fit alongside the others' bodies is answered 503; as soon as one of those goes, there is room."""
    server = await serve(answer, max_body_bytes=100, max_buffered_bytes=150)
    part = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"x" * 99
    first, second = await connect(server), await connect(server)
    first.send(part)
    await until(lambda: server.intake.buffered_bytes == 99)
    second.send(part)
    response = await second.response()
    assert code_of(response) == (503, "body_buffers_full")
    assert response[1]["retry-after"] == "1"
    assert server.intake.buffered_bytes == 99
    await first.close()
    await until(lambda: server.intake.buffered_bytes == 0)
    for _ in range(3):
        third = await connect(server)
        third.send(part + b"x")
        assert (await third.response())[0] == 200
    assert server.intake.buffered_bytes == 0


async def test_a_body_that_never_arrived_whole_goes_with_its_connection(serve, connect, until):
    """What a client left behind is freed at once, without the cyclic collector."""
    gc.collect()
    gc.disable()
    try:
        server = await serve(answer)
        client = await connect(server)
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 50_000)
        await until(lambda: server.intake.buffered_bytes == 50_000)
        await client.close()
        await until(lambda: not server.connections)
        await asyncio.sleep(0)
        assert [each for each in gc.get_objects() if isinstance(each, RequestReader)] == []
    finally:
        gc.enable()


async def test_a_pipelined_head_behind_a_long_body_is_not_counted_twice(serve, connect):
    """Only the head itself counts against the bound, not the body read together with it."""
    client = await connect(await serve(answer, max_header_bytes=100))
    client.send(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
        + b"x" * 5000
        + b"GET / HTTP/1.1\r\nHost:"
    )
    assert (await client.response())[0] == 200
    client.send(b" x\r\n\r\n")
    assert (await client.response())[0] == 200


async def test_a_refusal_waits_for_the_answers_before_it(ask):
    """Garbage behind a good request is refused after the good one has been answered."""
    gate = asyncio.Event()

    async def handler(request, responder):
        await gate.wait()
        responder.send(200, b"good")

    client = await ask(handler, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\x00\x01\x02\r\n\r\n")
    await asyncio.sleep(0.02)
    gate.set()
    assert (await client.response())[2] == b"good"
    assert code_of(await client.response()) == (400, "malformed_request")


async def test_idle_connections_are_closed_without_a_word(serve, connect):
    """Neither a fresh nor a kept connection stays open for ever; no bytes are sent."""
    server = await serve(answer, keep_alive_s=0.08)
    fresh, kept = await connect(server), await connect(server)
    kept.send(GET)
    await kept.response()
    assert await fresh.rest() == b""
    assert await kept.rest() == b""


async def test_a_slow_handler_is_not_an_idle_connection(ask):
    """Keep-alive time does not run while an answer is awaited."""

    async def handler(request, responder):
        await asyncio.sleep(0.3)
        responder.send(200, b"slow")

    client = await ask(handler, keep_alive_s=0.05)
    assert (await client.response())[2] == b"slow"


async def test_connections_beyond_the_bound_are_answered_503(serve, connect, until):
    """The connection too many gets an answer; the others continue, and there is room again after a close."""
    server = await serve(answer, max_connections=2, reserve_connections=0)
    first, second = await connect(server), await connect(server)
    for client in (first, second):
        client.send(GET)
        assert (await client.response())[0] == 200
    third = await connect(server)
    assert code_of(await third.response()) == (503, "too_many_connections")
    await third.close()
    await first.close()
    await until(lambda: server.connections <= 1)
    fourth = await connect(server)
    fourth.send(GET)
    assert (await fourth.response())[0] == 200


@pytest.fixture
def serve_vital(stack):
    """Start a server for which /health is vital, with limits as keywords."""

    async def start(**limits):
        server = HttpServer(
            answer, limits=ServerLimits(**limits), is_vital=lambda request: request.path == "/health"
        )
        await server.start("127.0.0.1", 0)
        stack.push_async_callback(server.close, grace_s=0.2)
        return server

    return start


async def test_probes_are_answered_when_all_connections_are_in_use(serve_vital, connect):
    """Behind the bound a vital request is served, another gets its 503, and both connections end."""
    server = await serve_vital(max_connections=1, reserve_connections=2)
    first = await connect(server)
    first.send(GET)
    assert (await first.response())[0] == 200
    probe, other = await connect(server), await connect(server)
    probe.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    status, headers, _ = await probe.response()
    assert (status, headers["connection"]) == (200, "close")
    other.send(GET)
    assert code_of(await other.response()) == (503, "too_many_connections")
    assert await probe.rest() == await other.rest() == b""


async def test_the_reserve_is_bounded_and_the_loss_is_logged(serve_vital, connect, until, caplog):
    """Behind the reserve a connection is refused before it asks; the log says how many were."""
    server = await serve_vital(max_connections=1, reserve_connections=1, keep_alive_s=0.2)
    clients = [await connect(server) for _ in range(4)]
    for client in clients[2:]:
        assert code_of(await client.response()) == (503, "too_many_connections")
    await until(lambda: "connections refused: all are in use" in caplog.text)


async def test_those_who_are_turned_away_hold_few_open_files(serve, connect, until, monkeypatch):
    """A flood of connections, each of which holds one until it has read its refusal, must not use up all."""
    monkeypatch.setattr(server_connection, "MAX_LINGERING", 2)
    server = await serve(answer, max_connections=1, reserve_connections=0)
    clients = [await connect(server) for _ in range(8)]
    await until(lambda: server.connections == 3)
    for client in clients[1:3]:
        assert code_of(await client.response()) == (503, "too_many_connections")
    for client in clients[3:]:
        with suppress(ConnectionError):
            assert await client.rest() == b""


async def test_the_limit_of_open_files_bounds_the_connections(serve_vital, connect, caplog):
    """A server that cannot open as many files as it may have connections says so and serves fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
        server = await serve_vital(max_connections=10**9, files_per_connection=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "fewer connections than configured" in caplog.text
    assert 1 <= server._shared.bound < 512


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


FRAMING = {"max_header_bytes": 500}, (400, "too_much_framing")


@pytest.mark.parametrize(
    ("begin", "piece", "limits", "expected"),
    [
        (GET[:-2] + b"X-Big: ", b"b" * 100, {"max_header_bytes": 500}, (431, "headers_too_large")),
        (GET[:-2], b"a:\r\n" * 300, {}, (431, "headers_too_large")),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n",
            b"x" * 10_000,
            {"max_body_bytes": 1000},
            (413, "body_too_large"),
        ),
        (CHUNKED + b"0\r\nX-Trailer: ", b"t" * 100, *FRAMING),
        (CHUNKED + b"0\r\n", b"X-Trailer: t\r\n" * 10, *FRAMING),
        (CHUNKED + b"1;ext=", b"e" * 100, *FRAMING),
        (CHUNKED, b"2\r\nab\r\n" * 20, *FRAMING),
    ],
    ids=["a header", "fields", "an upload", "a trailer", "trailers", "a chunk extension", "tiny chunks"],
)
async def test_what_never_ends_is_refused(ask, begin, piece, limits, expected):
    """Counted before the parser delivers it; a client that still sends reads its refusal in spite of that."""
    client = await ask(answer, begin, **limits)
    for _ in range(100):
        client.send(piece)
        await asyncio.sleep(0)
    assert code_of(await client.response()) == expected


@pytest.mark.parametrize(
    ("sent", "limit"),
    [
        (b"GET / HTTP/1.1\r\nHost:", "header_timeout"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc", "body_timeout"),
    ],
)
async def test_silence_inside_a_request_is_answered_408(ask, sent, limit):
    """A client that does not finish its headers, or stops inside its body, is told so."""
    client = await ask(answer, sent, **{f"{limit}_s": 0.08})
    assert code_of(await client.response()) == (408, limit)


async def test_small_chunks_are_served_while_their_framing_is_modest(serve, connect):
    """A long body in chunks of 24 bytes, and a short one byte by byte, are not abuse."""
    client = await connect(await serve(answer, max_header_bytes=500))
    for body in (b"18\r\n%b\r\n" % (b"x" * 24) * 5000, b"1\r\nx\r\n" * 90):
        client.send(CHUNKED)
        for at in range(0, len(body), 1000):
            client.send(body[at : at + 1000])
            await asyncio.sleep(0)
        client.send(b"0\r\n\r\n")
        assert (await client.response())[0] == 200


async def test_a_body_sent_drop_by_drop_is_answered_408(serve, connect):
    """Head and body have a limit in all; single bytes do not extend it, and shutdown is not held."""
    server = await serve(answer, body_timeout_s=5, receive_timeout_s=0.1)
    client = await connect(server)
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n")

    async def drip():
        while True:
            client.send(b"x")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    assert code_of(await client.response()) == (408, "receive_timeout")
    dripping.cancel()
