"""The bytes of events and bodies."""

import json

import pytest

from penstock.core.http.sse import DONE
from penstock.engine.core.requests import FinishReason
from penstock.engine.serve.answers import CompletionFormat, Finished
from penstock.engine.serve.protocol import Api, parse
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.engine.serve.vocabulary import WORDS, words


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
        return parse(
            json.dumps({**prompt, **fields}).encode(), settings, api=Api.CHAT if is_chat else Api.COMPLETIONS
        )

    return make


def data_of(event):
    """Decode one event."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


def test_vocabulary():
    """256 different words of 4 ASCII bytes that JSON does not escape."""
    assert len(set(WORDS)) == 256
    assert all(len(word) == 4 and json.dumps(word.decode()) == f'"{word.decode()}"' for word in WORDS)


def test_words_do_not_depend_on_how_they_are_cut():
    """Tokens [0, 300) are the same in one piece or many, and all words get used."""
    whole = words(7, 0, 300)
    assert words(7, 0, 100) + words(7, 100, 300) == whole
    assert len(set(whole)) == 256


def test_completion_events(call_of):
    """One event per token; the last one carries the reason."""
    call = call_of(stream=True)
    events = CompletionFormat(call, "cmpl-1", 5).events(call.choices[0])
    assert events.opening == b""
    first, second, rest = events.tokens(0, [b" one", b" two"]).split(b"\n\n")
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
    last = data_of(events.last(2, b" end", FinishReason.STOP))["choices"][0]
    assert (last["text"], last["finish_reason"]) == (" end", "stop")


def test_chat_events_with_usage(call_of):
    """The role comes first; with include_usage one more event has the usage."""
    call = call_of(is_chat=True, stream=True, stream_options={"include_usage": True})
    form = CompletionFormat(call, "chatcmpl-1", 5)
    events = form.events(call.choices[0])
    opening = data_of(events.opening)
    assert opening["object"] == "chat.completion.chunk"
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    token = data_of(events.tokens(0, [b" one"]))
    assert token["choices"][0]["delta"] == {"content": " one"}
    assert "usage" not in token
    closing = form.closing([Finished(call.choices[0], 7, FinishReason.LENGTH, 3)])
    assert closing.endswith(DONE)
    usage = data_of(closing.removesuffix(DONE))
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
    call = call_of(is_chat=is_chat, ignore_eos=True, max_tokens=2)
    done = Finished(call.choices[0], 2, FinishReason.LENGTH, 0, {"remote_port": 1})

    body = json.loads(CompletionFormat(call, "id-1", 5).whole([done]))

    choice = body["choices"][0]
    said = b"".join(words(call.choices[0].salt, 0, 2)).decode()
    assert (choice["message"]["content"] if is_chat else choice["text"]) == said
    assert choice["finish_reason"] == "length"
    assert body["object"] == ("chat.completion" if is_chat else "text_completion")
    assert body["kv_transfer_params"] == {"remote_port": 1}
    assert body["usage"]["completion_tokens"] == 2
