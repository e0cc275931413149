"""No limit counts the time for which this process's own loop stood; every limit ends all the same."""

import asyncio
import socket
import time

import pytest

from penstock.core.errors import UpstreamTimeout
from penstock.core.http.client import Timeouts
from penstock.core.http.own_lag import OwnLag, PatientTimeout
from penstock.core.http.server import HttpServer, ServerLimits

LIMIT_S = 0.4
PAUSE_S = 1.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def listening():
    """A socket whose kernel accepts at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        yield server


def url_of(server):
    """Where it listens."""
    return f"http://127.0.0.1:{server.getsockname()[1]}/"


async def stand():
    """Keep the loop from running for longer than any limit."""
    asyncio.get_running_loop().call_soon(time.sleep, PAUSE_S)
    await asyncio.sleep(0)


async def test_a_connection_that_the_kernel_has_made_is_no_timeout(pool, listening):
    """The loop stood from before the attempt until long after its limit."""
    task = asyncio.create_task(pool.request("GET", url_of(listening), timeouts=Timeouts(connect_s=LIMIT_S)))
    await asyncio.sleep(0)
    await stand()
    peer, _ = listening.accept()
    with peer:
        await asyncio.to_thread(peer.recv, 1000)
        peer.sendall(ANSWER)
        assert (await task).status == 200


@pytest.mark.parametrize("limits", [Timeouts(first_byte_s=LIMIT_S), Timeouts(total_s=LIMIT_S)])
async def test_a_request_that_the_pause_kept_back_is_no_timeout(pool, serve, limits):
    """It left behind the pause, so the worker had no time to answer it yet."""

    async def handle(_, responder):
        responder.send(200, b"{}")

    server = await serve(handle)
    url = f"http://127.0.0.1:{server.port}/"
    await pool.request("GET", url, timeouts=limits)
    task = asyncio.create_task(pool.request("GET", url, timeouts=limits))
    await stand()
    assert (await task).status == 200


async def test_a_client_is_not_refused_for_the_server_s_own_pause(stack):
    """It waits for the permission to send its body, which the pause kept back."""

    async def handle(request, responder):
        responder.send(200, request.body)

    pause = asyncio.get_running_loop().call_soon
    limits = ServerLimits(body_timeout_s=LIMIT_S)
    server = HttpServer(handle, limits=limits, wants_body=lambda _: pause(time.sleep, PAUSE_S) is not None)
    await server.start("127.0.0.1", 0)
    stack.push_async_callback(server.close, grace_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(b"ok")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize("limits", [Timeouts(first_byte_s=LIMIT_S), Timeouts(total_s=LIMIT_S)])
async def test_a_silent_peer_is_given_up_by_a_loop_that_stands_again_and_again(pool, listening, limits):
    """Each pause is forgiven once: none prolongs a limit for ever."""

    def pause():
        time.sleep(0.05)
        return loop.call_soon(pause)

    loop = asyncio.get_running_loop()
    task = asyncio.create_task(pool.request("GET", url_of(listening), timeouts=limits))
    pause()
    with pytest.raises(UpstreamTimeout):
        await task


async def test_what_a_patient_timeout_waits_for_may_come_during_a_pause():
    """Without a pause it ends in time, and with one only behind what the loop has read."""
    ends = socket.socketpair()
    for each in ends:
        each.setblocking(False)
    with ends[0], ends[1]:
        with pytest.raises(TimeoutError):
            async with PatientTimeout(0.05):
                await asyncio.get_running_loop().sock_recv(ends[0], 1)
        async with PatientTimeout(LIMIT_S):
            ends[1].send(b"x")
            await stand()
            assert await asyncio.get_running_loop().sock_recv(ends[0], 1) == b"x"


def test_a_timer_s_lateness_is_counted_once(monkeypatch):
    """From when it was due, and again only for what passes later."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lag = OwnLag()
    assert lag.late_s() == 0.0
    lag.armed(1.0)
    now = 100.5
    assert lag.late_s() == 0.0
    now = 103.0
    assert lag.late_s() == 2.0
    assert lag.late_s() == 0.0
