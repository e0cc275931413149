import asyncio
import errno
import socket
import time

import pytest

from penstock.core.errors import SaturatedError, UpstreamConnectError, UpstreamTimeout
from penstock.core.http.client import ConnectionPool, PoolLimits, Timeouts
from penstock.core.http.client_connection import ClientConnection, Origin

ON_BOTH_LOOPS = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
TURNS = 24
"""More turns of the event loop than a whole request takes on loopback."""


async def answer(request, responder):
    """Answer at once."""
    responder.send(200, b"ok")


def starve(seconds):
    """Hold the event loop up; what the kernel has ready meanwhile comes in one turn."""
    time.sleep(seconds)


async def cut_at(turn, request, *, starve_s=0.0):
    """Cancel a request after this many turns of the loop, each as late as ``starve_s`` makes it."""
    task = asyncio.create_task(request)
    for _ in range(turn):
        starve(starve_s)
        await asyncio.sleep(0)
    task.cancel()
    return (await asyncio.gather(task, return_exceptions=True))[0]


@ON_BOTH_LOOPS
@pytest.mark.parametrize("starve_s", [0.0, 0.001])
async def test_a_request_cancelled_at_any_turn_leaves_nothing(serve, make_pool, until, starve_s):
    """Wherever the cancel falls, connect included, the pool's count returns to what is really open."""
    server = await serve(answer)
    pool = make_pool(PoolLimits(idle_per_origin=0))
    url = f"http://127.0.0.1:{server.port}/"
    ends = [await cut_at(turn, pool.request("GET", url), starve_s=starve_s) for turn in range(TURNS)]
    assert any(isinstance(each, asyncio.CancelledError) for each in ends)
    await until(lambda: pool.connections == 0)
    await until(lambda: server.connections == 0)
    assert (await pool.request("GET", url)).status == 200


@ON_BOTH_LOOPS
async def test_a_connect_limit_that_passes_at_any_turn_leaves_nothing(serve, make_pool, until):
    """A connect limit that ends in a stall of the loop, in the turn of the connection itself, frees its entry."""
    server = await serve(answer)
    pool = make_pool(PoolLimits(idle_per_origin=0))
    url = f"http://127.0.0.1:{server.port}/"
    for turn in range(TURNS):
        task = asyncio.create_task(pool.request("GET", url, timeouts=Timeouts(connect_s=0.001)))
        for _ in range(turn):
            await asyncio.sleep(0)
        starve(0.002)
        await asyncio.gather(task, return_exceptions=True)
        assert task.exception() is None or isinstance(task.exception(), UpstreamTimeout)
    await until(lambda: pool.connections == 0)


@ON_BOTH_LOOPS
async def test_close_during_an_attempt_ends(serve, until):
    """A pool that is closed at any turn of a request closes in bounded time, and the attempt finds it closed."""
    server = await serve(answer)
    for turn in range(TURNS):
        pool = ConnectionPool()
        task = asyncio.create_task(pool.request("GET", f"http://127.0.0.1:{server.port}/"))
        for _ in range(turn):
            await asyncio.sleep(0)
        await pool.close()
        await asyncio.gather(task, return_exceptions=True)
        assert pool.connections == 0
    await until(lambda: server.connections == 0)


async def test_close_gives_up_what_does_not_end():
    """An attempt that neither ends nor fails holds close for its bound, not for ever."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        pool = ConnectionPool(PoolLimits(close_s=0.05))
        url = f"http://127.0.0.1:{full.getsockname()[1]}/"
        task = asyncio.create_task(pool.request("GET", url, timeouts=Timeouts(connect_s=None)))
        await asyncio.sleep(0)
        assert pool.connections == 1
        await pool.close()
        assert pool.connections == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for filler in fillers:
            filler.close()
    with pytest.raises(UpstreamConnectError, match="pool is closed"):
        await pool.request("GET", url)


class Wire(asyncio.Transport):
    """A transport that remembers whether it was cut off."""

    def __init__(self):
        super().__init__()
        self.aborted = False

    def is_closing(self):
        """Return whether it was cut off."""
        return self.aborted

    def abort(self):
        """Cut it off."""
        self.aborted = True

    def write(self, data):
        """Drop the data."""

    def get_write_buffer_size(self):
        """Return that nothing waits."""
        return 0


async def test_a_late_cancel_spares_the_next_request():
    """A request cancelled in the turn in which its answer ended does not cut off its connection's next user."""
    loop = asyncio.get_running_loop()
    wire, connection = Wire(), ClientConnection(Origin("h", 80), loop, id, id)
    connection.connection_made(wire)
    gate = loop.create_future()

    async def second():
        await gate
        return await connection.exchange(b"", b"", Timeouts(), None)

    first = asyncio.create_task(connection.exchange(b"", b"", Timeouts(), None))
    next_one = asyncio.create_task(second())
    await asyncio.sleep(0)
    gate.set_result(None)  # wakes the second request before the first
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not wire.aborted
    connection.data_received(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n")
    assert (await next_one).status == 201


async def test_a_host_without_files_is_not_the_peers_fault(pool):
    """A process that has reached its limit of open files is saturated; the worker did not refuse anything."""

    async def no_more(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    class Loop:
        create_connection = staticmethod(no_more)

    with pytest.raises(SaturatedError, match="ulimit -n"):
        await pool._connect(Origin("127.0.0.1", 9), Timeouts(), Loop())
    assert pool.connections == 0


async def test_a_connection_keeps_its_attributes_in_the_object():
    """CPython 3.11 moves 30 or more into a dictionary, which cost a streamed response 3% more instructions."""
    assert len(vars(ClientConnection(Origin("h", 80), asyncio.get_running_loop(), id, id))) < 30
