"""The record of a stream: the same whatever the batches, bounded, and never wrong about an event that it does not know."""

import json
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.continuation import continuation_request, emitted_prefix, refusal_of_stream
from penstock.router.proxy.not_resumable import NOT_KEPT, UNKNOWN
from penstock.router.proxy.stream_record import RecordedBytes, StreamRecord

PATHS = ("completions", "chat/completions", "responses")
ASKED = {
    "completions": {"prompt": "Say: "},
    "chat/completions": {"messages": [{"role": "user", "content": "Say."}]},
    "responses": {"input": "Say."},
}
TEXTS = st.text(st.sampled_from('ab "\\\n{}[],:é日🙂\u2028'), max_size=5)


def asked(path="completions", **fields):
    """Return a request as the router has it."""
    body = {"model": "m", "stream": True, "max_tokens": 10_000} | ASKED[path] | fields
    return parse_completion(f"/v1/{path}", b"application/json", orjson.dumps(body), model="m")


def event_of(path, text, *, is_ascii=False, **more):
    """Return a token's event; ``more`` is added to its choice."""
    shown = {"delta": {"content": text}} if path == "chat/completions" else {"text": text}
    choice = {"index": 0, **shown, "logprobs": None, "finish_reason": None} | more
    chunk = {"id": "x", "object": "o", "created": 1, "model": "m", "choices": [choice]}
    made = json.dumps(chunk, ensure_ascii=is_ascii, separators=(",", ":")).encode()
    return b"data: " + made + b"\n\n"


@given(
    st.sampled_from(PATHS[:2]),
    st.lists(
        st.tuples(TEXTS, st.sampled_from(["", "", "ascii", "logprobs", "comment", *("ids",) * 4])),
        max_size=40,
    ),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0, 0.7])},
        optional={"stop": st.sampled_from(["END", "long stop string"])},
    ),
    st.booleans(),
)
def test_a_record_is_the_same_whatever_its_batches(path, said, reads, fields, has_end):
    """Read after each event, or in runs: one text, one count, one place to cut, and the same rest is asked for."""
    request = asked(path, **fields)
    batched, single = (StreamRecord(request, RecordedBytes(), tokens_per_event=3) for _ in range(2))
    events, ids = [], []
    for text, kind in said:
        more = {"logprobs": {"content": [{}]}} if kind == "logprobs" else {}
        if kind == "ids":
            more = {"token_ids": [len(text), 7] if text.startswith("a") else [len(events)]}
            ids += more["token_ids"]
        event = b": ping\n\n" if kind == "comment" else event_of(path, text, is_ascii=kind == "ascii", **more)
        events.append(event)
    if has_end:
        events.append(event_of(path, "", finish_reason="stop"))
    for at, event in enumerate(events):
        batched.append(event)
        single.append(event)
        single.read()
        if reads[at % len(reads)]:
            batched.read()
    ours, plain = emitted_prefix(batched), emitted_prefix(single)
    assert ours == plain
    assert list(batched.token_ids) == list(single.token_ids) == ids
    assert ours.shown == "".join(text for text, kind in said if kind != "comment")
    if not has_end:
        assert continuation_request(request, ours) == continuation_request(request, plain)


def test_a_long_stream_keeps_its_text_and_few_places_to_cut():
    """Not its events; the last place where the text can be cut is found whatever white space follows."""
    total = RecordedBytes()
    record = StreamRecord(asked("chat/completions", temperature=0), total)
    words = [f" word{number % 97}" for number in range(5000)] + ["\n"] * 300
    for number, word in enumerate(words):
        record.append(event_of("chat/completions", word))
        if number % 64 == 0:
            record.read()
    said = emitted_prefix(record)
    assert said.shown == "".join(words)
    assert said.text == "".join(words[:5000])
    assert said.tokens == 5000
    assert len(list(record.steps())) < 500
    assert total.recorded_bytes < 2 * len(said.shown)


