"""The official OpenAI client, unchanged, against a router and simulated workers: what clients' suites send.

They run in this process; tests/world and e2e have them as processes.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from patience import LIMIT_S

from penstock.api import Role, RouterConfig
from penstock.core.http.server import HttpServer
from penstock.router.core.worker import WorkerSpec
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

sys.path.append(str(Path(__file__).parent))
from simulated_graph import KEY, simulated_graph

MESSAGES = [{"role": "user", "content": "What does the gate let through?"}]
PROMPT = "The gate lets through what the turbine can use. " * 4
TOOL = {
    "type": "function",
    "function": {
        "name": "open_gate",
        "description": "Open the gate.",
        "parameters": {"type": "object", "properties": {"width": {"type": "number"}}},
    },
}
EOS = {"ignore_eos": True}


@pytest.fixture(params=["aggregated", "disaggregated"])
async def client(request):
    """A client of a router in front of simulated workers."""
    roles = ["aggregated"] if request.param == "aggregated" else ["prefill", "decode"]
    async with simulated_graph(*roles) as router:
        url = f"http://127.0.0.1:{router.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=LIMIT_S) as opened:
            yield opened


async def complete(client, prompt=PROMPT, **fields):
    """Ask for a completion that ends by its length."""
    return await client.completions.create(model="llama", prompt=prompt, extra_body=EOS, **fields)


async def test_streamed_completions(client):
    """One event a token, and usage in the last one: by the simulated tokenizer, 4 bytes each."""
    stream = await complete(client, max_tokens=6, stream=True, stream_options={"include_usage": True})
    events = [event async for event in stream]

    texts = [event.choices[0].text for event in events if event.choices]
    assert len([text for text in texts if text]) == 6
    assert events[-1].usage.prompt_tokens == len(PROMPT) // 4
    assert events[-1].usage.completion_tokens == 6


async def test_streamed_chats(client):
    """Role first, then text, then usage."""
    stream = await client.chat.completions.create(
        model="llama",
        messages=[{"role": "system", "content": "Be brief."}, *MESSAGES],
        max_completion_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EOS,
    )
    events = [event async for event in stream]

    assert events[0].choices[0].delta.role == "assistant"
    assert len([each for each in events if each.choices and each.choices[0].delta.content]) == 5
    assert events[-1].usage.completion_tokens == 5


async def test_the_cache_shows_in_usage(client):
    """The second time all full blocks but the last computed one come from the cache."""
    prompt = "A prompt that comes twice, and is found in the cache the second time. " * 8
    first, second = [await complete(client, prompt=prompt, max_tokens=2) for _ in range(2)]

    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens


async def test_models_and_request_ids(client):
    """Models are listed and retrieved; an answer keeps the client's own id."""
    raw = await client.completions.with_raw_response.create(
        model="llama", prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )

    assert [model.id async for model in client.models.list()] == ["llama"]
    assert (await client.models.retrieve("llama")).id == "llama"
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().id.endswith("mine-7")


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        ({"prompt": None}, openai.BadRequestError, "invalid_request"),
        ({"extra_headers": {"content-type": "text/plain"}}, openai.APIStatusError, "unsupported_media_type"),
    ],
)
async def test_errors_are_the_clients_own_types(client, changes, error, code):
    """Each status becomes the exception that the client has for it, with code and message."""
    with pytest.raises(error) as caught:
        await client.completions.create(**{"model": "llama", "prompt": "x", "max_tokens": 1, **changes})

    assert caught.value.body["code"] == code
    assert caught.value.body["message"]


