"""Comments before the first token: `router.keepAliveSeconds` keeps silent streams open, and errors become events."""

import asyncio

import orjson
import pytest
from fake_workers import DONE, Answers, token_event

from penstock.core.http.sse import EventSplitter, payload
from penstock.router.proxy.wait_comments import KEEP_ALIVE

SPEED = 20.0
"""One second of the manifest passes in 0.05 s."""
EACH_SECOND = {"keepAliveSeconds": 1}


async def _read(stream):
    received = b""
    async for piece in stream:
        received += piece
    return received


async def test_a_silent_stream_gets_comments_until_its_first_token(harness):
    """The head is sent early; what follows the comments is the worker's stream, byte for byte."""
    worker, router = await harness.served("aggregated", config=EACH_SECOND, speed=SPEED)
    finish = worker.hold()
    stream = await router.stream(max_tokens=2)
    received = await anext(stream)
    assert (stream.status, stream.headers[b"content-type"]) == (200, b"text/event-stream")
    while received.count(KEEP_ALIVE) < 2:
        received += await anext(stream)
    finish.set()
    received += await _read(stream)
    assert received.replace(KEEP_ALIVE, b"") == token_event(0) + token_event(1) + DONE
    assert received.endswith(token_event(0) + token_event(1) + DONE)
    assert len(worker.seen) == 1
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="200") == 1


async def test_a_worker_that_fails_after_a_comment_is_replaced(harness):
    """A comment is not part of the answer: the request is retried like any other before its first token."""
    first, second = await harness.worker("aggregated"), await harness.worker("aggregated")
    router = await harness.router(first, second, config=EACH_SECOND, speed=SPEED)
    failing = {each: each.hold(Answers.status(500)) for each in (first, second)}
    stream = await router.stream(max_tokens=1)
    await anext(stream)
    asked, other = (first, second) if first.seen else (second, first)
    other.script.clear()
    failing[asked].set()
    assert (await _read(stream)).replace(KEEP_ALIVE, b"") == token_event(0) + DONE
    assert len(other.seen) == 1


@pytest.mark.parametrize(
    ("answer", "code", "counted"),
    [(Answers.status(422), "upstream_4xx", "422"), (Answers.drop(), "upstream_broken", "502")],
)
async def test_an_error_after_a_comment_is_an_event_and_counts_by_its_own_status(
    harness, answer, code, counted
):
    """The client reads what it would have got as a body; metrics and log do not take it for a success."""
    config = {**EACH_SECOND, "retries": {"maxPerRequest": 0}}
    worker, router = await harness.served("aggregated", config=config, speed=SPEED)
    finish = worker.hold(answer)
    stream = await router.stream()
    await anext(stream)
    finish.set()
    received = await router.broken(stream)
    last = EventSplitter().feed(received)[-1]
    assert orjson.loads(payload(last))["error"]["code"] == code
    assert DONE not in received
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code=counted) == 1
    assert await router.metric("penstock_router_e2e_request_latency_seconds_count", model_name="llama") == 0


async def test_a_queue_time_out_after_a_comment_is_an_event(harness):
    """It still counts among the queue's time-outs."""
    config = {**EACH_SECOND, "prefillQueue": {"workerTokens": 1, "maxWaitSeconds": 3}}
    prefill, _, router = await harness.served("prefill", "decode", config=config, speed=SPEED)
    first = await router.hanging(prefill)
    received = await router.broken(await router.stream())
    assert received.startswith(KEEP_ALIVE)
    assert b'"code":"queue_timeout"' in received
    assert await router.metric("penstock_router_queue_timeouts_total", model_name="llama") == 1
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="503") == 1
    first.cancel()


@pytest.mark.parametrize("config", [{}, EACH_SECOND], ids=["off", "complete answers"])
async def test_nothing_is_sent_early_by_default_or_to_complete_answers(harness, config):
    """A status says how the request ended."""
    worker, router = await harness.served("aggregated", config=config, speed=SPEED)
    finish = worker.hold(Answers.status(422))
    request = asyncio.create_task(router.post(stream=not config))
    await router.until(lambda: worker.seen)
    await asyncio.sleep(3 / SPEED)
    finish.set()
    assert (await request).status == 422
