import asyncio

import orjson
import pytest


async def answer(request, responder):
    """Answer at once."""
    responder.send(200, b"ok")


def code_of(response):
    """Check the form of a refusal; return its status and code."""
    status, headers, body = response
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "code"}
    assert headers["connection"] == "close"
    return status, error["code"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400, "malformed_request")),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", (400, "malformed_request")),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", (400, "malformed_request")),
        (b"GET / HTTP/1.1\r\n\r\n", (400, "missing_host")),
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
async def test_what_is_refused(serve, connect, raw, expected):
    """Each breach of syntax or bound has its status and code, and ends the connection."""
    client = await connect(await serve(answer, max_header_bytes=500, max_body_bytes=100))
    client.send(raw)
    assert code_of(await client.response()) == expected
    assert await client.rest() == b""


async def test_bounds_are_inclusive(serve, connect):
    """A body of exactly the bound is accepted."""
    client = await connect(await serve(answer, max_body_bytes=100))
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"x" * 100)
    assert (await client.response())[0] == 200


async def test_one_endless_header_is_refused(serve, connect):
    """A header that never ends is counted although the parser has not delivered it."""
    client = await connect(await serve(answer, max_header_bytes=500))
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\nX-Big: ")
    for _ in range(100):
        client.send(b"b" * 100)
        await asyncio.sleep(0)
    assert code_of(await client.response()) == (431, "headers_too_large")


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


async def test_a_refusal_waits_for_the_answers_before_it(serve, connect):
    """Garbage behind a good request is refused after the good one has been answered."""
    gate = asyncio.Event()

    async def handler(request, responder):
        await gate.wait()
        responder.send(200, b"good")

    client = await connect(await serve(handler))
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\x00\x01\x02\r\n\r\n")
    await asyncio.sleep(0.02)
    gate.set()
    assert (await client.response())[2] == b"good"
    assert code_of(await client.response()) == (400, "malformed_request")


async def test_a_client_that_is_still_sending_reads_its_413(serve, connect):
    """The refusal of a large upload is not lost to a connection reset."""
    client = await connect(await serve(answer, max_body_bytes=1000))
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(100):
        client.send(b"x" * 10_000)
        await asyncio.sleep(0)
    assert code_of(await client.response()) == (413, "body_too_large")


async def test_slow_headers_are_answered_408(serve, connect):
    """A client that does not finish its headers in time is told so."""
    client = await connect(await serve(answer, header_timeout_s=0.08))
    client.send(b"GET / HTTP/1.1\r\nHost:")
    assert code_of(await client.response()) == (408, "header_timeout")


async def test_a_silent_body_is_answered_408(serve, connect):
    """A client that stops inside its body is told so."""
    client = await connect(await serve(answer, body_timeout_s=0.08))
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
    assert code_of(await client.response()) == (408, "body_timeout")


async def test_idle_connections_are_closed_without_a_word(serve, connect):
    """Neither a fresh nor a kept connection stays open for ever; no bytes are sent."""
    server = await serve(answer, keep_alive_s=0.08)
    fresh, kept = await connect(server), await connect(server)
    kept.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await kept.response()
    assert await fresh.rest() == b""
    assert await kept.rest() == b""


async def test_a_slow_handler_is_not_an_idle_connection(serve, connect):
    """Keep-alive time does not run while an answer is awaited."""

    async def handler(request, responder):
        await asyncio.sleep(0.3)
        responder.send(200, b"slow")

    client = await connect(await serve(handler, keep_alive_s=0.05))
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.response())[2] == b"slow"


async def test_connections_beyond_the_bound_are_answered_503(serve, connect, until):
    """The connection too many gets an answer; the others go on, and there is room again after a close."""
    server = await serve(answer, max_connections=2)
    first, second = await connect(server), await connect(server)
    for client in (first, second):
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.response())[0] == 200
    third = await connect(server)
    assert code_of(await third.response()) == (503, "too_many_connections")
    await third.close()
    await first.close()
    await until(lambda: server.connections <= 1)
    fourth = await connect(server)
    fourth.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await fourth.response())[0] == 200
