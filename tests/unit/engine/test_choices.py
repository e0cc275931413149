"""`n`: several choices of one request, each computed as a request of its own, in one response."""

import json
from collections import defaultdict

import pytest

CHAT = {"messages": [{"role": "user", "content": "What does the gate let through?"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


async def posted(client, path, **fields):
    """Return the body of a response."""
    status, body, _ = await client.post(path, {"ignore_eos": True, "max_tokens": 6, **fields})
    assert status == 200, body
    return body


async def streamed(client, path, **fields):
    """Return the events of a stream."""
    response = await client.stream(path, max_tokens=6, stream_options={"include_usage": True}, **fields)
    body = b"".join([piece async for piece in response])
    assert body.count(b"[DONE]") == 1
    assert body.endswith(b"data: [DONE]\n\n")
    return [json.loads(event[6:]) for event in body.split(b"\n\n")[:-2]]


def text_of(choice):
    """Return the text of a choice, or of an event of it."""
    shown = choice.get("message", choice.get("delta", choice))
    return shown.get("content", shown.get("text")) or ""


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "abcdefgh"}), ("/v1/chat/completions", CHAT)]
)
async def test_choices_are_numbered_and_differ(serving, path, fields):
    """The first is the response without `n`; complete and streamed alike; the prompt counts once."""
    async with serving() as client:
        one = await posted(client, path, **fields)
        three = await posted(client, path, n=3, **fields)
        events = await streamed(client, path, n=3, **fields)

    assert [each["index"] for each in three["choices"]] == [0, 1, 2]
    texts = [text_of(each) for each in three["choices"]]
    assert texts[0] == text_of(one["choices"][0])
    assert len(set(texts)) == 3
    prompt_tokens = one["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 18, "total_tokens": prompt_tokens + 18}
    assert three["usage"].items() >= usage.items()
    parts = defaultdict(str)
    reasons = {}
    for event in events:
        for each in event["choices"]:
            parts[each["index"]] += text_of(each)
            reasons[each["index"]] = each["finish_reason"] or reasons.get(each["index"])
    assert [parts[at] for at in range(3)] == texts
    assert reasons == dict.fromkeys(range(3), "length")
    assert [each["usage"] for each in events if each.get("usage")][-1].items() >= usage.items()
    assert events[-1]["choices"] == []
    assert len({each["id"] for each in events}) == 1


async def test_choices_of_other_lengths_end_each_for_itself(serving):
    """The usage adds what each has, and each satisfies the schema on its own."""
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    async with serving() as client:
        free = await posted(client, "/v1/completions", prompt="x" * 40, n=4, ignore_eos=False, max_tokens=900)
        shaped = await posted(
            client, "/v1/chat/completions", n=4, response_format=shape, max_tokens=90, **CHAT
        )

    lengths = [len(text_of(each)) // 4 for each in free["choices"]]
    assert len(set(lengths)) > 1
    assert free["usage"]["completion_tokens"] == sum(lengths)
    assert all(json.loads(text_of(each))["a"] for each in shaped["choices"])


async def test_the_engine_computes_each_choice(serving):
    """It counts a finished request each, and a client that leaves ends them all."""
    async with serving() as client:
        await posted(client, "/v1/completions", prompt="abcdefgh", n=3)
        assert await client.metric("vllm:request_success_total", finished_reason="length") == 3
        stream = await client.stream(n=3, max_tokens=1000)
        await anext(aiter(stream))
        stream.abort()
        await client.until("vllm:num_requests_running", 0)
        assert await client.metric("vllm:request_success_total", finished_reason="abort") == 3


async def test_a_transfer_is_for_one_choice(serving):
    """A prefill worker refuses more, instead of keeping KV that nobody fetches."""
    async with serving(role="prefill") as client:
        fields = {"prompt": "abcdefgh", "n": 2, "kv_transfer_params": {"do_remote_decode": True}}
        status, body, _ = await client.post("/v1/completions", fields)
    assert (status, body["error"]["param"]) == (400, "n")
