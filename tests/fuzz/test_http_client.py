import asyncio

from penstock.core.errors import UpstreamError
from penstock.core.http.client_connection import ClientConnection, Origin
from penstock.core.http.limits import Timeouts

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CORPUS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\nno",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the close",
    b"HTTP/1.1 999 What\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 101 Switching\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    CHUNKED + b'e\r\ndata: {"a":1}\n\n\r\n' * 3 + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    CHUNKED + b"5;e=1\r\nhello\r\n0\r\nX-Trailer: t\r\n\r\n",
    CHUNKED + b"1\r\nx\r\n" * 300 + b"0\r\n" + b"X-Trailer: t\r\n" * 20 + b"\r\n",
]
TOKENS = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\0", b" ", b":", b"\xff", b"A" * 3000, b"HTTP/1.1 999 No\r\n", b"HTTP/1.1 101 S\r\n",
    b"HTTP/1.1 0 \r\n", b"Content-Length: 5\r\n", b"Content-Length: 99999999999999999999\r\n", b"0\r\n\r\n", b"5\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: x\r\n", b"a:\r\n" * 300,
    b"ffffffffffffffff\r\n", b"-1\r\n", b"X: " + b"y" * 90_000,
]  # fmt: skip


async def deliver(rng, reads, wire, connection):
    """Read until the connection is closed, then lose it."""
    for data in reads:
        if wire.is_closed:
            break
        connection.data_received(data)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    connection.connection_lost(None)


async def outcome(connection):
    """Return the status of a whole response, or the error that ended it."""
    try:
        response = await connection.exchange(b"", b"", Timeouts(), None)
        await response.read(limit_bytes=10_000_000)
    except UpstreamError as exc:
        return exc
    return response.status


async def test_any_response_ends_in_a_status_or_an_upstream_error(rounds, mutate, pieces, make_wire):
    """No bytes of a worker raise anything else, pass as a status that HTTP does not have, or leave a reader waiting."""
    loop = asyncio.get_running_loop()
    for name, rng in rounds:
        wire, freed, gone = make_wire(), [], []
        connection = ClientConnection(Origin("h", 80), loop, freed.append, gone.append)
        connection.connection_made(wire)
        data = mutate(rng, CORPUS, TOKENS)
        try:
            reading = asyncio.create_task(outcome(connection))
            await asyncio.sleep(0)
            await deliver(rng, pieces(rng, data), wire, connection)
            end = await reading
            assert isinstance(end, UpstreamError) or 200 <= end <= 599
            assert len(gone) == 1
            assert len(freed) <= 1
            assert not connection.busy
        except BaseException as exc:
            exc.add_note(f"{name} data={data[:400]!r}")
            raise
