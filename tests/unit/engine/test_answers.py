"""The bytes of events and bodies."""

import json

import pytest

from penstock_engine.core.requests import FinishReason
from penstock_engine.serve import answers
from penstock_engine.serve.protocol import parse
from penstock_engine.serve.settings import ServeFlags, resolve


@pytest.fixture(scope="module")
def call_of():
    """Parse a call."""
    settings = resolve(ServeFlags("llama", "h200-llama-3.1-8b-tp1"))

    def make(*, is_chat=False, **fields):
        prompt = (
            {"messages": [{"role": "user", "content": 'a "quoted" \x00 prompt'}]}
            if is_chat
            else {"prompt": "abc"}
        )
        return parse(json.dumps({**prompt, **fields}).encode(), settings, is_chat=is_chat)

    return make


def data_of(event):
    """Decode one event."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


def test_vocabulary():
    """256 different words of 4 ASCII bytes that JSON does not escape."""
    assert len(set(answers.WORDS)) == 256
    assert all(len(word) == 4 and json.dumps(word.decode()) == f'"{word.decode()}"' for word in answers.WORDS)


def test_words_do_not_depend_on_how_they_are_cut():
    """Tokens [0, 300) are the same in one piece or many, and all words get used."""
    whole = answers.words(7, 0, 300)
    assert answers.words(7, 0, 100) + answers.words(7, 100, 300) == whole
    assert len(set(whole)) == 256


def test_completion_events(call_of):
    """One event per token; the last one carries the reason."""
    events = answers.EventFormat(call_of(stream=True), "cmpl-1", 5)
    assert events.opening == b""
    first, second, rest = events.tokens([b" one", b" two"]).split(b"\n\n")
    assert rest == b""
    assert data_of(first + b"\n\n") == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 5,
        "model": "llama",
        "choices": [
            {"index": 0, "text": " one", "logprobs": None, "finish_reason": None, "stop_reason": None}
        ],
    }
    assert data_of(second + b"\n\n")["choices"][0]["text"] == " two"
    last = data_of(events.last(b" end", FinishReason.STOP))["choices"][0]
    assert (last["text"], last["finish_reason"]) == (" end", "stop")


def test_chat_events_with_usage(call_of):
    """The role comes first; with include_usage one more event has the usage."""
    call = call_of(is_chat=True, stream=True, stream_options={"include_usage": True})
    events = answers.EventFormat(call, "chatcmpl-1", 5)
    opening = data_of(events.opening)
    assert opening["object"] == "chat.completion.chunk"
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    token = data_of(events.tokens([b" one"]))
    assert token["choices"][0]["delta"] == {"content": " one"}
    assert "usage" not in token
    usage = data_of(events.usage(answers.usage_of(call, 7, 3)))
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": 7,
        "total_tokens": call.prompt_tokens + 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("is_chat", [True, False])
def test_whole_answer(call_of, is_chat):
    """The body of an answer that is not streamed."""
    body = json.loads(
        answers.whole(
            call_of(is_chat=is_chat),
            "id-1",
            5,
            text=b" one two",
            reason=FinishReason.LENGTH,
            usage={"total_tokens": 3},
            kv_transfer_params={"remote_port": 1},
        )
    )
    choice = body["choices"][0]
    assert (choice["message"]["content"] if is_chat else choice["text"]) == " one two"
    assert choice["finish_reason"] == "length"
    assert body["object"] == ("chat.completion" if is_chat else "text_completion")
    assert body["kv_transfer_params"] == {"remote_port": 1}
