"""Hostile neighbours of a router: a picker that lies or falls silent, and relays that break the protocol."""

import asyncio

import pytest
from picker_group import group_of, start, stopwatch

from penstock.api import Role, Tier
from penstock.router.core.retries import RefusalReason
from penstock.router.picker import messages as wire
from penstock.router.picker.links import PATH, SILENT_TICKS, Channel, RouterLink
from penstock.router.picker.messages import FrameReader, frames, prompt_of
from penstock.router.policy.arrival import Arrival
from penstock.router.proxy.auth import GraphSecret


class FakePicker:
    """A router that claims to pick, and answers what a test tells it to."""

    def __init__(self, term=5):
        self.term = term
        self.asked = []
        self.follows = []
        self.writers = []
        self.is_silent = False
        self._beat = None

    async def start(self):
        """Listen; a sign of life goes out ten times a second."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._beat = asyncio.create_task(self._live())
        return self

    async def close(self):
        """Vanish."""
        self._beat.cancel()
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()

    def say(self, *messages):
        """Send messages to whoever is connected."""
        for writer in self.writers:
            if not writer.is_closing():
                writer.write(frames(messages))

    async def _live(self):
        while True:
            if not self.is_silent:
                sees = ("old", *self.follows_from)
                self.say(wire.Status("old", 1.0, self.term, True, True, False, sees))
            await asyncio.sleep(0.05)

    follows_from = ()

    async def _serve(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        self.writers.append(writer)
        frame_reader = FrameReader()
        while data := await reader.read(65536):
            for message in frame_reader.feed(data):
                if isinstance(message, wire.Ask):
                    self.asked.append(message)
                elif isinstance(message, wire.Follow):
                    self.follows.append(message)


async def under_a_fake(harness, worker):
    """Start a router that follows a fake picker."""
    fake = await FakePicker().start()
    harness._closers.append(fake.close)
    file = harness.write_state([worker], [fake])
    router = await harness.router(disaggregated=False, ready=False, statefile=file)
    fake.follows_from = (group_of(router).instance,)
    await router.until(lambda: fake.follows)
    await router.until(lambda: group_of(router).is_relay)
    await router.until(lambda: not router.server.admission.problems())
    await router.until(lambda: not group_of(router).picker.picks_here())
    return fake, router


async def test_a_picker_that_falls_silent_is_waited_for_less_than_a_second(harness):
    """Its connection stays open, as of a stopped process: the router picks by itself, and drops what comes late."""
    worker = await harness.worker("aggregated")
    fake, router = await under_a_fake(harness, worker)
    fake.is_silent = True
    elapsed = stopwatch(router)
    assert (await router.post()).status == 200
    assert SILENT_TICKS * 0.1 - 0.2 < elapsed() < 2.0
    assert len(fake.asked) == 1
    fake.say(wire.Assigned(fake.term, fake.asked[0].number, worker.name, 0.0, "late"))
    assert (await router.post()).status == 200
    assert len(worker.seen) == 2


async def test_a_picker_that_was_only_slow_is_waited_for_longer_the_next_time(harness):
    """The same process came back: another election would only cost all of them work."""
    worker = await harness.worker("aggregated")
    fake, router = await under_a_fake(harness, worker)
    (link,) = group_of(router)._links.values()
    before = link.silence_ticks
    fake.is_silent = True
    await router.until(lambda: link.channel is None)
    fake.is_silent = False
    await router.until(lambda: link.status is not None)
    assert link.silence_ticks >= 2 * before


async def test_a_word_of_an_older_term_is_dropped(harness):
    """Only that of the term that is followed counts."""
    worker = await harness.worker("aggregated")
    fake, router = await under_a_fake(harness, worker)
    task = asyncio.create_task(router.post())
    await router.until(lambda: fake.asked)
    number = fake.asked[0].number
    refused = wire.Refused(
        fake.term - 1, number, Role.AGGREGATED, RefusalReason.QUEUE_FULL, "of an older term", None
    )
    fake.say(wire.Assigned(fake.term - 1, number, worker.name, 0.0, "old"), refused)
    fake.say(wire.Assigned(fake.term, number + 1000, worker.name, 0.0, "asked by nobody"))
    await asyncio.sleep(0.05)
    assert not worker.seen
    fake.say(wire.Assigned(fake.term, number, worker.name, 0.0, "new"))
    assert (await task).status == 200
    assert len(worker.seen) == 1


async def test_a_worker_that_a_router_does_not_know_is_asked_for_again(harness):
    """The picker's discovery may be ahead of this router's."""
    worker = await harness.worker("aggregated")
    fake, router = await under_a_fake(harness, worker)
    task = asyncio.create_task(router.post())
    await router.until(lambda: fake.asked)
    fake.say(wire.Assigned(fake.term, fake.asked[0].number, "nobody knows it", 0.0, "ahead"))
    await router.until(lambda: len(fake.asked) == 2)
    assert fake.asked[1].prompt.avoid == ("nobody knows it",)
    fake.say(wire.Assigned(fake.term, fake.asked[1].number, worker.name, 0.0, "known"))
    assert (await task).status == 200


async def connect(router, *, secret):
    """Ask a router for the protocol; return the answer's status and both streams."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.server.port)
    writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\n%s\r\n" % (PATH.encode(), secret))
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ")[1]), reader, writer


