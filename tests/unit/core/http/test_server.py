import asyncio
import errno
import socket

import orjson
import pytest

from penstock.core.errors import PortInUseError, UpstreamError
from penstock.core.http.server import HttpServer
from penstock.core.ports import EVERY_ADDRESS


async def echo(request, responder):
    """Answer with what was asked."""
    answer = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "body": request.body.decode(),
    }
    responder.send(200, orjson.dumps(answer))


async def test_answers_a_request_and_keeps_the_connection(serve, connect):
    """Two requests on one connection are both answered, without connection: close."""
    client = await connect(await serve(echo))
    for path in ("/first", "/second"):
        client.send(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
        status, headers, body = await client.response()
        assert status == 200
        assert orjson.loads(body)["path"] == path
        assert "connection" not in headers
        assert headers["date"].endswith("GMT")


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a", "/a", {}),
        (b"/a%20b/c", "/a b/c", {}),
        (b"/a?x=1&y=", "/a", {"x": "1", "y": ""}),
        (b"/a?x=1&x=2", "/a", {"x": "2"}),
        (b"/a?m=%C3%A9+e", "/a", {"m": "é e"}),
        (b"http://host:80/p/q?z=3", "/p/q", {"z": "3"}),
        (b"http://host", "/", {}),
    ],
)
async def test_splits_the_target(ask, target, path, query):
    """Path and query are decoded, from origin form and absolute form."""
    client = await ask(echo, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
    answer = orjson.loads((await client.response())[2])
    assert (answer["path"], answer["query"]) == (path, query)


async def test_headers_are_lower_case_and_repeated_ones_joined(ask):
    """Handlers look headers up by lower-case name; a repeated header keeps both values."""
    seen = {}

    async def handler(request, responder):
        seen.update(request.headers)
        responder.send(204, b"")

    client = await ask(handler, b"GET / HTTP/1.1\r\nHost: x\r\nX-Tag: a\r\nx-tag: b\r\n\r\n")
    await client.head()
    assert seen == {b"host": b"x", b"x-tag": b"a, b"}


async def test_reads_chunked_bodies_in_any_pieces(serve, connect):
    """A chunked body with extensions and trailers arrives whole, one byte per packet or not."""
    client = await connect(await serve(echo))
    raw = (
        b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nX-Trailer: t\r\n\r\n"
    )
    for byte in raw:
        client.send(bytes([byte]))
        await asyncio.sleep(0)
    assert orjson.loads((await client.response())[2])["body"] == "hello world"


async def test_pipelined_requests_are_answered_in_order(ask, until):
    """A slow first handler holds back the second answer; the second handler starts after it."""
    gate = asyncio.Event()
    started = []

    async def handler(request, responder):
        started.append(request.path)
        if request.path == "/slow":
            await gate.wait()
        responder.send(200, request.path.encode())

    client = await ask(handler, b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nGET /fast HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: started)
    await asyncio.sleep(0.01)
    assert started == ["/slow"]
    gate.set()
    assert (await client.response())[2] == b"/slow"
    assert (await client.response())[2] == b"/fast"


async def test_head_gets_the_headers_only(ask):
    """HEAD answers carry the content-length of the body that is left out."""
    client = await ask(echo, b"HEAD /h HTTP/1.1\r\nHost: x\r\n\r\nGET /g HTTP/1.1\r\nHost: x\r\n\r\n")
    status, headers = await client.head()
    assert status == "HTTP/1.1 200 OK"
    assert int(headers["content-length"]) > 0
    assert orjson.loads((await client.response())[2])["path"] == "/g"


async def test_streams_chunks_as_they_are_written(ask):
    """Each write is one chunk on the wire at once; an empty write does not end the body."""
    gate = asyncio.Event()

    async def handler(request, responder):
        responder.start(200, headers=[(b"x-request-id", b"r1")])
        responder.write(b"data: a\n\n")
        responder.write(b"")
        await gate.wait()
        responder.write(b"data: b\n\n")
        responder.end()

    client = await ask(handler)
    _, headers = await client.head()
    assert headers["content-type"] == "text/event-stream"
    assert headers["x-request-id"] == "r1"
    assert await client.exactly(14) == b"9\r\ndata: a\n\n\r\n"
    gate.set()
    assert await client.exactly(19) == b"9\r\ndata: b\n\n\r\n0\r\n\r\n"


async def test_http_1_0_clients_get_bytes_until_close(ask):
    """A client that knows no chunks gets the plain body, ended by close."""

    async def handler(request, responder):
        responder.start(200)
        responder.write(b"one")
        responder.write(b"two")
        responder.end()

    client = await ask(handler, b"GET / HTTP/1.0\r\n\r\n")
    _, headers = await client.head()
    assert headers["connection"] == "close"
    assert await client.rest() == b"onetwo"


async def test_connection_close_is_honoured(ask):
    """After a request with connection: close the server says so and closes."""
    client = await ask(echo, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    _, headers, _ = await client.response()
    assert headers["connection"] == "close"
    assert await client.rest() == b""


async def test_expect_100_continue_is_answered_before_the_body(ask):
    """A client that waits for permission gets it, then its answer."""
    client = await ask(
        echo, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    assert (await client.head())[0] == "HTTP/1.1 100 Continue"
    client.send(b"hi")
    assert orjson.loads((await client.response())[2])["body"] == "hi"


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 4\r\n\r\nbody", b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"]
)
async def test_an_upgrade_offer_is_ignored_and_the_body_kept(serve, connect, framing):
    """Clients that offer h2c are served as plain HTTP/1.1, body included."""
    client = await connect(await serve(echo))
    offer = b"POST /u HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    client.send(offer + framing + b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = orjson.loads((await client.response())[2])
    assert (answer["path"], answer["body"]) == ("/u", "body")
    assert orjson.loads((await client.response())[2])["path"] == "/next"


@pytest.mark.parametrize(
    ("error", "message", "logged"),
    [
        (ValueError("secret"), "internal error; see the server's log", "request failed"),
        (UpstreamError("worker w1 is gone"), "worker w1 is gone", "request failed"),
        (None, "the handler gave no answer", "handler returned before its response was complete"),
    ],
)
async def test_a_handler_that_does_not_answer_is_answered_for(ask, caplog, error, message, logged):
    """Penstock's own errors reach users, others are kept from them; the connection lives on."""

    async def handler(request, responder):
        if request.path == "/ok":
            responder.send(200, b"{}")
        elif error is not None:
            raise error

    client = await ask(handler, b"GET /boom HTTP/1.1\r\nHost: x\r\n\r\nGET /ok HTTP/1.1\r\nHost: x\r\n\r\n")
    status, _, body = await client.response()
    found = orjson.loads(body)["error"]
    assert (status, found["code"], found["message"]) == (500, "internal_error", message)
    assert logged in caplog.text
    assert (await client.response())[0] == 200


async def test_a_handler_that_raises_in_mid_stream_breaks_the_connection(ask, caplog):
    """A stream that cannot be completed is cut without the last chunk, so the client can tell."""

    async def handler(request, responder):
        responder.start(200)
        responder.write(b"part")
        await asyncio.sleep(0)
        raise ValueError

    client = await ask(handler)
    assert not (await client.rest()).endswith(b"0\r\n\r\n")


async def test_disconnect_calls_back(ask):
    """When the client leaves, callbacks run once and writes are dropped; nothing is cancelled."""
    events = []
    finished = asyncio.Event()

    async def handler(request, responder):
        gone = asyncio.Event()
        responder.on_disconnect(lambda: events.append("callback"))
        responder.on_disconnect(gone.set)
        responder.start(200)
        await gone.wait()
        responder.write(b"to nobody")
        responder.end()
        responder.on_disconnect(lambda: events.append("late callback"))
        events.append((responder.disconnected, responder.closed, responder.started))
        finished.set()

    client = await ask(handler)
    await client.head()
    await client.close()
    await finished.wait()
    assert events == ["callback", "late callback", (True, True, True)]


async def test_no_disconnect_is_reported_after_the_answer(serve, connect, until):
    """A client that leaves after its answer was complete is not a disconnect."""
    calls = []

    async def handler(request, responder):
        responder.on_disconnect(lambda: calls.append("gone"))
        responder.send(200, b"")
        responder.on_disconnect(lambda: calls.append("late"))

    server = await serve(handler)
    client = await connect(server)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await client.response()
    await client.close()
    await until(lambda: not server.connections)
    assert calls == []


async def test_a_port_in_use_names_port_and_remedy(serve):
    """The second server on a port says which port and what to do."""
    server = await serve(echo)
    with pytest.raises(PortInUseError, match=rf"port {server.port} .* --port"):
        await HttpServer(echo).start("127.0.0.1", server.port)


async def _peer_at(port, host):
    """Ask a server of this machine, at an address of one family; return the client's address as the server saw it."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: penstock\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.rpartition(b"\r\n\r\n")[2].decode()


async def _tell_peer(request, responder):
    responder.send(200, request.peer.rpartition(":")[0].encode())


@pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_one_server_serves_both_families(stack):
    """What pods listen on: a kubelet's probe may come by either. A client has the address that it has elsewhere."""
    server = HttpServer(_tell_peer)
    await server.start(EVERY_ADDRESS, 0)
    stack.push_async_callback(server.close, grace_s=0.2)
    assert [await _peer_at(server.port, host) for host in ("127.0.0.1", "::1")] == ["127.0.0.1", "::1"]


@pytest.mark.parametrize("has_ipv6", [False, True])
async def test_a_machine_without_ipv6_is_served_by_ipv4(stack, monkeypatch, has_ipv6):
    """Whether its kernel lacks IPv6 or the machine has it switched off."""
    original = socket.create_server

    def create(address, **options):
        if options.get("dualstack_ipv6"):
            raise OSError(errno.EADDRNOTAVAIL, "switched off")
        return original(address, **options)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    monkeypatch.setattr(socket, "create_server", create)
    server = HttpServer(_tell_peer)
    await server.start(EVERY_ADDRESS, 0)
    stack.push_async_callback(server.close, grace_s=0.2)
    assert await _peer_at(server.port, "127.0.0.1") == "127.0.0.1"


async def test_a_port_in_use_is_named_on_every_address_too(serve):
    """Someone listens there by IPv4."""
    server = await serve(_tell_peer)
    with pytest.raises(PortInUseError, match=str(server.port)):
        await HttpServer(_tell_peer).start(EVERY_ADDRESS, server.port)
