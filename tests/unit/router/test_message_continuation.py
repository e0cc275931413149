"""A stream of Anthropic's API whose worker breaks off continues as a chat, and its client sees messages alone."""

from __future__ import annotations

import orjson
import pytest
from test_stream_continuation import PATIENT, SETTINGS, Speakers, answer_to

from penstock.core.http.sse import EventSplitter, payload
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import Finished
from penstock.engine.serve.message_answers import MessageFormat
from penstock.engine.serve.protocol import Api, parse

PATH = "/v1/messages"
ASKED = {
    "model": "llama",
    "stream": True,
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 24,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [{"role": "user", "content": "Tell me of the sea."}],
}


def answer(path: str, body: bytes, serial: int) -> bytes:
    """Return the whole stream of a worker."""
    if path != PATH:
        return answer_to(path, body, serial)
    call = parse(body, SETTINGS, api=Api.MESSAGES)[0]
    made = MessageFormat(call, f"msg-{serial}", 0)
    reason = FinishReason.STOP if call.ends_by_stop else FinishReason.LENGTH
    texts = call.texts(0, call.output_tokens)
    return (
        made.opening() + made.events(0, texts, reason) + made.closing(Finished(call.output_tokens, reason, 0))
    )


async def begun(router):
    """Return a stream whose head has come."""
    headers = ((b"content-type", b"application/json"),)
    return await router.client.stream("POST", router.url + PATH, body=orjson.dumps(ASKED), headers=headers)


async def asked(router) -> bytes:
    """Return a stream's bytes."""
    return b"".join([piece async for piece in await begun(router)])


def read(stream: bytes) -> dict:
    """Return what a client makes of a stream: the order of its events, its text, its end, and its counts."""
    events = [orjson.loads(payload(event)) for event in EventSplitter().feed(stream)]
    kinds = [each["type"] for each in events]
    deltas = [each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]
    (end,) = (each for each in events if each["type"] == "message_delta")
    usage = end["usage"]
    return {
        "kinds": list(dict.fromkeys(kinds)),
        "once": [kinds.count(each) for each in ("message_start", "content_block_stop", "message_stop")],
        "text": "".join(deltas),
        "end": end["delta"],
        "counts": [usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]],
    }


@pytest.fixture
async def served(harness):
    """Two workers and a router that gives no worker up."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    return Speakers(*workers, answer=answer), router


async def test_a_message_is_the_same_wherever_its_worker_breaks_off(served):
    """Text, order and number of events, reason and counts; the next worker gets an open message of a chat."""
    speakers, router = served
    expected = read(await asked(router))
    assert expected["end"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    whole = answer(PATH, orjson.dumps(ASKED), 0)
    first = whole.index(b"\n\n", whole.index(b"content_block_delta")) + 2
    for place in range(first, whole.index(b"event: content_block_stop"), 173):
        speakers.breaks = [(place, b"")]
        speakers.seen.clear()
        assert read(await asked(router)) == expected, place
        rest = speakers.seen[1]
        assert rest["messages"][:-1] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Tell me of the sea."},
        ]
        assert rest["messages"][-1]["role"] == "assistant"
        assert "system" not in rest


async def test_a_message_continues_several_times(served):
    """What all workers generated is one message."""
    speakers, router = served
    expected = read(await asked(router))
    speakers.breaks = [(1500, b""), (1500, b"")]
    speakers.seen.clear()
    assert read(await asked(router)) == expected
    assert len(speakers.seen) == 3


async def test_what_ends_a_message_is_an_error_in_its_own_form(harness):
    """Also where the rest was asked for as a chat."""
    config = {**PATIENT, "retries": {"minPerSecond": 1000, "maxContinuations": 1}}
    *workers, router = await harness.served("aggregated", "aggregated", config=config)
    speakers = Speakers(*workers, answer=answer)
    speakers.breaks = [(1500, b""), (1500, b"")]
    received = await router.broken(await begun(router))
    assert EventSplitter().feed(received)[-1].startswith(b'event: error\ndata: {"type":"error"')
