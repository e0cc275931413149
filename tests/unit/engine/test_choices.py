"""Answers of several choices, stops, log probabilities and echoes, over HTTP; and the Responses API."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.simulated_tokens import token_ids
from penstock.engine.serve.vocabulary import LOG_HALF, WORDS, Stop, alternatives, find_stop, words

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


async def events_of(response):
    """Read a stream to its end; return its events but [DONE]."""
    text = b"".join([data async for data in response]).decode()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(events, key="text"):
    """Return the text of each choice."""
    texts = {}
    for event in events:
        for choice in event["choices"]:
            said = choice["text"] if key == "text" else choice["delta"].get(key) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("interval", [1, 4])
async def test_merged_tokens_are_cut_alike(serving, interval):
    """Whatever the number of tokens an event carries."""
    async with serving(stream_interval=interval) as client:
        text = (await client.complete(max_tokens=20))["choices"][0]["text"]
        events = await events_of(await client.stream(max_tokens=20, stop=text[41:48]))

    assert joined(events) == [text[:41]]


async def test_an_echo_is_the_prompt_before_the_text(serving):
    """With its log probabilities, of which the first token has none; streamed alike."""
    prompt = "What évaluation suites ask."
    async with serving() as client:
        body = await client.complete(prompt, max_tokens=2, echo=True, logprobs=1)
        plain = await client.complete(prompt, max_tokens=2)
        events = await events_of(await client.stream(prompt="plain ascii", max_tokens=2, echo=True))
        likely = await events_of(
            await client.stream(prompt="plain ascii", max_tokens=2, echo=True, logprobs=0)
        )

    (choice,) = body["choices"]
    assert choice["text"].endswith(plain["choices"][0]["text"])
    assert choice["logprobs"]["token_logprobs"] == [None] + [LOG_HALF] * 8
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"][:2] == [0, 4]
    assert joined(events)[0].startswith("plain ascii")
    assert joined(events) == joined(likely)
    assert [each["choices"][0]["logprobs"]["text_offset"] for each in likely] == [[0, 4, 8, 11], [15]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_continuous_usage_counts_up(serving, path):
    """As some load generators ask: every event has the counts so far, the last one the whole."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
    async with serving(stream_interval=4) as client:
        events = await events_of(await client.stream(path, max_tokens=3, stream_options=options, **fields))

    counts = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
    assert counts == [1, 2, 3, 3]
    assert events[-1]["choices"] == []
    assert {event["usage"]["prompt_tokens"] for event in events if "usage" in event} == {
        events[-1]["usage"]["prompt_tokens"]
    }


async def test_seeds_choose_the_words(serving):
    """The same again for the same seed."""
    async with serving() as client:
        one, again, other, none = [
            (await client.complete(max_tokens=5, **seed))["choices"][0]["text"]
            for seed in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {})
        ]

    assert one == again
    assert len({one, other, none}) == 3


SALT = 7


def said(tokens):
    """Return the beginning of the text."""
    return b"".join(words(SALT, 0, tokens)).decode()


def found(*strings, ids=(), min_tokens=0, is_shown=False):
    """Find a stop."""
    return find_stop(SALT, strings, ids, min_tokens=min_tokens, is_shown=is_shown)


def test_words_need_no_escape_and_do_not_depend_on_how_they_are_cut():
    """256 different words of 4 ASCII bytes, all of which come before one comes again."""
    whole = words(SALT, 0, 300)
    assert len(set(whole)) == len(set(WORDS)) == 256
    assert words(SALT, 0, 100) + words(SALT, 100, 300) == whole
    assert all(json.dumps(word.decode()) == f'"{word.decode()}"' and len(word) == 4 for word in WORDS)


@given(st.integers(0, 300), st.integers(1, 30), st.integers(0, 40))
def test_a_stop_is_where_the_text_first_holds_it(start, length, min_tokens):
    """Found without writing the text; the token that completes it is the last."""
    text = said(1000)
    string = text[start : start + length]
    at = text.find(string)
    while -(-(at + length) // 4) < min_tokens:
        at = text.find(string, at + 1)

    assert found(string, min_tokens=min_tokens) == Stop(-(-(at + length) // 4), at, string)


@pytest.mark.parametrize(("is_shown", "text_bytes"), [(False, 9), (True, 11)])
def test_a_stop_string_is_cut_off_unless_it_is_to_be_shown(is_shown, text_bytes):
    """Its token counts all the same."""
    string = said(3)[9:11]

    assert found(string, is_shown=is_shown) == Stop(3, text_bytes, string)


@pytest.mark.parametrize(("is_shown", "text_bytes"), [(False, 16), (True, 20)])
def test_a_stop_token_ends_the_text(is_shown, text_bytes):
    """A token is its four bytes as a number."""
    token = token_ids(words(SALT, 4, 5)[0])[0]

    assert found(ids=[token], is_shown=is_shown) == Stop(5, text_bytes, token)
    assert found(ids=[token], min_tokens=6, is_shown=is_shown).tokens == 261


def test_the_chosen_word_is_the_likeliest():
    """Each alternative has half the probability of the one before."""
    likely = alternatives(words(SALT, 0, 1)[0], 3)

    assert likely[0][0] == words(SALT, 0, 1)[0]
    assert [round(math.exp(value), 6) for _, value in likely] == [0.5, 0.25, 0.125]
    assert len({word for word, _ in likely}) == 3
    assert alternatives(b"????", 0) == []
