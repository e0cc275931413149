"""Real loopback servers, pools and scripted peers for the wire tests."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest
import uvloop
from patience import until

from penstock.core.http.client import ConnectionPool
from penstock.core.http.server import HttpServer, ServerLimits


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on; a test may name both loops."""
    marker = item.get_closest_marker("asyncio")
    if marker is not None and "loop_factories" in marker.kwargs:
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def stack():
    """Close what a test opened, last first."""
    async with AsyncExitStack() as exits:
        yield exits


@pytest.fixture
def serve(stack):
    """Return a coroutine function that starts a server for a handler, with limits as keywords."""

    async def start(handler, **limits):
        server = HttpServer(handler, limits=ServerLimits(**limits))
        await server.start("127.0.0.1", 0)
        stack.push_async_callback(server.close, grace_s=0.2)
        return server

    return start


@pytest.fixture
def make_pool(stack):
    """Make a pool that is closed at the end."""

    def make(*limits):
        pool = ConnectionPool(*limits)
        stack.push_async_callback(pool.close)
        return pool

    return make


@pytest.fixture
def pool(make_pool):
    """A pool of connections."""
    return make_pool()


@pytest.fixture(name="until")
def until_fixture():
    """Return a coroutine function that waits for a predicate."""
    return until


@pytest.fixture
def at_rest():
    """Return a coroutine function that waits until a number stands still from one look to the next."""

    async def wait(number, *, look_s=0.1):
        before = None
        while number() != before:
            before = number()
            await asyncio.sleep(look_s)

    return wait


class Flood:
    """A handler that writes pieces of 64 KiB, each when the one before it has drained.

    Attributes:
        total: Bytes that it is to write.
        sent: Bytes that it has written.
    """

    def __init__(self, pieces):
        self.total = pieces * 65536
        self.sent = 0

    async def __call__(self, request, responder):
        """Write all pieces."""
        room = asyncio.Event()
        room.set()
        responder.on_pause(room.clear)
        responder.on_resume(room.set)
        responder.cancel_on_disconnect()
        responder.start(200)
        while self.sent < self.total:
            responder.write(b"x" * 65536)
            self.sent += 65536
            await room.wait()
        responder.end()


@pytest.fixture
def flood():
    """Return a function that makes a flood of this many pieces."""
    return Flood


@pytest.fixture
def in_two():
    """Return a function that makes a handler which answers in two pieces, the second once a gate is open."""

    def make(gate, first, second):
        async def handler(request, responder):
            responder.start(200)
            responder.write(first)
            await gate.wait()
            responder.write(second)
            responder.end()

        return handler

    return make


class RawClient:
    """Sends bytes as they are and reads what comes back."""

    def __init__(self, reader, writer):
        self.reader = reader
        self.writer = writer

    def send(self, data):
        """Send bytes."""
        self.writer.write(data)

    async def head(self):
        """Return status line and headers (lower-case names) of the next response."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = raw[:-4].decode().split("\r\n")
        return status, {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}

    async def response(self):
        """Return (status, headers, body) of the next response with a content-length."""
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, body

    async def exactly(self, count):
        """Return the next ``count`` bytes."""
        return await self.reader.readexactly(count)

    async def rest(self):
        """Return everything until the server closes; a reset counts as the end."""
        with suppress(ConnectionError):
            return await self.reader.read()
        return b""

    async def close(self):
        """Close the connection."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@pytest.fixture
def connect(stack):
    """Open a raw connection to a server."""

    async def open_(server, **kwargs):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, **kwargs)
        client = RawClient(reader, writer)
        stack.push_async_callback(client.close)
        return client

    return open_


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def ask(serve, connect):
    """Return a coroutine function that serves a handler, with limits as keywords, and sends it bytes: a GET by default."""

    async def start(handler, sent=GET, **limits):
        client = await connect(await serve(handler, **limits))
        client.send(sent)
        return client

    return start


class Peer:
    """A scripted upstream: counts connections and requests, answers what the script says."""

    def __init__(self, script):
        self.script = script
        self.connections = 0
        self.requests = []
        self.closed = asyncio.Event()
        self.url = ""

    async def __call__(self, reader, writer):
        """Run the script for one connection."""
        self.connections += 1
        number = self.connections
        try:
            await self.script(self, number, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self.closed.set()

    async def request(self, reader):
        """Read one request without or with a content-length body."""
        raw = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in raw.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        raw += await reader.readexactly(length)
        self.requests.append(raw)
        return raw


@pytest.fixture
def peer(stack):
    """Return a coroutine function that starts a scripted upstream."""

    async def start(script):
        upstream = Peer(script)
        server = await asyncio.start_server(upstream, "127.0.0.1", 0)
        upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stack.callback(server.close)
        return upstream

    return start


@pytest.fixture
def answering(peer):
    """Return a coroutine function that starts an upstream which sends parts as reads of their own; it closes, or waits."""

    async def start(*parts, then_close=True):
        async def script(peer, number, reader, writer):
            await peer.request(reader)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.005)
            if not then_close:
                await reader.read()

        return await peer(script)

    return start
