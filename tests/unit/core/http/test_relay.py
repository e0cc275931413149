import asyncio
import socket

from penstock.core.errors import ClientDisconnected, StreamBroken
from penstock.core.http.client import Timeouts
from penstock.core.http.sse import DONE, EventSplitter, encode_event
from penstock.core.http.streaming import relay


def unchanged(data, at):
    """Pass data on as it is."""
    return data


def relaying(pool, url, *, observe=unchanged, outcome=None, timeouts=None):
    """Return a handler that relays everything to ``url``."""

    async def handler(request, responder):
        try:
            upstream = await pool.stream("GET", url, timeouts=timeouts or Timeouts())
            responder.start(upstream.status)
            await relay(upstream, responder, observe=observe)
            responder.end()
        except Exception as exc:  # noqa: BLE001 - the outcome is what the tests ask for
            if outcome is not None:
                outcome.set_result(exc)
            responder.abort()

    return handler


def events_source(count, *, gate=None):
    """Return a handler that streams ``count`` events, then waits for the gate and ends."""

    async def handler(request, responder):
        responder.start(200)
        for number in range(count):
            responder.write(encode_event(b'{"n":%d}' % number))
            await asyncio.sleep(0)
        if gate is not None:
            await gate.wait()
        responder.write(DONE)
        responder.end()

    return handler


def url_of(server):
    """Return the URL of a server."""
    return f"http://127.0.0.1:{server.port}/"


async def test_relays_every_event_and_shows_it_to_the_observer(serve, pool, make_pool):
    """The client gets the source's bytes; the observer sees all events."""
    source = await serve(events_source(200))
    splitter, seen = EventSplitter(), []

    def observe(data, at):
        seen.extend(splitter.feed(data[at:-2] if at else data))
        return data

    front = await serve(relaying(make_pool(), url_of(source), observe=observe))
    response = await pool.request("GET", url_of(front))
    assert response.body == b"".join(encode_event(b'{"n":%d}' % n) for n in range(200)) + DONE
    assert seen == [*(encode_event(b'{"n":%d}' % n) for n in range(200)), DONE]


async def test_an_observer_may_change_what_is_sent(serve, pool, make_pool):
    """What the observer returns is what the client gets; nothing, for nothing."""
    source = await serve(events_source(3))

    def observe(data, at):
        body = data[at:-2] if at else data
        return body.replace(b'"n"', b'"m"').replace(DONE, b"")

    front = await serve(relaying(make_pool(), url_of(source), observe=observe))
    body = (await pool.request("GET", url_of(front))).body
    assert body == b"".join(encode_event(b'{"m":%d}' % n) for n in range(3))


async def test_a_client_that_leaves_ends_the_upstream(serve, connect, make_pool):
    """The disconnect reaches the source, and the handler learns why the relay ended."""
    gone = asyncio.Event()

    async def endless(request, responder):
        responder.on_disconnect(gone.set)
        responder.start(200)
        responder.write(b"first")
        await gone.wait()

    source = await serve(endless)
    outcome = asyncio.get_running_loop().create_future()
    front = await serve(relaying(make_pool(), url_of(source), outcome=outcome))
    client = await connect(front)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await client.head()
    await client.close()
    await gone.wait()
    assert isinstance(await outcome, ClientDisconnected)


async def test_a_broken_upstream_breaks_the_client(serve, connect, peer, make_pool):
    """What came before is passed on, the last chunk is not forged."""
    outcome = asyncio.get_running_loop().create_future()

    async def script(peer, number, reader, writer):
        await peer.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n")

    upstream = await peer(script)
    front = await serve(relaying(make_pool(), upstream.url, outcome=outcome))
    client = await connect(front)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await client.head()
    assert b"0\r\n\r\n" not in await client.rest()
    assert isinstance(await outcome, StreamBroken)


async def test_an_observer_that_raises_ends_the_relay(serve, connect, make_pool, until):
    """An exception in the observer comes out of relay and frees the upstream."""
    source = await serve(events_source(2, gate=asyncio.Event()))
    outcome = asyncio.get_running_loop().create_future()

    def observe(data, at):
        raise ValueError("bad event")

    pool = make_pool()
    front = await serve(relaying(pool, url_of(source), observe=observe, outcome=outcome))
    client = await connect(front)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert isinstance(await outcome, ValueError)
    await until(lambda: not pool.connections)


async def test_a_slow_client_holds_the_source_back(serve, make_pool, flood, at_rest):
    """Bytes between source and client are bounded; all arrive when the client reads."""
    source = flood(400)
    front = await serve(relaying(make_pool(), url_of(await serve(source)), observe=unchanged))
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", front.port))
        await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await at_rest(lambda: source.sent)
        assert 0 < source.sent < source.total
        received = 0
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await loop.sock_recv(sock, 1 << 20)
            assert data
            received += len(data)
            tail = (tail + data)[-5:]
        assert received > source.total
