import asyncio

import orjson
import pytest

from penstock.core.errors import ConfigError, SaturatedError, StreamBroken
from penstock.core.http.client import PoolLimits, Timeouts, parse_http_url


async def echo(request, responder):
    """Answer with what was asked."""
    headers = {k.decode(): v.decode() for k, v in request.headers.items()}
    answer = {"method": request.method, "target": request.target.decode(), "headers": headers}
    responder.send(200, orjson.dumps({**answer, "body": request.body.decode()}))


def url_of(server, path="/"):
    """Return the URL of a path at a server."""
    return f"http://127.0.0.1:{server.port}{path}"


async def test_request_sends_what_it_is_given(serve, pool):
    """Method, target, headers and body arrive; the answer comes back with status and headers."""
    server = await serve(echo)
    response = await pool.request(
        "POST", url_of(server, "/a?b=c%20d"), body=b"hello", headers=[(b"x-request-id", b"r1")]
    )
    assert response.status == 200
    assert response.headers[b"content-type"] == b"application/json"
    seen = orjson.loads(response.body)
    assert seen["method"] == "POST"
    assert seen["target"] == "/a?b=c%20d"
    assert seen["body"] == "hello"
    assert seen["headers"] == {
        "host": f"127.0.0.1:{server.port}",
        "content-length": "5",
        "x-request-id": "r1",
    }


async def test_connections_are_reused_one_after_the_other(serve, pool):
    """Ten requests in a row need one connection."""
    server = await serve(echo)
    for _ in range(10):
        await pool.request("GET", url_of(server))
    assert (server.connections, pool.connections, pool.idle_connections) == (1, 1, 1)


async def test_idle_connections_are_bounded(serve, make_pool, until):
    """Connections beyond the bound are closed when they come free."""
    pool = make_pool(PoolLimits(idle_per_origin=2))
    server = await serve(echo)
    await asyncio.gather(*(pool.request("GET", url_of(server)) for _ in range(5)))
    assert pool.idle_connections == 2
    await until(lambda: server.connections <= 2)


async def test_idle_connections_expire(serve, make_pool, until):
    """A kept connection that nobody uses is closed by the sweep."""
    pool = make_pool(PoolLimits(keep_alive_s=0.05))
    server = await serve(echo)
    await pool.request("GET", url_of(server), timeouts=Timeouts(first_byte_s=0.2))
    assert pool.connections == 1
    await until(lambda: not (server.connections or pool.connections))


async def test_open_connections_are_bounded(serve, make_pool, until):
    """The request too many is refused with the bound in its message; later ones find room."""
    gate = asyncio.Event()

    async def handler(request, responder):
        await gate.wait()
        responder.send(200, b"")

    pool = make_pool(PoolLimits(connections=1))
    server = await serve(handler)
    first = asyncio.create_task(pool.request("GET", url_of(server)))
    await until(lambda: server.handlers)
    with pytest.raises(SaturatedError, match="all 1 upstream connections"):
        await pool.request("GET", url_of(server))
    gate.set()
    assert (await first).status == 200
    assert (await pool.request("GET", url_of(server))).status == 200


async def test_bodies_are_bounded(serve, make_pool):
    """A body over the bound breaks the request and is not kept in memory; at the bound it is fine."""

    async def handler(request, responder):
        responder.send(200, b"x" * int(request.query["n"]))

    pool = make_pool(PoolLimits(body_bytes=1000))
    server = await serve(handler)
    assert len((await pool.request("GET", url_of(server, "/?n=1000"))).body) == 1000
    with pytest.raises(StreamBroken, match="exceeds 1000 bytes"):
        await pool.request("GET", url_of(server, "/?n=1001"))


async def test_a_slow_consumer_pauses_the_upstream(serve, pool, flood, at_rest):
    """Unread body bytes are bounded: the server is held back until the consumer continues."""
    source = flood(200)
    server = await serve(source)
    async with await pool.stream("GET", url_of(server)) as response:
        await at_rest(lambda: source.sent)
        assert source.sent < source.total
        assert response._buffered_bytes < 2 * 1024 * 1024
        assert len(await response.read(limit_bytes=source.total)) == source.total


