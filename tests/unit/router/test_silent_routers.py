"""A deciding router whose machine vanishes, or whose process is stopped, closes nothing; nobody waits for it for long."""

import asyncio
from contextlib import suppress

import pytest

from penstock.router.silence import ASK_REAL_S, BREAK_REAL_S, SilenceWatch, Wait

JSON = (b"content-type", b"application/json")
FORWARDED = "penstock_router_forwarded_requests_total"


class Cable:
    """A TCP relay before a router that can be cut without a word: connections stay open, and nothing comes through."""

    def __init__(self, port):
        self.port = port
        self.connected = asyncio.Event()
        self.connected.set()
        self.url = ""
        self._server = None
        self._writers = set()
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def refuse(self):
        """Take no further connections; those there are go on."""
        self._server.close()

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader, writer):
        near, far = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers |= {writer, far}
        for source, sink in ((reader, far), (near, writer)):
            task = asyncio.ensure_future(self._copy(source, sink))
            self._tasks.add(task)

    async def _copy(self, reader, writer):
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.connected.wait()
                writer.write(data)
            await self.connected.wait()
            writer.close()


@pytest.fixture
def bounds(monkeypatch):
    """Shorter silences, so that tests are; long enough for a busy machine."""
    monkeypatch.setattr("penstock.router.peers.ASK_REAL_S", 0.3)
    monkeypatch.setattr("penstock.router.silence.FALL_BACK_REAL_S", 0.6)
    monkeypatch.setattr("penstock.router.silence.BREAK_REAL_S", 1.5)


@pytest.fixture
def gate(harness):
    """Lets workers end their answers; at the end of a test in any case, as routers wait for them."""
    event = asyncio.Event()
    yield event
    event.set()


@pytest.fixture
async def pair(harness, write_graph, bounds):
    """The older router, which decides; the younger one; the cable between; a worker."""
    worker = await harness.worker("aggregated")
    file = write_graph((worker,), ())
    options = {
        "config": {"peers": {"intervalRealSeconds": 0.02}},
        "disaggregated": False,
        "statefile": file,
    }
    first = await harness.router(**options)
    async with Cable(first.server.port) as cable:
        write_graph((worker,), (cable,))
        second = await harness.router(**options)
        write_graph((worker,), (cable, second))
        await second.until(lambda: second.server._peers.owner_url() == cable.url)
        yield first, second, cable, worker


async def test_requests_of_a_silent_owner_are_decided_here(harness, pair, gate):
    """Each once, by the router that got it; the one that comes back decides again, and finished nothing twice."""
    first, second, cable, worker = pair
    worker.script = [harness.answers.events_then(event=gate)] * 3
    waiting = [asyncio.ensure_future(second.post(max_tokens=1)) for _ in range(3)]
    await second.until(lambda: len(worker.seen) == 3)
    cable.connected.clear()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200, 200]
    assert await second.metric(FORWARDED, outcome="fell_back") == 3
    assert await second.metric(FORWARDED, outcome="answered") == 0
    assert second.server.metrics.arrivals == second.server.metrics.completed == 3
    assert (await second.post(max_tokens=1)).status == 200
    assert await second.metric(FORWARDED, outcome="fell_back") == 3
    cable.connected.set()
    await first.until(lambda: worker.disconnects == 3)
    await first.assert_idle()
    await second.until(lambda: second.server._peers.owner_url() == cable.url)
    gate.set()
    assert (await second.post(max_tokens=1)).status == 200
    assert await second.metric(FORWARDED, outcome="answered") == 1


async def test_a_stream_of_a_silent_owner_ends_by_an_error(harness, pair, gate):
    """As one of a worker that was cut off; it is neither continued nor begun again."""
    _, second, cable, worker = pair
    worker.script = [harness.answers.events_then(harness.token_event(0), event=gate)]
    response = await second.stream()
    async with response:
        text = await anext(aiter(response))
        cable.connected.clear()
        text += await second.broken(response)
    assert b"tok0" in text
    assert b'"code":"upstream_broken"' in text
    assert harness.done not in text
    assert len(worker.seen) == 1
    assert await second.metric(FORWARDED, outcome="broken") == 1
    assert await second.metric(FORWARDED, outcome="fell_back") == 0
    gate.set()


