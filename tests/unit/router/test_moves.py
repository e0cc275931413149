"""The streams of a draining worker continue on another one, and only those that gain by it and lose nothing."""

import asyncio
from functools import partial

import orjson
import pytest
from test_stream_continuation import ASKED, STREAMED, answer_to, asked, read

from penstock.api import BreakerConfig, Role
from penstock.router.core.moves import StreamProgress, is_draining, is_worth_moving, prefill_token_s
from penstock.router.core.speeds import SpeedCounts
from penstock.router.core.worker import WorkerPool, WorkerSpec

DECODE = SpeedCounts(output_tokens=100, decode_s=2.0)
"""20 ms a token."""
PREFILL = SpeedCounts(prompt_tokens=10_000, prefill_s=1.0, prefills=10)
"""10,000 tokens/s."""


@pytest.mark.parametrize(
    ("left", "decode", "prefill", "expected"),
    [
        (StreamProgress(1000, 0, 100), DECODE, [PREFILL], True),
        (StreamProgress(9900, 100, 151), DECODE, [PREFILL], True),
        (StreamProgress(9900, 100, 150), DECODE, [PREFILL], False),
        (StreamProgress(9900, 100, 150, cached_tokens=200), DECODE, [PREFILL], True),
        (StreamProgress(9900, 100, 103, cached_tokens=9900), DECODE, [PREFILL], True),
        (StreamProgress(9900, 4000, 4010, cached_tokens=9900), DECODE, [PREFILL], False),
        (
            StreamProgress(9900, 100, 151),
            DECODE,
            [PREFILL, SpeedCounts(prompt_tokens=1, prefill_s=3.0)],
            False,
        ),
        (StreamProgress(9900, 100, None), DECODE, [PREFILL], True),
        (StreamProgress(9900, 100, 101), SpeedCounts(), [PREFILL], True),
        (StreamProgress(9900, 100, 101), DECODE, [], True),
        (StreamProgress(9900, 100, 101), DECODE, [SpeedCounts()], True),
    ],
)
def test_a_stream_moves_where_what_is_left_takes_longer_than_its_prompt(left, decode, prefill, expected):
    """Both in seconds, by what was measured; without an end or a measurement it moves, and what is cached costs nothing."""
    assert is_worth_moving(left, decode, prefill_token_s(prefill)) is expected


def test_a_worker_drains_that_says_so_is_told_so_or_is_gone():
    """By discovery, by an admin, or by leaving its Service."""
    pool = WorkerPool(BreakerConfig())
    spec = WorkerSpec("a", Role.DECODE, "http://a")
    pool.apply([spec])
    worker = pool.get("a")
    assert not is_draining(worker, pool)
    pool.set_drained("a", drained=True)
    assert is_draining(worker, pool)
    pool.set_drained("a", drained=False)
    pool.apply([])
    assert is_draining(worker, pool)


class Slow:
    """A worker whose streams stop behind some tokens until they are let go; ``left`` counts those whose router has gone."""

    def __init__(self, worker, serial):
        self.name, self.serial = worker.name, serial
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.left = 0
        worker.otherwise = self._speak

    async def _speak(self, request, responder):
        whole = answer_to(request.path, request.body, self.serial)
        responder.start(200)
        responder.write(whole[:1800])
        self.began.set()
        responder.on_disconnect(self._leave)
        await self.go.wait()
        responder.write(whole[1800:])
        responder.end()

    def _leave(self):
        self.left += 1
        self.go.set()


WORKS = {"drain": {"migrateAfterSeconds": 1}}


async def speaking(harness, path, *, others=1, config=WORKS, **fields):
    """Return a router, the worker that speaks and waits, and the request; the others would answer at once."""
    *workers, router = await harness.served(*["aggregated"] * (1 + others), config=config, speed=10)
    slow = [Slow(worker, serial) for serial, worker in enumerate(workers)]
    asking = asyncio.create_task(asked(router, path, **fields))
    await router.until(lambda: any(each.began.is_set() for each in slow))
    (speaker,) = (each for each in slow if each.began.is_set())
    for each in slow:
        if each is not speaker:
            each.go.set()
    return router, speaker, asking