async def test_a_sink_gets_everything_in_order(serve, pool, in_two):
    """Callbacks receive what came before they were set, then the rest, then the end."""
    gate = asyncio.Event()
    server = await serve(in_two(gate, b"early ", b"late"))
    response = await pool.stream("GET", url_of(server))
    await asyncio.sleep(0.02)
    seen = []
    done = asyncio.get_running_loop().create_future()
    response.set_sink(seen.append, lambda: done.set_result("end"), done.set_exception)
    gate.set()
    assert await done == "end"
    assert seen == [b"early ", b"late"]


async def test_abort_closes_the_upstream_connection(serve, pool):
    """An aborted stream disconnects at the server and calls no callback."""
    gone = asyncio.Event()

    async def handler(request, responder):
        responder.on_disconnect(gone.set)
        responder.start(200)
        await gone.wait()

    server = await serve(handler)
    response = await pool.stream("GET", url_of(server))
    calls = []
    response.set_sink(calls.append, lambda: calls.append("end"), calls.append)
    response.abort()
    await gone.wait()
    assert calls == []
    with pytest.raises(StreamBroken, match="aborted"):
        await response.read(limit_bytes=10)


@pytest.mark.parametrize("started", [False, True])
async def test_cancelling_closes_the_upstream_connection(serve, pool, started, until):
    """A cancelled request disconnects at the server, before and after the head."""
    gone = asyncio.Event()

    async def handler(request, responder):
        responder.on_disconnect(gone.set)
        if started:
            responder.start(200)
        await gone.wait()

    server = await serve(handler)
    task = asyncio.create_task(pool.request("POST", url_of(server), body=b"{}"))
    await until(lambda: server.handlers)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone.wait()
    await until(lambda: not pool.connections)


async def test_close_breaks_what_is_under_way(serve, make_pool):
    """Closing the pool ends open streams with an error and refuses new requests."""

    async def handler(request, responder):
        responder.start(200)
        await asyncio.Event().wait()

    pool = make_pool()
    server = await serve(handler)
    response = await pool.stream("GET", url_of(server))
    await pool.close()
    with pytest.raises(StreamBroken, match="pool was closed"):
        await response.read(limit_bytes=10)
    assert pool.connections == 0


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://x/", "only http and https"),
        ("x:80/path", "only http and https"),
        ("http:///path", "only http and https"),
        ("http://x:99999/", "out of range"),
        ("http://x/a b", "percent-encoded"),
        ("http://x/é", "percent-encoded"),
    ],
)
def test_urls_that_cannot_be_sent_are_named(url, reason):
    """A bad URL is refused before anything is sent, with the reason."""
    with pytest.raises(ConfigError, match=reason):
        parse_http_url(url)


@pytest.mark.parametrize(
    ("url", "origin", "path", "host"),
    [
        ("http://h", ("h", 80), b"/", b"h"),
        ("http://h:8000/a/b?c=d", ("h", 8000), b"/a/b?c=d", b"h:8000"),
        ("http://[::1]:80/", ("::1", 80), b"/", b"[::1]:80"),
        ("http://user:pw@h/x", ("h", 80), b"/x", b"h"),
    ],
)
def test_urls_are_split(url, origin, path, host):
    """Origin, target and host header come from the URL; credentials are not sent."""
    target = parse_http_url(url)
    assert (target.origin[:2], target.line) == (origin, b"%b HTTP/1.1\r\nhost: %b\r\n" % (path, host))


async def test_headers_with_line_breaks_are_refused(serve, pool):
    """A header that would split the request is refused before anything is sent."""
    server = await serve(echo)
    with pytest.raises(ValueError, match="CR, LF"):
        await pool.request("GET", url_of(server), headers=[(b"a", b"b\r\nc: d")])
    assert server.connections == 0


async def test_idle_connections_of_one_server_are_closed_on_request(serve, pool, until):
    """A server that ends need not wait for them; others, and those in use, stay."""
    gate = asyncio.Event()

    async def handler(request, responder):
        if request.path == "/slow":
            await gate.wait()
        responder.send(200, b"done")

    one, other = await serve(handler), await serve(handler)
    urls = [f"http://127.0.0.1:{server.port}" for server in (one, other)]
    slow = asyncio.create_task(pool.request("GET", f"{urls[0]}/slow"))
    await until(lambda: one.handlers)
    for url in urls:
        await pool.request("GET", url)
    pool.close_idle(urls[0])
    await until(lambda: (one.connections, other.connections) == (1, 1))
    gate.set()
    assert (await slow).body == b"done"
