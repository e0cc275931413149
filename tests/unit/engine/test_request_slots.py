"""A worker's hard cap: exactly N in the engine and Q in its queue, whoever comes, leaves or disconnects, and when."""

import asyncio
import json

from penstock.engine.core.request_slots import RequestSlots
from penstock.engine.serve.server import EngineFull, RequestGate


class Client:
    """A connection that may close."""

    def __init__(self):
        self.disconnected = False
        self._callbacks = []

    def on_disconnect(self, callback):
        """Keep a callback."""
        self._callbacks.append(callback)

    def leave(self):
        """Close."""
        self.disconnected = True
        for each in self._callbacks:
            each()


async def test_of_a_thousand_senders_at_once_exactly_n_and_q_get_in():
    """64 run and never more, 16 wait, 920 are rejected; all that got in are served, but those that left."""
    gate, release = RequestGate(64, 16), asyncio.Event()
    clients = [Client() for _ in range(1000)]
    outcomes = []

    async def send(client):
        try:
            async with gate.enter(client, 0) as is_wanted:
                assert gate.slots.running <= 64
                if is_wanted:
                    await release.wait()
                outcomes.append("served" if is_wanted else "left")
        except EngineFull:
            outcomes.append("rejected")

    tasks = [asyncio.ensure_future(send(each)) for each in clients]
    await asyncio.sleep(0)
    assert (gate.slots.running, gate.slots.queued, gate.slots.rejected) == (64, 16, 920)
    for client in clients[70:75]:
        client.leave()
    assert gate.slots.queued == 11
    release.set()
    await asyncio.gather(*tasks)
    counts = {each: outcomes.count(each) for each in set(outcomes)}
    assert counts == {"served": 75, "left": 5, "rejected": 920}
    assert gate.is_empty


async def test_a_cancelled_request_gives_its_slot_to_the_next():
    """Whether it ran or waited."""
    gate = RequestGate(1, 2)
    started = []

    async def send(name):
        async with gate.enter(Client(), 0):
            started.append(name)
            await asyncio.Event().wait()

    tasks = [asyncio.ensure_future(send(name)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[0].cancel()
    await asyncio.wait(tasks[:2])
    await asyncio.sleep(0)
    assert started == ["a", "c"]
    assert (gate.slots.running, gate.slots.queued) == (1, 0)
    tasks[2].cancel()
    await asyncio.wait(tasks)


async def test_a_worker_rejects_beyond_its_limit_and_queue(serving):
    """One runs, two wait, the fourth gets the document's message; metrics tell; all three are served."""
    async with serving(engine_request_limit=1, engine_request_queue=2, speed=1.0) as client:
        posts = [asyncio.ensure_future(client.complete(max_tokens=40)) for _ in range(3)]
        await client.until("penstock_request_queue", 2)
        status, body, headers = await client.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["message"]) == (503, "Server overloaded: worker at capacity")
        assert headers[b"retry-after"] == b"1"
        assert await client.metric("penstock_engine_request") == 1
        assert await client.metric("vllm:num_requests_running") <= 1
        assert await client.metric("penstock_rejection_request_total") == 1
        stream = await client.stream(max_tokens=5)
        assert stream.status == 503
        assert json.loads(await stream.read(limit_bytes=1000))["error"]["code"] == 503
        for post in posts:
            assert (await post)["usage"]["completion_tokens"] == 40
        assert await client.metric("penstock_engine_request") == 0


def test_the_queue_of_a_worker_goes_by_priority():
    """The lowest is next, of equals the first that came: a premium request does not wait behind background in the worker."""
    slots = RequestSlots(1, 4)
    for item, priority in (
        ("runs", 2),
        ("background", 2),
        ("standard", 1),
        ("premium", 0),
        ("second premium", 0),
    ):
        slots.enter(item, priority)
    left = ["runs"]
    while (following := slots.leave(left[-1])) is not None:
        left.append(following)
    assert left == ["runs", "premium", "second premium", "standard", "background"]