@pytest.mark.parametrize("path", ASKED)
async def test_a_drained_worker_hands_its_stream_on_and_the_client_sees_one(harness, path):
    """The text is that of an undisturbed stream, nothing counts as failed, and the drained worker is left."""
    router, speaker, asking = await speaking(harness, path)
    router.server.admission.set_drained(speaker.name, drained=True)
    got, expected = read(await asking), read(answer_to(path, orjson.dumps(STREAMED | ASKED[path]), 0))
    assert got | {"identity": expected["identity"]} == expected
    await router.until(lambda: speaker.left == 1)
    assert await router.metric("penstock_router_stream_continuations_total", reason="drain") == 1
    assert router.server.core.pool.get(speaker.name).failures == 0


@pytest.mark.parametrize(
    ("config", "fields", "others"),
    [
        ({"drain": {"migrateAfterSeconds": None}}, {}, 1),
        ({"retries": {"maxContinuations": 0}}, {}, 1),
        ({}, {"prompt": [1, 2, 3]}, 1),
        ({}, {}, 0),
    ],
)
async def test_a_stream_stays_where_it_could_not_go_on(harness, config, fields, others):
    """Switched off, not to be continued, or with no other worker: the drain waits for it."""
    path = "/v1/completions"
    router, speaker, asking = await speaking(harness, path, others=others, config=WORKS | config, **fields)
    router.server.admission.set_drained(speaker.name, drained=True)
    ticks = router.server.metrics.lag.total
    await router.until(lambda: router.server.metrics.lag.total >= ticks + 5)
    assert speaker.left == 0
    speaker.go.set()
    assert (await asking).endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_has_begun_a_tool_call_stays(harness):
    """What it has said cannot be taken up in the middle."""
    first, second, router = await harness.served("aggregated", "aggregated", config=WORKS, speed=10)
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a'}}
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
    go, began = asyncio.Event(), []

    async def speak(worker, _request, responder):
        responder.start(200)
        responder.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        began.append(worker.name)
        await go.wait()
        responder.write(b"data: [DONE]\n\n")
        responder.end()

    for each in (first, second):
        each.otherwise = partial(speak, each)
    asking = asyncio.create_task(asked(router, "/v1/chat/completions"))
    await router.until(lambda: began)
    router.server.admission.set_drained(began[0], drained=True)
    ticks = router.server.metrics.lag.total
    await router.until(lambda: router.server.metrics.lag.total >= ticks + 5)
    go.set()
    await asking
    assert len(began) == 1


async def test_a_complete_answer_waits_for_its_drain_and_is_computed_again_where_its_worker_dies(harness):
    """Nothing of it was relayed: a drain does not throw away what is computed, and its end costs no answer."""
    *workers, router = await harness.served("aggregated", "aggregated", config=WORKS, speed=10)
    began, dies = [], asyncio.Event()

    async def answer(worker, request, responder):
        began.append(worker.name)
        if len(began) == 1:
            await dies.wait()
            responder.start(200, content_type="application/json")
            responder.write(b'{"choices": [')
            responder.break_off()
            return
        await worker.complete(request, responder)

    for each in workers:
        each.otherwise = partial(answer, each)
    asking = asyncio.create_task(router.post(prompt="Tell me of the sea.", max_tokens=2))
    await router.until(lambda: began)
    router.server.admission.set_drained(began[0], drained=True)
    ticks = router.server.metrics.lag.total
    await router.until(lambda: router.server.metrics.lag.total >= ticks + 5)
    assert len(began) == 1
    dies.set()
    assert (await asking).status == 200
    assert len(set(began)) == 2
    assert await router.metric("penstock_router_retries_total", reason="upstream_broken") == 1
