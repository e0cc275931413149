"""Workers whose streams hold events of unknown forms: clients get them as they came, and every break ends in an error event."""

import contextlib
import json
import logging
from collections import Counter

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stream_continuation import ASKED, PATIENT, STREAMED, Speakers, answer_to
from test_stream_record import PATHS, UNKNOWN_CHUNKS
from test_stream_record import asked as asked_for

from penstock.core.errors import StreamBroken, UpstreamError
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy.continuation import CompletionSplicer, EmittedPrefix, emitted_prefix
from penstock.router.proxy.kv_transfer import PrefillResponse, read_usage, with_cached_tokens
from penstock.router.proxy.response_splicer import ResponseSplicer
from penstock.router.proxy.stream import RelayMeter
from penstock.router.proxy.stream_record import RecordedBytes, StreamRecord
from penstock.router.server import TickJobs


async def raw_stream(router, path, **more):
    """Return what a client gets of a stream, to its end or its break."""
    body = orjson.dumps(STREAMED | ASKED[path] | more)
    headers = ((b"content-type", b"application/json"),)
    response = await router.client.stream("POST", router.url + path, body=body, headers=headers)
    received = b""
    try:
        async for piece in response:
            received += piece
    except StreamBroken:
        return received, True
    return received, False


async def speakers_of(harness, **config):
    """Return two workers, what they say, and a router before them."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT | config, speed=10)
    return workers, Speakers(*workers), router


def place_of(path, tokens=6):
    """Return where an event of an answer ends, after some tokens."""
    whole = answer_to(path, orjson.dumps(STREAMED | ASKED[path]), 0)
    at = 0
    for _ in range(tokens):
        at = whole.index(b"\n\n", at) + 2
    return at


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("name", UNKNOWN_CHUNKS)
async def test_a_break_after_an_unknown_form_ends_in_an_error_event(harness, caplog, path, name):
    """No other worker is asked, and the log says why."""
    _, speakers, router = await speakers_of(harness)
    event = b"data: " + UNKNOWN_CHUNKS[name] + b"\n\n"
    speakers.breaks = [(place_of(path), event)]
    with caplog.at_level(logging.WARNING):
        received, is_broken = await raw_stream(router, path)
    assert is_broken
    last = received.rstrip().split(b"\n\n")[-1]
    assert orjson.loads(last.removeprefix(b"data: "))["error"]["type"]
    assert event in received
    assert len(speakers.seen) == 1
    assert any("form" in str(each.keys.get("why")) for each in caplog.records if hasattr(each, "keys"))
    await router.assert_idle()


JOINED = {
    "a second answer",
    "ids that are a number",
    "ids that are texts",
    "usage that is a text",
    "logprobs that are a list",
    "a reason that is a number",
}
"""What a seam can give the stream's own id, although nothing more is known of it."""


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("name", UNKNOWN_CHUNKS)
async def test_the_rest_of_a_stream_passes_unknown_forms_as_they_came(harness, path, name):
    """The seam does not fail on them; the stream comes to its end."""
    workers, speakers, router = await speakers_of(harness)
    event = b"data: " + UNKNOWN_CHUNKS[name] + b"\n\n"

    async def speak(serial, request, responder):
        speakers.seen.append(request)
        whole = answer_to(request.path, request.body, serial)
        responder.start(200)
        if len(speakers.seen) == 1:
            responder.write(whole[: place_of(path)])
            responder.break_off()
            return
        middle = whole.index(b"\n\n", len(whole) // 2) + 2
        responder.write(whole[:middle] + event)
        responder.write(whole[middle:])
        responder.end()

    for serial, worker in enumerate(workers):
        worker.otherwise = lambda request, responder, serial=serial: speak(serial, request, responder)
    received, is_broken = await raw_stream(router, path)
    assert not is_broken
    assert received.endswith(b"data: [DONE]\n\n")
    assert received.count(event) == (name not in JOINED)
    assert len(speakers.seen) == 2


async def test_a_fault_of_the_router_ends_a_begun_stream_in_an_error_event(harness, monkeypatch):
    """A client must not take what it has for the whole."""
    workers, _, router = await speakers_of(harness)
    observe = RelayMeter._observe_slowly

    def fails(meter, data, now_real_s):
        if meter.tokens:
            raise RuntimeError("a fault")
        return observe(meter, data[: data.index(b"\n\n", data.index(b"text")) + 2], now_real_s)

    monkeypatch.setattr(RelayMeter, "_observe_slowly", fails)
    monkeypatch.setattr(RelayMeter, "_learn_usual", lambda *_: None)
    body = orjson.dumps(STREAMED | ASKED["/v1/completions"])
    whole = answer_to("/v1/completions", body, 0)

    async def speak(_request, responder):
        responder.start(200)
        responder.write(whole[:400])
        await router.until(lambda: router.server.metrics.ttft.total)
        responder.write(whole[400:])
        responder.end()

    for worker in workers:
        worker.otherwise = speak
    received, is_broken = await raw_stream(router, "/v1/completions")
    assert is_broken
    assert orjson.loads(received.rstrip().split(b"data: ")[-1])["error"]["code"]
    await router.assert_idle()


def test_a_job_that_fails_is_counted_and_the_others_run(caplog):
    """It is logged at once, and again after ten seconds if it fails still."""
    done, failed = [], Counter()

    def fails():
        raise ValueError("wrong")

    jobs = TickJobs({"first": fails, "second": lambda: done.append(1)}, failed)
    with caplog.at_level(logging.ERROR):
        for tick in range(150):
            jobs.run(tick / 10)
    assert len(done) == 150
    assert failed == {"first": 150}
    assert [each.keys["failures"] for each in caplog.records] == [1, 101]
    assert {each.keys["job"] for each in caplog.records} == {"first"}


async def test_a_tick_goes_on_where_one_of_its_jobs_fails(harness, monkeypatch):
    """Discovery, queues, the picker and the access log do not depend on moves; the page counts the failures."""
    _, _, router = await speakers_of(harness)

    def fails():
        raise ValueError("wrong")

    monkeypatch.setitem(router.server.tick_jobs, "moves", fails)
    ran = []
    queues = router.server.tick_jobs["queues"]
    monkeypatch.setitem(router.server.tick_jobs, "queues", lambda: (queues(), ran.append(1)))
    await router.until(lambda: len(ran) > 3)
    assert await router.metric("penstock_router_failed_tick_jobs_total", job="moves") > 1


RESPONSE_CHUNKS = (
    {"type": "response.output_text.delta", "delta": 5},
    {"type": "response.output_text.delta"},
    {"type": "response.output_text.done", "text": None},
    {"type": "response.content_part.done", "part": 5},
    {"type": "response.content_part.done", "part": {"type": "output_text"}},
    {"type": "response.output_item.done", "item": [1]},
    {"type": "response.completed", "response": None},
    {"type": "response.completed", "response": {"output": [1]}},
    {"type": "response.completed", "response": {"output": 5, "usage": {"input_tokens": "a"}}},
)


@pytest.mark.parametrize("chunk", RESPONSE_CHUNKS)
def test_the_seam_of_a_response_passes_unknown_forms(chunk):
    """As they came; the numbers of those that follow have no gap."""
    said = EmittedPrefix(
        text="The", shown="The", tokens=1, head={"id": "r", "item_id": "i", "sequence_number": 4}
    )
    splicer = ResponseSplicer(said, None)
    event = b"event: response.x\ndata: " + orjson.dumps(chunk) + b"\n\n"
    assert splicer.splice(event) == event
    known = {"type": "response.output_text.delta", "delta": " sea", "item_id": "other", "sequence_number": 9}
    joined = splicer.splice(b"event: response.x\ndata: " + orjson.dumps(known) + b"\n\n")
    assert orjson.loads(joined.split(b"data: ")[1]) == known | {"item_id": "i", "sequence_number": 5}


@pytest.mark.parametrize("cached", ["a", None, [1], {"a": 1}, True, 2.5])
def test_counts_of_an_unknown_form_are_not_added(cached):
    """Anthropic's usage counts cached tokens apart; what is not a number is none."""
    usage = {"input_tokens": 5, "cache_read_input_tokens": cached, "output_tokens": 2}
    assert read_usage(usage) == (5, 2, None)
    assert with_cached_tokens(usage, 3) is None
    assert usage == {"input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 2}


KEYS = st.sampled_from(
    [
        "id",
        "choices",
        "index",
        "text",
        "delta",
        "content",
        "role",
        "finish_reason",
        "token_ids",
        "prompt_token_ids",
        "logprobs",
        "tokens",
        "usage",
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "cached_tokens",
        "input_tokens",
        "output_tokens",
        "cache_read_input_tokens",
        "type",
        "response",
        "item",
        "part",
        "output",
        "item_id",
        "sequence_number",
        "message",
        "error",
    ]
)
NAMES = (
    b"",
    b"event: message_start\n",
    b"event: message_delta\n",
    b"event: content_block_delta\n",
    b"event: response.created\n",
    b"event: response.output_text.delta\n",
    b"event: response.completed\n",
)


class Assigned:
    """Takes what a stream's assignment does."""

    def grow(self, tokens, gap_s=None):
        """Count nothing."""


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
CHUNKS = st.fixed_dictionaries(
    {},
    optional={
        key: st.just([{"index": 0, "text": "a"}]) | JSON for key in ("choices", "usage", "message", "type")
    },
)


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), CHUNKS | JSON), max_size=6),
    st.sampled_from(PATHS),
    st.booleans(),
)
def test_no_event_of_any_form_fails_the_relay_its_record_or_its_seam(events, path, has_prefill):
    """A worker may send what it likes: the router passes it on, or blames the worker."""
    request = asked_for(path)
    record = StreamRecord(request, RecordedBytes())
    prefilled = PrefillResponse(None, 3, 2, None) if has_prefill else None
    metrics, assignment = RouterMetrics(), Assigned()
    meter = RelayMeter(metrics, assignment, lambda: None, 0.0, 0.0, 1.0, prefilled, record, can_resume=True)
    said = EmittedPrefix("a", "ab", 1, 2, {"id": "r", "item_id": "i", "sequence_number": 4})
    splicers = [ResponseSplicer(said, None), CompletionSplicer(said, request)]
    for name, content in events:
        event = name + b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
        with contextlib.suppress(UpstreamError):
            meter.observe(event)
        for splicer in splicers:
            splicer.splice(event)
    read_usage(meter.usage)
    emitted_prefix(record)
