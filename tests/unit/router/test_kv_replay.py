"""What a router asks a worker for again, from a worker of a test's own: answers with holes, none, and nonsense."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from penstock.router import kv_listener
from penstock.router.kv_listener import KvAddress, KvSubscription
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import PrefixIndex

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
pytest.importorskip("zmq.asyncio")

END = b"\xff" * 8


def numbered(number):
    """Return a batch's number as it is sent."""
    return number.to_bytes(8, "big")


class Worker:
    """Publishes on one socket and answers on another; each answer is a list of numbers, None stands for the end."""

    def __init__(self, answers, *, topic=(b"kv",)):
        self.context = zmq.asyncio.Context()
        self.publisher = self.context.socket(zmq.PUB)
        self.answerer = self.context.socket(zmq.ROUTER)
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (self.publisher, self.answerer)]
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.answers = list(answers)
        self.topic = topic
        self.asked = []

    async def publish(self, *numbers):
        """Publish batches."""
        for number in numbers:
            await self.publisher.send_multipart((b"kv", numbered(number), b""))

    async def answer(self):
        """Answer as told; to whoever asks once more, nothing."""
        while True:
            asker, empty, first = await self.answerer.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number in self.answers.pop(0) if self.answers else ():
                name = END if number is None else numbered(number)
                await self.answerer.send_multipart((asker, empty, *self.topic, name, b""))


@asynccontextmanager
async def followed(worker, monkeypatch):
    """Follow a worker; give the numbers applied, in their order, and what is known of its cache."""
    monkeypatch.setattr(kv_listener, "FIRST_ANSWER_S", 0.2)
    monkeypatch.setattr(kv_listener, "NEXT_ANSWER_S", 0.2)
    index, applied = PrefixIndex(100), []

    def apply(events, frames):
        number = int.from_bytes(frames[1], "big")
        applied.append((number, events.numbered(number)))

    listener = SimpleNamespace(
        zmq=zmq,
        context=worker.context,
        index_of=lambda name: index,
        begin=lambda index: KvEvents(index, engine_block_tokens=16),
        apply=apply,
        turns=asyncio.Semaphore(1),
        gaps=0,
    )
    subscription = KvSubscription(listener, "a", (KvAddress(worker.events, worker.replay), "1"))
    tasks = [asyncio.create_task(worker.answer()), asyncio.create_task(subscription.follow())]
    try:
        yield applied
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        worker.context.destroy(linger=0)


async def until(condition):
    """Wait for a condition."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("topic", [(b"kv",), ()])
async def test_an_answer_with_a_hole_is_asked_for_again_from_there(monkeypatch, topic):
    """The worker's queue was full: what it dropped in the middle and the end of its answer come with the next."""
    worker = Worker([[0, 1, 2, 5, 6], [3, 4], [5, 6, None]], topic=topic)
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: len(worker.asked) == 2)
        # Silence ended the second answer; the next published batch shows what is missing.
        await until(lambda: len(applied) == 5)
        await asyncio.sleep(0.5)
        await worker.publish(7)
        await until(lambda: len(applied) == 8)

    assert worker.asked == [0, 3, 5]
    assert applied == [(number, False) for number in range(8)]


async def test_what_the_buffer_no_longer_holds_is_lost(monkeypatch):
    """Only then is the worker's cache forgotten; what the answer does hold is known."""
    worker = Worker([[0, None], [7, 8, None]])
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: applied)
        await worker.publish(8, 9)
        await until(lambda: len(applied) == 4)

    assert worker.asked == [0, 1]
    assert applied == [(0, False), (7, True), (8, False), (9, False)]


async def test_a_worker_that_does_not_answer_is_followed_as_before(monkeypatch):
    """It has no such socket, or is too busy: a gap is a gap, and new events are applied."""
    worker = Worker([])
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: len(worker.asked) == 1)
        await worker.publish(3, 4, 6)
        await until(lambda: len(applied) == 3)

    assert applied == [(3, False), (4, False), (6, True)]
    assert worker.asked == [0, 5]


@pytest.mark.parametrize("name", [b"", b"short", bytes(9)])
async def test_nonsense_ends_an_answer(monkeypatch, name):
    """Nothing of it is applied."""
    worker = Worker([[0]])
    monkeypatch.setattr(f"{__name__}.numbered", lambda _: name)
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: worker.asked)
        await asyncio.sleep(0.3)

    assert applied == []


async def test_an_endless_answer_is_bounded(monkeypatch):
    """In number: the rest is left."""
    monkeypatch.setattr(kv_listener, "MAX_BATCHES", 10)
    worker = Worker([range(100)])
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: len(applied) == 10)
        await asyncio.sleep(0.3)

    assert len(applied) == 10


async def test_an_answer_is_bounded_in_size(monkeypatch):
    """What exceeds it is not taken."""
    monkeypatch.setattr(kv_listener, "MAX_BYTES", -1)
    worker = Worker([[0, 1, None]])
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: worker.asked)
        await asyncio.sleep(0.3)

    assert applied == []