def follows(router):
    """What makes a connection count."""
    group = group_of(router)
    return frames([wire.Follow(group._term, group.instance, "relay", 1.0)])


async def test_only_a_router_of_the_graph_is_let_in(harness):
    """A wrong secret or none is a 403."""
    (router,) = await start(harness, await harness.worker("aggregated"), count=1)
    for secret in (b"", b"x-penstock-graph-secret: guessed\r\n"):
        status, _, writer = await connect(router, secret=secret)
        assert status == 403
        writer.close()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, "set the same secret in all"),
        (404, "of another build"),
        (503, "no room for this one, or stops"),
    ],
)
async def test_why_another_router_turns_this_one_down_is_named(caplog, status, words):
    """An upgrade's older build is not taken for a wrong secret; each reason is logged once."""

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        link = RouterLink(url, GraphSecret(b"secret"), lambda *_: None)
        for _ in range(2):
            await link.connect()
    assert [words in each.message for each in caplog.records if each.name.endswith("links")] == [True]


@pytest.mark.parametrize(
    "data",
    [
        (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"POST / HTTP/1.1\r\n\r\n",
        frames([wire.Ask(1, Role.AGGREGATED, prompt_of(Arrival((), 1)))] * 2),
        frames(
            [
                wire.InFlight(
                    1,
                    Role.AGGREGATED,
                    "w",
                    wire.Prompt(b"odd", 1, (), 1.0, 1, "", False, Tier.STANDARD, ""),
                    False,
                    1,
                )
            ]
        ),
    ],
    ids=["a frame too long", "another protocol", "asked twice", "keys cut off"],
)
async def test_what_breaks_the_protocol_ends_the_connection_alone(harness, data):
    """The router lives, and serves."""
    (router,) = await start(harness, await harness.worker("aggregated"), count=1)
    name, value = harness.as_router
    status, reader, writer = await connect(router, secret=name + b": " + value + b"\r\n")
    assert status == 101
    writer.write(follows(router) + data)
    while await reader.read(65536):
        pass
    writer.transport.abort()
    assert (await router.post()).status == 200


async def test_what_a_relay_holds_ends_with_its_connection(harness):
    """Neither waits nor weighs any more; before it follows, nothing that it says counts."""
    worker = await harness.worker("aggregated")
    (router,) = await start(harness, worker, count=1)
    name, value = harness.as_router
    _, _, writer = await connect(router, secret=name + b": " + value + b"\r\n")
    prompt = prompt_of(Arrival((), 300))
    holds = wire.InFlight(1, Role.AGGREGATED, worker.name, prompt, False, 300)
    load = router.server.core.pool.get(worker.name)
    writer.write(frames([holds]))
    await asyncio.sleep(0.05)
    assert load.inflight_tokens == 0
    writer.write(follows(router) + frames([holds, wire.Ask(2, Role.AGGREGATED, prompt)]))
    await router.until(lambda: load.inflight_tokens == 600)
    writer.write(frames([wire.Progress((1,), (340,)), wire.Release(2)]))
    await router.until(lambda: load.inflight_tokens == 340)
    writer.transport.abort()


class Unread(asyncio.Transport):
    """A connection whose other side does not read."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.is_aborted = False

    def write(self, data):
        """Keep what is never sent."""
        self.bytes += len(data)

    def get_write_buffer_size(self):
        """All of it."""
        return self.bytes

    def is_closing(self):
        """After the end."""
        return self.is_aborted

    def abort(self):
        """Cut off."""
        self.is_aborted = True


async def test_a_router_that_does_not_read_is_cut_off():
    """Before what it has left unread fills the memory."""
    channel, transport = Channel(lambda _: None, lambda: None), Unread()
    channel.connection_made(transport)
    ask = wire.Ask(1, 0, prompt_of(Arrival(tuple(range(512)), 9)))
    for _ in range(10):
        for _ in range(1000):
            channel.send(ask)
        await asyncio.sleep(0)
    assert transport.is_aborted
    assert transport.bytes < 24 << 20
