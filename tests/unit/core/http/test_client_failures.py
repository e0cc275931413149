import asyncio
import socket

import httptools
import pytest

from penstock.core.errors import StreamBroken, UpstreamConnectError, UpstreamTimeout
from penstock.core.http.client import Timeouts

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b"\x00\x01\x02 what\r\n\r\n"], "not a valid HTTP response"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "not a valid HTTP response"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"], "not a valid HTTP response"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnothex\r\n"], "not a valid HTTP response"),
        (
            [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
            "not a valid HTTP response",
        ),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000], "response head of over"),
        ([b"HTTP/1.1 200 OK\r\n" + b"x:\r\n" * 300 + b"\r\n"], "over 256 header fields"),
        ([b"HTTP/1.1 999 What\r\ncontent-length: 2\r\n\r\nok"], "status 999 cannot answer"),
        ([b"HTTP/1.1 099 What\r\ncontent-length: 2\r\n\r\nok"], "status 99 cannot answer"),
        ([b"HTTP/1.1 101 Switching\r\n\r\n"], "status 101 cannot answer"),
        ([CHUNKED + b"0\r\nx: " + b"y" * 100_000, b"y" * 100_000], "trailers of over"),
        ([CHUNKED + b"0\r\n", *([b"x: y\r\n" * 4000] * 4)], "trailers of over"),
        ([CHUNKED + b"1;x=", *([b"y" * 40_000] * 4)], "trailers of over"),
        ([OK + OK], "more than one response"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"], "inside its response"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf"], "inside its response"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nwhol\r\n"], "inside its response"),
        ([b"HTTP/1.1 200 OK\r\ncontent-le"], "before it answered"),
        ([b""], "before it answered"),
    ],
)
async def test_garbage_and_truncation_break_the_stream(answering, pool, parts, message, until):
    """Whatever is not one whole HTTP response raises StreamBroken and frees the connection."""
    upstream = await answering(*parts)
    with pytest.raises(StreamBroken, match=message):
        await pool.request("POST", upstream.url, body=b"{}", timeouts=Timeouts(first_byte_s=3, idle_s=3))
    await until(lambda: not pool.connections)


async def test_single_bytes_in_chunks_of_their_own_are_no_abuse(answering, pool):
    """A worker may stream a long answer byte by byte."""
    upstream = await answering(CHUNKED, *([b"1\r\nx\r\n" * 20_000] * 3), b"0\r\n\r\n", then_close=False)
    assert (await pool.request("GET", upstream.url)).body == b"x" * 60_000


async def test_a_response_without_length_ends_at_close(answering, pool):
    """The close completes such a body, and the connection is not reused."""
    upstream = await answering(b"HTTP/1.1 200 OK\r\n\r\nall", b" of it")
    for _ in range(2):
        assert (await pool.request("GET", upstream.url)).body == b"all of it"
    assert upstream.connections == 2


