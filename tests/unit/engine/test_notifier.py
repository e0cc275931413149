"""Messages to prefill workers: what travels together, and what becomes of failures."""

import asyncio
from contextlib import asynccontextmanager

import orjson
import pytest

from penstock.core.http.server import HttpServer
from penstock.engine.core.lease import Read
from penstock.engine.serve.notifications import Notifier


@pytest.fixture
def notifying():
    """Run a notifier against a prefill worker that gives one answer; yields both sides' logs."""

    @asynccontextmanager
    async def run(status=200, answer=b'{"unknown": []}'):
        received, results = [], asyncio.Queue()

        async def handle(request, responder):
            received.append(orjson.loads(request.body))
            responder.send(status, answer)

        server = HttpServer(handle)
        await server.start("127.0.0.1", 0)
        async with asyncio.TaskGroup() as group:
            notifier = Notifier(group)
            notifier.answered = lambda *result: results.put_nowait(result)
            try:
                yield notifier, f"http://127.0.0.1:{server.port}/kv/notify", received, results
            finally:
                await notifier.close()
                await server.close(grace_s=0.0)

    return run


async def test_one_turn_of_the_loop_is_one_message(notifying):
    """Reads and heartbeats queued together travel together; the unknown ids come back."""
    async with notifying(answer=b'{"unknown": ["b"]}') as (notifier, url, received, results):
        notifier.send(url, "e", reads=[Read("a")])
        notifier.send(url, "e", reads=[Read("b", 1, 2, 3)], heartbeats=["c"])
        assert not notifier.is_idle
        result = await results.get()
        assert notifier.is_idle
    assert received == [{"engine_id": "e", "read": [["a", 0, 0, 1], ["b", 1, 2, 3]], "heartbeat": ["c"]}]
    assert result == (["a", "b"], ["c"], {"b"}, None)


async def test_a_read_takes_the_place_of_its_heartbeat(notifying):
    """An id whose heartbeat waits to be sent when its read comes is named once, so it is not answered as unknown."""
    async with notifying(answer=b'{"unknown": []}') as (notifier, url, received, results):
        notifier.send(url, "e", heartbeats=["a", "b"])
        notifier.send(url, "e", reads=[Read("a")])
        await results.get()
    assert received == [{"engine_id": "e", "read": [["a", 0, 0, 1]], "heartbeat": ["b"]}]


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (500, b"{}", "answered 500"),
        (200, b"<html>", "without the list"),
        (200, b"{}", "without the list"),
        (200, b"[]", "without the list"),
        (200, b'{"unknown": [["a"]]}', "without the list"),
    ],
)
async def test_a_bad_answer_is_a_failure_with_a_reason(notifying, status, answer, why):
    """What cannot be understood confirms nothing."""
    async with notifying(status, answer) as (notifier, url, _, results):
        notifier.send(url, "e", reads=[Read("a")])
        reads, _, _, failed = await results.get()
    assert why in failed
    assert reads == ["a"]