async def test_a_short_pause_of_the_owner_costs_nothing(harness, pair, gate):
    """Below the bound its answer is waited for, stream or not."""
    first, second, cable, worker = pair
    worker.script = [harness.answers.events_then(harness.token_event(0), event=gate)]
    response = await second.stream()
    async with response:
        await anext(aiter(response))
        cable.connected.clear()
        await second.until(lambda: second.server._peers.silence._silent_s.get(cable.url, 0) > 0.1)
        cable.connected.set()
        gate.set()
        rest = b"".join([chunk async for chunk in response])
    assert rest.endswith(harness.done)
    assert await second.metric(FORWARDED, outcome="answered") == 1
    assert first.server.metrics.completed == 1


async def test_an_owner_that_drains_keeps_its_streams(harness, pair, gate, write_graph):
    """It is listed no more and refuses connections, as its streams go on; that is no silence."""
    first, second, cable, worker = pair
    worker.script = [harness.answers.events_then(harness.token_event(0), event=gate)]
    response = await second.stream()
    async with response:
        await anext(aiter(response))
        write_graph((worker,), (second,))
        closing = asyncio.ensure_future(first.server.close())
        cable._server.close()
        peers = second.server._peers
        await second.until(lambda: peers.owner_url() is None)
        assert cable.url in peers.silence.urls
        await peers.ask()
        await second.until(lambda: cable.url not in peers.silence._silent_s)
        gate.set()
        rest = b"".join([chunk async for chunk in response])
    assert rest.endswith(harness.done)
    await closing


async def test_a_client_that_leaves_after_the_fall_back_frees_the_worker(harness, pair):
    """The request is this router's own then."""
    _, second, cable, worker = pair
    worker.script = [harness.answers.hang(), harness.answers.hang()]
    task = asyncio.ensure_future(second.post())
    await second.until(lambda: len(worker.seen) == 1)
    cable.connected.clear()
    await second.until(lambda: len(worker.seen) == 2)
    task.cancel()
    await second.until(lambda: worker.disconnects >= 1)
    await second.assert_idle()


async def test_a_client_that_leaves_a_silent_owner_leaves_nothing(harness, pair):
    """Neither a wait nor a second try."""
    _, second, cable, worker = pair
    worker.script = [harness.answers.hang()]
    task = asyncio.ensure_future(second.post())
    await second.until(lambda: len(worker.seen) == 1)
    cable.connected.clear()
    task.cancel()
    await second.until(lambda: not second.server._peers.silence.urls)
    assert second.server.metrics.arrivals == 0
    assert not second.server.metrics.forwarded


class Waiting:
    """A wait that notes its end."""

    def __init__(self, *, begun):
        self.ended = 0
        self.wait = Wait(lambda: begun, self._end)

    def _end(self):
        self.ended += 1


def silence_until(watch, each, url="a", waited_s=ASK_REAL_S):
    """Miss answers until a wait ends; return how many."""
    for number in range(1, 100):
        watch.missed(url, waited_s)
        if each.ended:
            return number
    return None


@pytest.mark.parametrize(
    ("begun", "interval_s", "asks"),
    [
        (False, 0.1, 2),  # 2.2 s
        (True, 0.1, 10),  # 11 s
        (False, 1.0, 3),  # 5 intervals: 6 s
        (True, 60.0, 5),  # 305 s
    ],
)
def test_bounds_of_silence(begun, interval_s, asks):
    """Two seconds, ten for what has begun, and five intervals at least; each wait ends once."""
    watch, each = SilenceWatch(interval_s), Waiting(begun=begun)
    with watch.waiting("a", each.wait):
        assert silence_until(watch, each) == asks
        watch.missed("a", BREAK_REAL_S)
        assert each.ended == 1
    assert not watch.urls


def test_a_pause_of_this_process_is_not_the_others():
    """One ask counts a second at most, however late its end is seen."""
    watch, each = SilenceWatch(0.1), Waiting(begun=False)
    with watch.waiting("a", each.wait):
        watch.missed("a", 3600.0)
        assert not each.ended


def test_a_sign_of_life_begins_anew_and_others_do_not_count():
    """Silences of two routers are apart."""
    watch, each = SilenceWatch(0.1), Waiting(begun=False)
    with watch.waiting("a", each.wait):
        for _ in range(10):
            watch.missed("b", ASK_REAL_S)
            watch.missed("a", ASK_REAL_S)
            watch.heard("a")
        assert not each.ended
