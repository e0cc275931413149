"""A server that ends: clients that were promised a kept connection lose no request, and nobody keeps the process."""

import asyncio
import socket

import pytest

from penstock.core.http.server import BACKLOG, HttpServer

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def hold(serve):
    """Return a coroutine function that serves answers which wait for the gate returned with the server."""

    async def start(**limits):
        gate = asyncio.Event()

        async def handler(request, responder):
            await gate.wait()
            responder.send(200, request.path.encode())

        return await serve(handler, **limits), gate

    return start


async def echo(request, responder):
    """Answer with the path."""
    responder.send(200, request.path.encode())


def get(path):
    """Return a request for a path."""
    return GET.replace(b"/ ", b"%b " % path, 1)


async def closing(server, *, grace_s=60):
    """Begin to close a server and return the task once it no longer accepts."""
    task = asyncio.create_task(server.close(grace_s=grace_s))
    await asyncio.sleep(0)  # its first step stops the server from accepting
    assert server._shared.closing_since_s is not None
    return task


async def test_a_busy_connection_serves_one_request_more(serve, connect, in_two):
    """A response whose head promised to keep the connection is followed by one that announces its end."""
    gate = asyncio.Event()
    server = await serve(in_two(gate, b"a", b"b"))
    client = await connect(server)
    client.send(GET)
    _, headers = await client.head()
    assert "connection" not in headers
    ended = await closing(server)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)
    gate.set()
    assert await client.exactly(17) == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
    assert not ended.done()
    client.send(GET)
    _, headers = await client.head()
    assert headers["connection"] == "close"
    assert await client.rest() == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
    await ended
    assert server.connections == 0


async def test_an_idle_connection_serves_one_request_more(serve, connect):
    """A client between two requests is not reset by the next one; the server waits for nothing longer."""
    server = await serve(echo)
    client = await connect(server)
    client.send(get(b"/first"))
    assert "connection" not in (await client.response())[1]
    ended = await closing(server)
    client.send(get(b"/next"))
    status, headers, body = await client.response()
    assert (status, headers["connection"], body) == (200, "close", b"/next")
    assert await client.rest() == b""
    await ended


async def test_an_answer_whose_head_is_not_sent_announces_the_end(hold, connect, until):
    """It is known before the head leaves, so that the client need not try a request more."""
    server, gate = await hold()
    client = await connect(server)
    client.send(GET)
    await until(lambda: server.handlers)
    ended = await closing(server)
    gate.set()
    status, headers, _ = await client.response()
    assert (status, headers["connection"]) == (200, "close")
    await ended


async def test_connections_that_stay_idle_are_closed(serve, connect):
    """The wait for a next request is bounded, also on a connection that never had one, and long before the grace is over."""
    server = await serve(echo, drain_idle_s=0.05)
    used, unused = await connect(server), await connect(server)
    used.send(GET)
    await used.response()
    ended = await closing(server)
    assert await used.rest() == await unused.rest() == b""
    await ended


async def test_the_idle_wait_counts_from_the_drain_on(serve, connect):
    """A client that has rested for long gets the full wait for its next request."""
    server = await serve(echo, drain_idle_s=5)
    await connect(server)
    (connection,) = server._shared.connections
    ended = await closing(server)
    now_s = server._shared.draining_since_s
    connection._since_s = now_s - 60
    connection.sweep(now_s + 4.9)
    assert not connection._transport.is_closing()
    connection.sweep(now_s + 5.1)
    await ended


async def test_idle_connections_end_in_order_with_the_grace(serve, connect, caplog):
    """A grace shorter than the idle wait closes them without a reset, and nothing is reported as cut off."""
    server = await serve(echo)
    client = await connect(server)
    client.send(GET)
    await client.response()
    await server.close(grace_s=0.05)
    assert await client.reader.read() == b""
    assert "cut off" not in caplog.text


@pytest.mark.parametrize("is_begun", [False, True])
async def test_pipelined_requests_that_have_arrived_are_all_answered(hold, connect, until, is_begun):
    """The last one's answer announces the end, whether the drain begins before their first or with it under way."""
    server, gate = await hold()
    client = await connect(server)
    paths = [b"/a", b"/b", b"/c"]
    sent = b"".join(map(get, paths))
    if is_begun:
        client.send(sent)
        await until(lambda: server.handlers)
    ended = await closing(server)
    if not is_begun:
        client.send(sent)
    gate.set()
    answers = [await client.response() for _ in paths]
    assert [body for _, _, body in answers] == paths
    assert [headers.get("connection") for _, headers, _ in answers] == [None, None, "close"]
    assert await client.rest() == b""
    await ended


