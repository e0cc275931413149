import asyncio
import socket

import pytest

from penstock.core.http.server import HttpServer

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def slow_socket(port):
    """Connect a socket whose receive buffer is small, so that its peer feels back-pressure soon."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


async def test_a_slow_reader_costs_little_and_a_silent_one_is_cut_off(serve, flood, at_rest, until):
    """A response is held while its client does not read, continues when it does, and ends after the stall's bound."""
    source = flood(400)
    server = await serve(source, write_stall_s=0.5)
    loop = asyncio.get_running_loop()
    with slow_socket(server.port) as sock:
        await loop.sock_sendall(sock, GET)
        await at_rest(lambda: source.sent, look_s=0.05)
        held = source.sent
        assert held < source.total
        received = 0
        while received < held:
            received += len(await loop.sock_recv(sock, 65536))
        assert source.sent > held
        await until(lambda: not server.handlers)
    assert source.sent < source.total


async def test_a_client_that_leaves_its_last_answer_unread_is_cut_off(serve, until):
    """A closing connection does not wait for ever for a client that does not read."""

    async def handler(request, responder):
        responder.send(200, b"x" * 8_000_000)

    server = await serve(handler, write_stall_s=0.1)
    with slow_socket(server.port) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, GET[:-2] + b"Connection: close\r\n\r\n")
        await until(lambda: server.connections)
        await until(lambda: not server.connections)


async def test_no_new_handler_starts_for_a_client_that_does_not_read(serve, at_rest):
    """Pipelining without reading does not pile answers up in memory."""
    started = 0

    async def handler(request, responder):
        nonlocal started
        started += 1
        responder.send(200, b"x" * 1_000_000)

    server = await serve(handler)
    loop = asyncio.get_running_loop()
    with slow_socket(server.port) as sock:
        await loop.sock_sendall(sock, GET * 20)
        await at_rest(lambda: started, look_s=0.05)
        assert started < 20
        received = 0
        while received < 20_000_000:
            received += len(await loop.sock_recv(sock, 1 << 20))
    assert started == 20


async def test_requests_that_wait_for_their_turn_are_bounded(ask):
    """What a client pipelines beyond the bound is refused behind the answers of the others."""
    gate = asyncio.Event()

    async def handler(request, responder):
        await gate.wait()
        responder.send(200, b"")

    client = await ask(handler)
    client.send(GET * 1000)
    gate.set()
    answered = 0
    while (response := await client.response())[0] == 200:
        answered += 1
    assert 32 <= answered <= 33
    assert (response[0], b"too_many_pipelined" in response[2]) == (503, True)
    assert await client.rest() == b""


async def test_close_cuts_off_after_the_grace(connect):
    """A response that outlasts the grace is broken off, and its handler cancelled."""
    cancelled = asyncio.Event()

    async def handler(request, responder):
        responder.start(200)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server = HttpServer(handler)
    await server.start("127.0.0.1", 0)
    client = await connect(server)
    client.send(GET)
    await client.head()
    await server.close(grace_s=0.05)
    assert cancelled.is_set()
    assert await client.rest() == b""


@pytest.mark.parametrize("sent", [b"POST / HTTP/1.1\r\nHost", GET[:-2] + b"Content-Length: 9\r\n\r\nbody"])
async def test_close_does_not_wait_for_a_request_that_still_arrives(serve, connect, until, sent):
    """Neither head nor body in time: 503 long before the grace is over, which is for requests under way."""

    async def handler(request, responder):
        responder.send(200, b"")

    server = await serve(handler, closing_s=0.05)
    client = await connect(server)
    client.send(sent)
    await until(lambda: [each for each in server._shared.connections if each._reader.begun])
    closing = asyncio.create_task(server.close(grace_s=60))
    status, _, body = await client.response()
    assert (status, b"shutting_down" in body) == (503, True)
    await client.close()
    await closing


async def test_close_does_not_wait_for_a_client_that_does_not_read(serve, until, flood):
    """A client that takes not one byte is cut off, though its response is under way and the grace is long."""
    server = await serve(flood(1000), closing_s=0.05)
    with slow_socket(server.port) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, GET)
        await until(
            lambda: [each for each in server._shared.connections if each._stalled_since_s is not None]
        )
        await server.close(grace_s=60)
    assert server.connections == 0


async def test_close_lets_a_slow_reader_go_on_until_it_stops_reading(serve, until):
    """Some bytes between two looks keep a response alive, however long it takes; none for too long end it."""

    async def handler(request, responder):
        responder.send(200, b"x" * 8_000_000)

    server = await serve(handler, closing_s=5)
    loop = asyncio.get_running_loop()
    with slow_socket(server.port) as sock:
        await loop.sock_sendall(sock, GET)
        await until(
            lambda: [each for each in server._shared.connections if each._stalled_since_s is not None]
        )
        closing = asyncio.create_task(server.close(grace_s=60))
        await until(lambda: server._shared.closing_since_s is not None)
        (connection,), now_s = server._shared.connections, loop.time()
        connection.sweep(now_s)
        for look in range(1, 5):
            unsent_bytes = connection._transport.get_write_buffer_size()
            while connection._transport.get_write_buffer_size() == unsent_bytes:
                await loop.sock_recv(sock, 65536)
            connection.sweep(now_s + 4 * look)
            assert server.connections == 1
        connection.sweep(now_s + 4 * 4 + 6)
        await closing
