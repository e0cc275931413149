"""The Responses API passes through the router: parsed, counted, relayed; its workers compute it whole."""

import orjson
import pytest

from penstock.router.proxy.completion import ApiEndpoint, RequestRefused, parse_completion
from penstock.router.proxy.prefix import read_prompt

PATH = "/v1/responses"
USAGE = {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 2}


def parsed(path=PATH, **body):
    """Parse a request."""
    return parse_completion(
        path, b"application/json", orjson.dumps({"model": "llama", **body}), model="llama"
    )


def event(kind, **more):
    """One event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **more}))


EVENTS = (
    event("response.created", response={"usage": None}),
    event("response.output_text.delta", delta=" one"),
    event("response.output_text.delta", delta=" two"),
    event("response.output_text.done", text=" one two"),
    event("response.completed", response={"usage": USAGE}),
)


@pytest.mark.parametrize(
    ("body", "size"),
    [
        ({"input": "hello"}, 5),
        ({"input": "grün", "instructions": "abc"}, 8),
        ({"input": [{"role": "user", "content": "ab"}, {"type": "reasoning"}]}, 2),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "abc"}, 5]}]}, 3),
    ],
)
def test_inputs_are_measured(body, size):
    """Text and text parts count; a response cannot be handed over."""
    request = parsed(**body)

    assert (request.endpoint, request.prompt_bytes, request.is_single) == (ApiEndpoint.RESPONSES, size, False)


@pytest.mark.parametrize("given", [None, "", [], 5, ["x"]])
def test_requests_without_input_are_refused(given):
    """As a worker would."""
    with pytest.raises(RequestRefused, match="input:"):
        parsed(input=given)


def test_a_response_has_the_prefix_of_its_chat():
    """So that a conversation finds its cache, however it is sent."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x" * 3000}]
    chat = read_prompt(parsed("/v1/chat/completions", messages=messages))

    assert read_prompt(parsed(input=messages)).chain == chat.chain
    assert read_prompt(parsed(input="x" * 3000, instructions="Be brief.")).chain == chat.chain


@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")])
async def test_streams_are_relayed_as_they_are(harness, roles):
    """By the worker that decodes; no prefill is asked for."""
    workers = [await harness.worker(role) for role in roles]

    async def answer(request, responder):
        responder.start(200)
        for each in EVENTS:
            responder.write(each)
        responder.end()

    workers[-1].otherwise = answer
    router = await harness.router(*workers)

    got = await router.post(PATH, raw=orjson.dumps({"model": "llama", "input": "hi", "stream": True}))

    assert (got.status, got.body) == (200, b"".join(EVENTS))
    assert [len(worker.seen) for worker in workers] == [0, 1][-len(roles) :]
    assert await router.metric("penstock_router_requests_total", endpoint="responses", code="200") == 1
    assert await router.metric("penstock_router_generation_tokens_total", model_name="llama") == 2
    assert await router.metric("penstock_router_cached_tokens_total", model_name="llama") == 16


async def test_whole_responses_are_counted(harness):
    """By the names that they give their usage."""
    worker = await harness.worker("aggregated")
    body = orjson.dumps({"object": "response", "output": [], "usage": USAGE})
    worker.otherwise = harness.answers.status(200, body)
    router = await harness.router(worker)

    got = await router.post(PATH, raw=orjson.dumps({"model": "llama", "input": "hi"}))

    assert (got.status, got.body) == (200, body)
    assert await router.metric("penstock_router_prompt_tokens_total", model_name="llama") == 40
    assert await router.metric("penstock_router_generation_tokens_total", model_name="llama") == 2


async def test_a_worker_without_this_api_goes_on_serving_the_others(harness):
    """An older server of the right model answers 404 for the path: that is passed on, and no worker is ejected."""
    worker, router = await harness.served("aggregated")
    worker.script = [harness.answers.status(404, b'{"detail":"Not Found"}')] * 12

    for _ in range(12):
        got = await router.post(PATH, raw=orjson.dumps({"model": "llama", "input": "hi"}))
        assert (got.status, orjson.loads(got.body)["error"]["message"]) == (404, "Not Found")
    assert (await router.post()).status == 200