@given(st.lists(st.integers(1, 3000), max_size=12), st.integers(0, 30_000))
def test_no_more_is_recorded_than_the_bound_of_all_streams(sizes, bound):
    """What is dropped is given back; a stream past the bound keeps nothing and says so."""
    total, records = RecordedBytes(), []
    for size in sizes:
        one = StreamRecord(asked(), total, bound_bytes=bound)
        texts = [str(number) for number in range(size // 10)]
        for text in texts:
            one.append(event_of("completions", text))
            one.read()
            assert total.recorded_bytes <= bound
        assert refusal_of_stream(one) == str(NOT_KEPT) or one.text() == "".join(texts)
        records.append(one)
    for one in records:
        one.drop()
    assert total.recorded_bytes == 0


UNKNOWN_CHUNKS = {
    "not JSON": b"{broken",
    "a list": b"[1]",
    "a text": b'"a"',
    "no choices": b'{"id":"x"}',
    "choices that are a number": b'{"id":"x","choices":5}',
    "a choice that is null": b'{"id":"x","choices":[null]}',
    "a second answer": b'{"id":"x","choices":[{"index":1,"text":"a"}]}',
    "a text that is a number": b'{"id":"x","choices":[{"index":0,"text":5,"delta":{"content":5}}]}',
    "a delta that is null": b'{"id":"x","choices":[{"index":0,"delta":null}]}',
    "ids that are a number": b'{"id":"x","choices":[{"index":0,"text":"z","token_ids":5}]}',
    "ids that are texts": b'{"id":"x","choices":[{"index":0,"text":"z","token_ids":["a"]}]}',
    "half a surrogate": b'{"id":"x","choices":[{"index":0,"text":"\\ud83d"}]}',
    "no UTF-8": b'{"id":"x","choices":[{"index":0,"text":"\xff"}]}',
    "usage that is a text": b'{"id":"x","choices":[],"usage":"no"}',
    "logprobs that are a list": b'{"id":"x","choices":[{"index":0,"text":"z","logprobs":[1]}]}',
    "a reason that is a number": b'{"id":"x","choices":[{"index":0,"text":"z","finish_reason":7}]}',
    "another API's event": b'{"type":"response.created"}',
    "deep nesting": b'{"id":"x","choices":' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("name", UNKNOWN_CHUNKS)
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_with_an_event_of_an_unknown_form_is_not_continued(path, name):
    """It is refused, not failed on, wherever in a batch the event comes."""
    for at in (0, 1, 5):
        record = StreamRecord(asked(path), total := RecordedBytes())
        events = [event_of(path, "a")] * 5
        if path == "responses":
            events = [response_event("created", number=0, response={"id": "r"})]
            events += [response_event("output_text.delta", number=1, delta="a")] * 4
        events.insert(at, b"data: " + UNKNOWN_CHUNKS[name] + b"\n\n")
        for event in events:
            record.append(event)
        assert refusal_of_stream(record) == str(UNKNOWN)
        record.append(event_of(path, "b"))
        assert emitted_prefix(record).refusal == str(UNKNOWN)
        assert total.recorded_bytes == 0


def response_event(kind, *, number, **more):
    """Return an event of the Responses API."""
    made = orjson.dumps({"type": f"response.{kind}", "sequence_number": number, **more})
    return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), made)


ITEM = {"type": "message", "id": "i"}


@pytest.mark.parametrize(
    "events",
    [
        [response_event("created", number=0, response=5)],
        [response_event("output_item.added", number=0, item=None)],
        [response_event("output_text.delta", number=0, delta=5)],
        [response_event("output_text.delta", number="0", delta="a")],
        [response_event("output_text.delta", number=0, delta="a")],
        [response_event("output_item.added", number=0, item=ITEM | {"id": 5})],
    ],
)
def test_a_response_is_not_continued_whose_events_the_seam_could_not_number(events):
    """Nor one whose item has no name."""
    record = StreamRecord(asked("responses"), RecordedBytes())
    for event in events:
        record.append(event)
    assert refusal_of_stream(record) == str(UNKNOWN)


def test_texts_that_look_like_several_are_not_taken_for_them():
    """What lies between two events, said within one, is read as what it is."""
    record = StreamRecord(asked(), RecordedBytes())
    usual = event_of("completions", "a")
    separator = re.search(rb'"text":"a(.*\n\ndata: .*"text":")a', usual * 2, re.DOTALL)[1]
    texts = ["a", "b", separator.decode(), '","', '"', "\\", '\\","', "c"]
    for text in texts:
        record.append(event_of("completions", text))
    assert emitted_prefix(record).shown == "".join(texts)
    assert record.tokens == len(texts)
