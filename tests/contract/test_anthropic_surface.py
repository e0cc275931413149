"""Anthropic's official client, unchanged, against a router and simulated workers."""

import sys
from pathlib import Path

import anthropic
import orjson
import pytest
from patience import LIMIT_S

from penstock.core.http.client import ConnectionPool

sys.path.append(str(Path(__file__).parent))
from simulated_graph import KEY, simulated_graph

SAID = [{"role": "user", "content": "What does the gate let through? " * 8}]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Open it."}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "gate", "input": {"by": 2}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "open"}]},
]
TOOLS = [{"name": "gate", "description": "Open the gate.", "input_schema": {"type": "object"}}]


@pytest.fixture(params=["aggregated", "disaggregated"])
async def router(request):
    """A router in front of simulated workers."""
    roles = ["aggregated"] if request.param == "aggregated" else ["prefill", "decode"]
    async with simulated_graph(*roles) as started:
        yield started


@pytest.fixture
async def client(router):
    """A client of it."""
    url = f"http://127.0.0.1:{router.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0, timeout=LIMIT_S) as opened:
        yield opened


async def _said(client, **fields):
    given = {"model": "llama", "max_tokens": 6, "messages": SAID, **fields}
    return await client.messages.create(**given)


async def test_a_complete_message(client, router):
    """Text, the reason of its end, and counts that add up to the prompt; in a split graph its KV was transferred."""
    message = await _said(client, system="You keep the gate.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "llama")
    assert [block.type for block in message.content] == ["text"]
    assert len(message.content[0].text) > 0
    assert message.usage.output_tokens <= 6
    counted = await client.messages.count_tokens(model="llama", messages=SAID, system="You keep the gate.")
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert router.metrics.prompt_tokens == counted.input_tokens
    assert router.metrics.kv_transfers["done"] == (router.admission.core.entry == "prefill")
    again = await _said(client, system="You keep the gate.")
    assert again.content == message.content
    assert 0 < again.usage.cache_read_input_tokens < counted.input_tokens


async def test_a_streamed_message_says_what_the_complete_one_does(client, router):
    """Each event has its place, and usage counts the prefill's cached tokens, not those that decode fetched."""
    complete = await _said(client, max_tokens=40)
    async with client.messages.stream(model="llama", max_tokens=40, messages=SAID) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert streamed.content[0].text == complete.content[0].text
    assert streamed.stop_reason == complete.stop_reason
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    usage = streamed.usage
    assert usage.output_tokens == complete.usage.output_tokens
    total = complete.usage.input_tokens + (complete.usage.cache_read_input_tokens or 0)
    assert usage.input_tokens + usage.cache_read_input_tokens == total
    assert 0 < usage.cache_read_input_tokens < total
    assert router.metrics.ttft.cumulative()[-1] == 1
    assert router.metrics.completed == 2


async def test_stop_sequences_and_limits_are_reasons(client):
    """`stop_sequence` names the one that stopped it, `max_tokens` a limit."""
    cut = await _said(client, max_tokens=1)
    assert cut.stop_reason == "max_tokens"
    stop = cut.content[0].text
    stopped = await _said(client, max_tokens=40, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


async def test_tools_and_blocks_reach_the_worker(client):
    """A tool's result is answered with text; definitions of tools and results are part of the prompt."""
    without = await client.messages.count_tokens(model="llama", messages=SAID)
    with_tools = await client.messages.count_tokens(model="llama", messages=SAID, tools=TOOLS)
    assert with_tools.input_tokens > without.input_tokens
    message = await _said(client, messages=BLOCKS, tools=TOOLS, tool_choice={"type": "auto"})
    assert message.content[0].type == "text"


async def test_a_tool_is_used(client):
    """In the user's turn, as a block with its input, complete and streamed; not if the request forbids it."""
    message = await _said(client, tools=TOOLS, max_tokens=100)
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "gate", "tool_use")
    asked = {"model": "llama", "max_tokens": 100, "messages": SAID, "tools": TOOLS}
    async with client.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        parts = [each.partial_json async for each in stream if each.type == "input_json"]
        final = await stream.get_final_message()
    assert orjson.loads("".join(parts)) == block.input
    assert (final.content[0].input, final.stop_reason) == (block.input, "tool_use")
    text = await _said(client, tools=TOOLS, tool_choice={"type": "none"})
    assert text.content[0].type == "text"


@pytest.mark.parametrize(
    ("error", "fields", "words"),
    [
        (anthropic.NotFoundError, {"model": "other"}, "this router serves 'llama'"),
        (anthropic.BadRequestError, {"messages": []}, "messages: must be a list of objects, not empty"),
        (anthropic.BadRequestError, {"extra_body": {"kv_transfer_params": {}}}, "set by the router alone"),
        (anthropic.BadRequestError, {"extra_body": {"max_tokens": 0}}, "max_tokens must be at least 1"),
        (anthropic.BadRequestError, {"stop_sequences": [""]}, "stop_sequences"),
    ],
)
async def test_errors_have_the_form_that_the_client_reads(client, error, fields, words):
    """Those of the router and of the worker alike."""
    with pytest.raises(error, match=words) as caught:
        await _said(client, **fields)
    body = caught.value.body
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})


async def test_keys_are_asked_for(router):
    """The client sends its key as x-api-key."""
    url = f"http://127.0.0.1:{router.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await _said(client)
    assert caught.value.body["error"]["type"] == "authentication_error"


async def test_what_is_refused_before_any_worker_has_the_form_too(router):
    """Another method, a path without an answer, a body that is not JSON, and one whose length is not a number."""
    url = f"http://127.0.0.1:{router.port}/v1/messages"
    pool = ConnectionPool()
    headers = ((b"content-type", b"application/json"), (b"x-api-key", KEY.encode()))
    answers = [
        await pool.request("GET", url, headers=headers),
        await pool.request("POST", f"{url}/batches", body=b"{}", headers=headers),
        await pool.request("POST", url, body=b"{", headers=headers),
        await pool.request("POST", url, body=b"{}", headers=((b"content-encoding", b"br"), *headers)),
    ]
    await pool.close()
    assert [each.status for each in answers] == [405, 404, 400, 415]
    for each in answers:
        body = orjson.loads(each.body)
        assert body["type"] == "error"
        assert body["error"]["type"] in {"invalid_request_error", "not_found_error"}
