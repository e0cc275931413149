"""Answers of several choices, stops, log probabilities and echoes, over HTTP; and the Responses API."""

import json

import pytest

from penstock.engine.serve.vocabulary import LOG_HALF

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


async def test_several_answers_to_several_prompts(serving):
    """Prompt by prompt, n to each; all differ, the first is that of n=1; a prompt is counted once."""
    async with serving() as client:
        body = await client.complete(["abcdefgh", "hello, world"], n=2, max_tokens=3)
        alone = await client.complete("hello, world", max_tokens=3)
        events = await events_of(
            await client.stream(
                prompt=["abcdefgh", "hello, world"], n=2, max_tokens=3, stream_options={"include_usage": True}
            )
        )

    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts[2] == alone["choices"][0]["text"]
    assert body["usage"]["prompt_tokens"] == 2 + 3
    assert body["usage"]["completion_tokens"] == 12
    assert joined(events) == texts
    assert events[-1]["usage"] == {**body["usage"], "prompt_tokens_details": {"cached_tokens": 0}}


async def test_a_stop_string_ends_the_text(serving):
    """Streamed or not the text ends before it; its token was generated."""
    async with serving() as client:
        text = (await client.complete(max_tokens=20))["choices"][0]["text"]
        stop = text[30:34]
        cut = await client.complete(max_tokens=20, stop=["never", stop])
        shown = await client.complete(max_tokens=20, stop=stop, include_stop_str_in_output=True)
        events = await events_of(await client.stream(max_tokens=20, stop=stop))

    (choice,) = cut["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:30], "stop", stop)
    assert cut["usage"]["completion_tokens"] == 9
    assert shown["choices"][0]["text"] == text[:34]
    assert joined(events) == [text[:30]]
    assert events[-1]["choices"][0]["stop_reason"] == stop


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


async def test_a_response(serving):
    """One message of one text, with usage under its own names."""
    fields = {"input": "hello", "instructions": "Be brief.", "max_output_tokens": 4, "ignore_eos": True}
    async with serving() as client:
        status, body, _ = await client.post(RESPONSES, fields)
        _, again, _ = await client.post(RESPONSES, fields)
        chat = {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        }
        _, same, _ = await client.post(CHAT, {**chat, "max_tokens": 4, "ignore_eos": True})

    assert (status, body["object"], body["status"]) == (200, "response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    (message,) = body["output"]
    assert message["content"][0]["text"] == same["choices"][0]["message"]["content"]
    tokens = same["usage"]["prompt_tokens"]
    assert body["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + 4,
    }
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_a_streamed_response(serving):
    """Numbered events from created to the end, each with its name; the last one holds it all."""
    fields = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]}
    async with serving(mean_output_tokens=3.0) as client:
        response = await client.stream(RESPONSES, **fields, prompt=None, ignore_eos=False)
        text = b"".join([data async for data in response]).decode()
        _, body, _ = await client.post(RESPONSES, fields)

    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == body["output"][0]["content"][0]["text"]
    assert len(deltas) == body["usage"]["output_tokens"]
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.completed", "completed")
    assert events[-1]["response"]["output"][0]["content"] == body["output"][0]["content"]