async def test_a_wrong_key_is_an_authentication_error(client):
    """401, for completions and models."""
    async with client.with_options(api_key="sk-wrong") as wrong:
        with pytest.raises(openai.AuthenticationError):
            await wrong.completions.create(model="llama", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_stops(client, is_stream):
    """The text ends before the stop, with the reason stop."""
    text = (await complete(client, max_tokens=20)).choices[0].text
    answer = await complete(client, max_tokens=20, stop=["never said", text[30:40]], stream=is_stream)
    choices = [event.choices[0] async for event in answer] if is_stream else answer.choices

    assert "".join(choice.text for choice in choices) == text[:30]
    assert choices[-1].finish_reason == "stop"


async def test_log_probabilities_have_their_form(client):
    """One for each token, with as many alternatives as asked for; streamed, they are the same."""
    asked = {"model": "llama", "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await client.chat.completions.create(**asked)).choices
    content = choice.logprobs.content
    assert "".join(each.token for each in content).startswith(choice.message.content)
    assert {len(each.top_logprobs) for each in content} == {2}
    assert all(each.logprob < 0 for each in content)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    streamed = [
        part for chunk in chunks for each in chunk.choices if each.logprobs for part in each.logprobs.content
    ]
    assert streamed == content
    whole = await client.completions.create(model="llama", prompt="Hi", max_tokens=6, logprobs=3)
    found = whole.choices[0].logprobs
    assert (
        len(found.tokens)
        == len(found.token_logprobs)
        == len(found.text_offset)
        == whole.usage.completion_tokens
    )
    assert {len(each) for each in found.top_logprobs} == {3}


async def test_an_agents_loop_calls_a_tool_and_then_answers(client):
    """A simulated model calls a tool in the user's turn, complete and streamed, and answers its result in text."""
    offered = {"model": "llama", "messages": MESSAGES, "tools": [TOOL]}
    answer = await client.chat.completions.create(**offered, tool_choice="none", max_tokens=4)
    followed = await client.chat.completions.create(
        model="llama",
        messages=[
            *MESSAGES,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "open_gate", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "opened"},
        ],
        tools=[TOOL],
        max_tokens=4,
    )

    for each in (answer, followed):
        assert each.choices[0].message.content
        assert each.choices[0].message.tool_calls is None
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        (made,) = (await client.chat.completions.create(**offered, **choice)).choices
        (call,) = made.message.tool_calls
        assert (made.finish_reason, call.function.name) == ("tool_calls", TOOL["function"]["name"])
        stream = await client.chat.completions.create(**offered, **choice, stream=True)
        parts = [
            part async for chunk in stream for each in chunk.choices for part in each.delta.tool_calls or ()
        ]
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert parts[0].function.name == call.function.name


async def test_several_choices(client):
    """Numbered, with the usage of all; complete and streamed alike."""
    asked = {"model": "llama", "messages": MESSAGES, "n": 2, "max_tokens": 5, "extra_body": EOS}
    whole = await client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(set(texts)) == 2
    assert whole.usage.completion_tokens == 10
    said = ["", ""]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == texts


async def test_a_response_calls_a_function_or_has_the_format_of_its_text(client):
    """As the client itself reads them, streamed too."""
    function = {"type": "function", **TOOL["function"]}
    asked = {"model": "llama", "input": "Open the gate.", "tools": [function]}
    (call,) = (await client.responses.create(**asked)).output
    assert (call.type, call.name) == ("function_call", function["name"])
    async with client.responses.stream(**asked) as stream:
        deltas = [
            each.delta async for each in stream if each.type == "response.function_call_arguments.delta"
        ]
        final = await stream.get_final_response()
    assert "".join(deltas) == call.arguments
    assert final.output[0].arguments == call.arguments
    schema = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
    shape = {"format": {"type": "json_schema", "name": "gate", "schema": schema}}
    answer = await client.responses.create(model="llama", input="Is it open?", text=shape)
    assert isinstance(orjson.loads(answer.output_text)["open"], bool)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"top_p": 5},
        {"stop": [""]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"pattern": "x"}},
            }
        },
        {"n": 129},
        {"top_logprobs": 21},
        {"extra_body": {"best_of": []}},
        {"logit_bias": {"x": 1}},
    ],
)
async def test_what_cannot_be_served_is_a_bad_request(client, fields):
    """Never a 500, and the next request is served."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=2, **fields)

    assert {"message", "type", "param", "code"} == set(caught.value.body)
    assert (await complete(client, max_tokens=1)).choices


async def test_responses(client):
    """Output text, usage and the reason why it ended."""
    answer = await client.responses.create(
        model="llama", input="What does it let through?", instructions="Be brief.", max_output_tokens=5,
        extra_body=EOS,
    )  # fmt: skip

    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert len(answer.output_text) == 20
    assert answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5


async def test_streamed_responses(client):
    """Deltas make the text of the last event."""
    stream = await client.responses.create(
        model="llama", input=[{"role": "user", "content": "Hello"}], max_output_tokens=5, stream=True
    )
    events = [event async for event in stream]

    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(deltas) == events[-1].response.output_text


async def _serve(handler, **config):
    """Start a router in this process in front of one fake aggregated worker."""
    worker = HttpServer(handler)
    await worker.start("127.0.0.1", 0)
    spec = WorkerSpec("w", Role.AGGREGATED, f"http://127.0.0.1:{worker.port}", supervised=True)
    config = RouterConfig.model_validate(config)
    router = RouterServer(RouterSettings(model="llama", disaggregated=False, workers=(spec,), config=config))
    await router.start()
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="any", max_retries=0)

    async def stop():
        await client.close()
        await router.close()
        await worker.close(grace_s=0)

    return client, stop


async def test_a_stream_that_breaks_raises():
    """Of what breaks off again where it continued, the error event is an APIError, not a stream that looks complete."""
    seen = asyncio.Event()

    async def break_off(request, responder):
        responder.start(200)
        responder.write(b'data: {"id":"1","object":"text_completion","created":1,"model":"llama",')
        responder.write(b'"choices":[{"index":0,"text":"x","finish_reason":null,"logprobs":null}]}\n\n')
        await seen.wait()
        responder.abort()

    client, stop = await _serve(break_off)
    stream = await client.completions.create(model="llama", prompt="x", stream=True)

    assert (await anext(stream)).choices[0].text == "x"
    seen.set()
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in stream:
            pass
    await stop()


async def test_an_overloaded_worker_is_an_internal_server_error():
    """503 from the only worker, after the router's own retries."""

    async def refuse(request, responder):
        responder.send(503, b'{"error":{"message":"leaving","type":"server_error","code":null}}')

    client, stop = await _serve(refuse)
    with pytest.raises(openai.InternalServerError, match="leaving"):
        await client.completions.create(model="llama", prompt="x")
    await stop()


async def test_tokenizer_routes(client):
    """What /tokenize counts is what a completion is billed, and /detokenize gives the text back."""
    asked = {"model": "llama", "prompt": PROMPT}
    found = await client.post("../tokenize", body=asked, cast_to=dict[str, Any])
    completion = await client.completions.create(model="llama", prompt=PROMPT, max_tokens=1)
    assert found["count"] == len(found["tokens"]) == completion.usage.prompt_tokens
    back = await client.post("../detokenize", body={"tokens": found["tokens"]}, cast_to=dict[str, Any])
    assert back == {"prompt": PROMPT}
    chat = await client.post(
        "../tokenize", body={"model": "llama", "messages": MESSAGES}, cast_to=dict[str, Any]
    )
    answer = await client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=1)
    assert chat["count"] == answer.usage.prompt_tokens


async def test_embeddings_are_refused_where_the_model_has_none(client):
    """The client reads what is served instead."""
    with pytest.raises(openai.NotFoundError, match="the workers of this model do not serve /v1/embeddings"):
        await client.embeddings.create(model="llama", input="x")