async def test_http_1_0_responses_are_understood(answering, pool):
    """A 1.0 answer with a length is read, and its connection not kept."""
    upstream = await answering(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold", then_close=False)
    assert (await pool.request("GET", upstream.url)).body == b"old"
    assert pool.idle_connections == 0


async def test_informational_responses_are_skipped(answering, pool):
    """100 and 103 are not the answer."""
    upstream = await answering(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", OK, then_close=False
    )
    response = await pool.request("GET", upstream.url)
    assert (response.status, response.body) == (200, b"ok")
    assert b"link" not in response.headers
    assert pool.idle_connections == 1


async def test_bytes_that_nobody_asked_for_end_a_kept_connection(peer, pool, until):
    """A connection with stray bytes is not used for the next request."""

    async def script(peer, number, reader, writer):
        await peer.request(reader)
        writer.write(OK)
        if number == 1:
            await asyncio.sleep(0.02)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray")
        await reader.read()

    upstream = await peer(script)
    assert (await pool.request("GET", upstream.url)).body == b"ok"
    await until(lambda: not pool.connections)
    assert (await pool.request("GET", upstream.url)).body == b"ok"
    assert upstream.connections == 2


async def one_answer_then_close_on_the_second(peer, number, reader, writer):
    """Script of a stale kept-alive connection: the second request on the first connection meets its close."""
    await peer.request(reader)
    writer.write(OK)
    await peer.request(reader)
    if number > 1:
        writer.write(OK)


@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_a_stale_connection_is_replaced_for_idempotent_requests(peer, pool, method):
    """A request that may be repeated is sent again on a fresh connection, once."""
    upstream = await peer(one_answer_then_close_on_the_second)
    await pool.request("GET", upstream.url)
    assert (await pool.request(method, upstream.url)).status == 200
    assert (upstream.connections, len(upstream.requests)) == (2, 3)


async def test_a_stale_connection_is_not_replaced_for_post(peer, pool):
    """A completion that may have been begun is not sent twice by this layer."""
    upstream = await peer(one_answer_then_close_on_the_second)
    await pool.request("GET", upstream.url)
    with pytest.raises(StreamBroken, match="kept-alive connection before it answered"):
        await pool.request("POST", upstream.url, body=b"{}")
    assert upstream.connections == 1


async def test_a_connection_known_to_be_closed_is_not_used(answering, pool, until):
    """When the peer's close has arrived already, even POST goes to a fresh connection."""
    upstream = await answering(OK)
    for _ in range(3):
        assert (await pool.request("POST", upstream.url, body=b"{}")).body == b"ok"
        await until(lambda: not pool.connections)
    assert upstream.connections == 3


async def test_nobody_listening_is_a_connect_error(pool):
    """A refused connection names the address and says that nothing was sent."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(UpstreamConnectError, match=f"127.0.0.1:{port} refused"):
            await pool.request("GET", f"http://127.0.0.1:{port}/")


async def test_an_unknown_host_is_a_connect_error(pool):
    """A name that does not resolve is named."""
    with pytest.raises(UpstreamConnectError, match=r"no-such-host\.invalid"):
        await pool.request("GET", "http://no-such-host.invalid/")


@pytest.mark.parametrize(
    ("timeouts", "phase"),
    [
        (Timeouts(connect_s=0.1), "connect"),
        (Timeouts(connect_s=None, total_s=0.1), "connect"),
    ],
)
async def test_a_peer_that_does_not_accept_times_out(pool, timeouts, phase):
    """A full accept queue lets connects hang: the connect limit, or the total, ends them."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = []
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        try:
            with pytest.raises(UpstreamTimeout) as caught:
                await pool.request("GET", f"http://127.0.0.1:{port}/", timeouts=timeouts)
            assert caught.value.phase == phase
        finally:
            for filler in fillers:
                filler.close()


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "timeouts", "phase"),
    [
        ([], Timeouts(first_byte_s=0.08), "first_byte"),
        ([b"HTTP/1.1 200"], Timeouts(first_byte_s=0.08), "first_byte"),
        ([HEAD], Timeouts(idle_s=0.08), "idle"),
        ([HEAD, b"1\r\na\r\n"], Timeouts(idle_s=0.08), "idle"),
        ([], Timeouts(total_s=0.08), "total"),
        ([HEAD, *[b"1\r\na\r\n"] * 100], Timeouts(total_s=0.08), "total"),
    ],
)
async def test_silence_times_out_in_its_phase(answering, pool, parts, timeouts, phase):
    """Each limit ends the request with the phase in the error, and closes the connection."""
    upstream = await answering(*parts, then_close=False)
    with pytest.raises(UpstreamTimeout, match=upstream.url.removeprefix("http://")) as caught:
        await pool.request("GET", upstream.url, timeouts=timeouts)
    assert caught.value.phase == phase
    await upstream.closed.wait()


async def test_the_idle_limit_restarts_with_every_byte(answering, pool):
    """A stream that keeps talking is not cut off by the idle limit."""
    upstream = await answering(HEAD, *[b"1\r\na\r\n"] * 30, b"0\r\n\r\n")
    response = await pool.request("GET", upstream.url, timeouts=Timeouts(idle_s=0.1))
    assert response.body == b"a" * 30


async def test_a_paused_stream_is_not_idle(answering, pool):
    """Time in which this side does not read is not held against the upstream."""
    upstream = await answering(HEAD, b"1\r\na\r\n0\r\n\r\n")
    response = await pool.stream("GET", upstream.url, timeouts=Timeouts(idle_s=0.08))
    response.pause()
    await asyncio.sleep(0.2)
    response.resume()
    assert await response.read(limit_bytes=10) == b"a"


def test_every_error_of_the_parser_has_a_place():
    """The gate catches HttpParserError and HttpParserUpgrade: the parser raises nothing else."""
    raised = {
        cls
        for name in httptools.__all__
        if isinstance(cls := getattr(httptools, name), type) and issubclass(cls, Exception)
    }
    assert raised
    assert all(
        issubclass(cls, httptools.HttpParserError) or cls is httptools.HttpParserUpgrade for cls in raised
    )
