import asyncio

import httptools

from penstock.core.errors import UpstreamError
from penstock.core.http.intake import Intake
from penstock.core.http.limits import ServerLimits
from penstock.core.http.server_connection import ServerConnection, ServerContext

LIMITS = ServerLimits(max_header_bytes=2048, max_body_bytes=8192, max_connections=4)
FAR_S = 1e6
"""Later than every limit of a connection."""

CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CORPUS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /stream?a=b&c=%20 HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n" * 3,
    b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /raise HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    CHUNKED + b"5;e=1\r\nhello\r\n6\r\n world\r\n0\r\nX-Trailer: t\r\n\r\n",
    b"POST /keyless HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    CHUNKED + b"1\r\nx\r\n" * 600 + b"0\r\n\r\n",
    CHUNKED + b"0\r\n" + b"X-Trailer: t\r\n" * 20 + b"\r\n",
    b"GET /silent HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" * 5,
    b"HEAD /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\nGET http://x:80/late HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n" * 80,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
]
TOKENS = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"%", b"?", b"*", b"/", b"\xff\xfe", b"A" * 3000,
    b"Host: x\r\n", b"Host: a@b\r\n", b"Content-Length: 5\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Expect: 100-continue\r\n", b"HTTP/1.0", b"HTTP/2.0",
    b"CONNECT a:1 ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"http://a:99999/", b"http://[::1", b"//", b"0\r\n\r\n",
    b"ffffffffffffffffff\r\n", b"5\r\n", b"a:\r\n" * 300,
]  # fmt: skip


async def handler(request, responder):
    """Do what the path says: answer, stream, fail, be late, or forget to answer."""
    if request.path == "/raise":
        raise UpstreamError(request.target.decode("latin-1"))
    if request.path == "/silent":
        return
    if request.path == "/broken":
        responder.start(200)
        responder.write(request.body)
        responder.break_off()
        return
    if request.path == "/late":
        await asyncio.sleep(0)
    if request.path == "/stream":
        responder.start(200)
        responder.write(request.body or b"x")
        await asyncio.sleep(0)
        responder.write(repr(request.query).encode())
        responder.end()
        return
    responder.send(200, request.body)


async def turns(count):
    """Give the loop some turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def attack(rng, reads, shared, wire):
    """Send reads to a fresh connection; return it."""
    connection = wire.protocol = ServerConnection(shared)
    connection.connection_made(wire)
    for data in reads:
        if wire.is_closed:
            break
        connection.data_received(data)
        assert_bounded(connection)
        if rng.random() < 0.3:
            await turns(1)
    return connection


def assert_bounded(connection):
    """What a connection holds is bounded by its limits, not by what it has been sent."""
    reader = connection._reader
    assert connection._queued_bytes <= LIMITS.max_body_bytes
    assert len(connection._queue) <= 33
    if reader is not None:
        assert len(reader._url) <= LIMITS.max_header_bytes + 16384
        assert reader._part_bytes <= LIMITS.max_body_bytes + 16384


async def test_any_bytes_end_in_answers_or_a_close(rounds, mutate, pieces, make_wire, caplog):
    """No bytes raise, hold memory beyond the limits, or leave a connection without an answer or an end."""
    caplog.set_level("CRITICAL")
    loop, faults = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _loop, context: faults.append(context))
    for name, rng in rounds:
        shared = ServerContext(
            handler, Intake(LIMITS), lambda request: False, lambda request: request.path != "/keyless"
        )
        shared.loop, shared.bound = loop, LIMITS.max_connections
        data = mutate(rng, CORPUS, TOKENS)
        try:
            wire = make_wire()
            connection = await attack(rng, pieces(rng, data), shared, wire)
            for _ in range(1000):  # more than the requests of one connection take
                if not shared.responders and not connection._queue:
                    break
                await turns(20)
            assert not shared.responders
            if rng.random() < 0.3 and not wire.is_closed:
                connection.eof_received()
                wire.close()
            for later in range(1, 4):
                connection.sweep(loop.time() + later * FAR_S)
                await turns(10)
            assert wire.is_closed
            assert not shared.connections
            assert shared.intake.buffered_bytes == 0
            if b"HEAD " not in data:  # the parser would wait for the body that such an answer announces
                httptools.HttpResponseParser(object()).feed_data(bytes(wire.written))
            assert not faults
        except BaseException as exc:
            exc.add_note(f"{name} data={data[:400]!r}")
            raise
