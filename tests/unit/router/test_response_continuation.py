"""A response whose worker breaks off continues on another one: one id, one item, numbered without a gap, its end with the whole text."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stream_continuation import PATIENT, SETTINGS, Speakers

from penstock.core.errors import StreamBroken
from penstock.core.http.sse import EventSplitter, payload
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import Finished
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.response_answers import ResponseFormat
from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.continuation import continuation_request, emitted_prefix
from penstock.router.proxy.response_splicer import ResponseSplicer
from penstock.router.proxy.stream_record import RecordedBytes, StreamRecord

ASKED = {"model": "llama", "stream": True, "temperature": 0, "max_output_tokens": 24}
INPUTS = [
    "Tell me of the sea.",
    [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Continue."},
    ],
]


def answer_to(_path, body, serial):
    """Return the whole stream that a worker answers, under an id of its own."""
    call = parse(body, SETTINGS, api=Api.RESPONSES)[0]
    made = ResponseFormat(call, f"resp_{serial}", 1_700_000_000 + serial)
    reason = FinishReason.STOP if call.ends_by_stop else FinishReason.LENGTH
    texts = call.texts(0, call.output_tokens)
    done = Finished(call.output_tokens, reason, 0)
    return made.opening() + made.events(0, texts, reason) + made.closing(done)


def read(stream):
    """Return the events of a stream."""
    return [orjson.loads(payload(event)) for event in EventSplitter().feed(stream)]


@pytest.fixture
async def served(harness):
    """Two workers and a router that gives no worker up."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    return Speakers(*workers, answer=answer_to), router


async def asked(router, **body):
    """Return a stream's bytes."""
    raw = orjson.dumps(ASKED | body)
    headers = ((b"content-type", b"application/json"),)
    response = await router.client.stream("POST", router.url + "/v1/responses", body=raw, headers=headers)
    return b"".join([piece async for piece in response])


@pytest.mark.parametrize("said", INPUTS)
@pytest.mark.parametrize("instructions", [None, "Be brief."])
async def test_a_response_is_the_same_wherever_its_worker_breaks_off(served, said, instructions):
    """Every event is that of an undisturbed stream of the first worker, numbers and usage included."""
    speakers, router = served
    more = {"input": said} | ({} if instructions is None else {"instructions": instructions})
    answers = [answer_to("", orjson.dumps(ASKED | more), serial) for serial in (0, 1)]
    expected = {each[0]["response"]["id"]: each for each in map(read, answers)}
    first = answers[0].index(b"event: response.output_text.delta")
    begin = answers[0].index(b"\n\n", first) + 2
    places = range(begin, answers[0].index(b"event: response.output_text.done"), 89)
    for place in places:
        speakers.breaks = [(place, b"")]
        got = read(await asked(router, **more))
        assert got == expected[got[0]["response"]["id"]], place
    continued = await router.metric("penstock_router_stream_continuations_total", reason="upstream_broken")
    assert continued == len(places)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 20), st.booleans())
def test_a_response_goes_on_again_and_again(breaks, limit, has_stop):
    """Each worker says some tokens more: one number follows the other from seam to seam, and usage is that of all."""
    body = ASKED | {"input": INPUTS[0], "max_output_tokens": 28 + limit}
    if has_stop:
        words = parse(orjson.dumps(body), SETTINGS, api=Api.RESPONSES)[0].text(48)
        body["stop"] = [words[105:112]]
    request = parse_completion("/v1/responses", b"application/json", orjson.dumps(body), model="llama")
    kept = StreamRecord(request, RecordedBytes())
    said, splicer, asked_for, got = None, None, request, b""
    for serial, tokens in enumerate((*breaks, None)):
        whole = answer_to("", asked_for.raw, serial)
        events = EventSplitter().feed(whole)
        first = next(n for n, each in enumerate(events) if each.startswith(b"event: response.output_text"))
        for event in events if tokens is None else events[: first + tokens]:
            kept.append(event)
            got += event if splicer is None else splicer.splice(event)
        if tokens is not None:
            said = emitted_prefix(kept, said)
            assert not said.refusal
            asked_for = continuation_request(request, said)
            kept.drop()
            splicer = ResponseSplicer(said, splicer)
    expected = read(answer_to("", request.raw, 0))
    answer = read(got)
    assert [each["sequence_number"] for each in answer] == list(range(len(answer)))
    assert _ends(answer) == _ends(expected)
    assert _text(answer) == _text(expected)
    assert splicer.usage == expected[-1]["response"]["usage"]


def _ends(events):
    """Return all events but the text's own, without their numbers, which the cuts of the text shift."""
    kept = [each for each in events if each["type"] != "response.output_text.delta"]
    return [{key: each[key] for key in each if key != "sequence_number"} for each in kept]


def _text(events):
    return "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")


async def test_a_response_that_ends_is_not_taken_up(served):
    """Its last events repeat the text, and only its worker has what they say of it."""
    speakers, router = served
    whole = answer_to("", orjson.dumps(ASKED | {"input": INPUTS[0]}), 0)
    for place in ("event: response.output_text.done", "event: response.completed"):
        speakers.breaks = [(whole.index(place.encode()), b"")]
        with pytest.raises(StreamBroken):
            await asked(router, input=INPUTS[0])
    assert await router.metric("penstock_router_lost_streams_total", why="response") == 2