async def test_a_request_that_is_arriving_is_answered(hold, connect, until):
    """The part of a head behind a request under way counts: the first answer keeps the connection for it."""
    server, gate = await hold()
    client = await connect(server)
    client.send(GET + GET[:9])
    await until(lambda: server.handlers)
    ended = await closing(server)
    gate.set()
    assert "connection" not in (await client.response())[1]
    client.send(GET[9:])
    assert (await client.response())[1]["connection"] == "close"
    await ended


async def test_a_client_that_pipelines_without_end_does_not_keep_the_server(hold, connect, until):
    """Requests that arrive behind the last answer's begin are not served, and do not cost the client that answer."""
    server, gate = await hold()
    client = await connect(server)
    client.send(get(b"/last"))
    await until(lambda: server.handlers)
    ended = await closing(server)
    client.send(GET * 5)
    await until(lambda: [each for each in server._shared.connections if each._queue])
    gate.set()
    status, headers, body = await client.response()
    assert (status, headers["connection"], body) == (200, "close", b"/last")
    assert await client.rest() == b""
    await client.close()
    await ended


async def test_a_half_closed_client_is_gone(serve, connect, in_two, until):
    """One that has ended its sending side keeps neither an idle connection nor a response under way."""
    gate = asyncio.Event()
    server = await serve(in_two(gate, b"a", b"b"))
    idle, busy = await connect(server), await connect(server)
    busy.send(GET)
    await busy.head()
    ended = await closing(server)
    for client in (idle, busy):
        client.writer.write_eof()
    await until(lambda: server.connections == 0)
    gate.set()
    await ended


async def test_a_slow_sender_is_waited_for_while_it_sends(serve, connect, until):
    """A request that began before the end arrives in pieces, each within the silence allowed, and is answered."""
    server = await serve(echo, closing_s=5)
    client = await connect(server)
    client.send(GET[:5])
    await until(lambda: [each for each in server._shared.connections if each._is_arriving])
    ended = await closing(server)
    (connection,), now_s = server._shared.connections, server._shared.closing_since_s
    connection._read_s = now_s + 8  # as if a byte had come then
    connection.sweep(now_s + 9)
    client.send(GET[5:])
    assert (await client.response())[1]["connection"] == "close"
    await ended


async def test_http_1_0_clients_end_with_their_answer(hold, connect, until):
    """A kept connection of HTTP/1.0 is told by leaving the keep-alive away."""
    server, gate = await hold()
    client = await connect(server)
    client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    await until(lambda: server.handlers)
    ended = await closing(server)
    gate.set()
    assert (await client.response())[1]["connection"] == "close"
    await ended


async def test_a_drain_still_accepts_connections_for_one_request_each(serve, connect):
    """Probes reach a process that drains; what they keep does not keep it."""
    server = await serve(echo)
    server.drain()
    client = await connect(server)
    client.send(GET)
    assert (await client.response())[1]["connection"] == "close"
    assert await client.rest() == b""


class PatientClient:
    """Asks without a pause on a kept connection, and opens another one only when the server says so, or breaks it."""

    def __init__(self, address):
        self.address = address
        self.answered = 0
        self.lost = []
        self.is_over = False

    async def run(self):
        """Ask until it is over."""
        while not self.is_over:
            try:
                reader, writer = await asyncio.open_connection(*self.address)
                await self._ask(reader, writer)
                writer.close()
            except (OSError, asyncio.IncompleteReadError) as exc:
                self.lost.append(exc)

    async def _ask(self, reader, writer):
        head = b""
        while b"connection: close" not in head and not self.is_over:
            writer.write(GET)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1)
            self.answered += 1


async def test_no_request_is_lost_while_servers_take_turns_at_one_socket(stack, until):
    """Nor is a connection refused: over ten restarts, those that come in between wait at the socket."""
    held = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))

    async def serve():
        server = HttpServer(echo)
        await server.start("127.0.0.1", 0, held=held.dup())
        assert server.port == held.getsockname()[1]
        return server

    server = await serve()
    clients = [PatientClient(held.getsockname()) for _ in range(8)]
    async with asyncio.TaskGroup() as running:
        for client in clients:
            running.create_task(client.run())
        for _ in range(10):
            goals = [(client, client.answered + 1) for client in clients]
            await server.close(grace_s=60)
            server = await serve()
            for client, goal in goals:
                await until(lambda client=client, goal=goal: client.answered >= goal)
        for client in clients:
            client.is_over = True
    await server.close(grace_s=1)
    assert [client.lost for client in clients] == [[]] * 8
