"""Anthropic's Messages API: what routing reads of it, its stream's end in an error, and its usage through a KV transfer."""

import orjson
import pytest
from fake_workers import PARAMS

from penstock.router.policy.prefixes import render_chat
from penstock.router.proxy.completion import RequestRefused, parse_completion
from penstock.router.proxy.kv_transfer import read_usage, with_cached_tokens
from penstock.router.proxy.messages import chat_of, is_plain
from penstock.router.proxy.prefix import read_prompt

ASKED = {"model": "llama", "max_tokens": 8, "messages": [{"role": "user", "content": "Open the gate. " * 40}]}


def _event(kind, **more):
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **more}))


START = _event("message_start", message={"content": [], "usage": {"input_tokens": 40, "output_tokens": 0}})
DELTA = _event("content_block_delta", index=0, delta={"type": "text_delta", "text": "x"})
USAGE = _event(
    "message_delta",
    delta={"stop_reason": "end_turn"},
    usage={"input_tokens": 1, "cache_read_input_tokens": 39, "output_tokens": 2},
)
STOP = _event("message_stop")


async def _prefilled(_, responder):
    usage = {"input_tokens": 24, "cache_read_input_tokens": 16, "output_tokens": 1}
    answer = {"type": "message", "content": [], "usage": usage, "kv_transfer_params": PARAMS}
    responder.send(200, orjson.dumps(answer))


def _parsed(**more):
    raw = orjson.dumps({**ASKED, **more})
    return parse_completion("/v1/messages", b"application/json", raw, model="llama")


async def test_a_stream_passes_through_but_for_its_cached_tokens(harness):
    """Decode counts what it fetched as cached; the client reads what prefill found in its cache."""
    prefill, decode, router = await harness.served("prefill", "decode")
    prefill.otherwise = _prefilled
    decode.otherwise = harness.answers.stream(START, DELTA, DELTA, USAGE, STOP)
    answer = await router.post("/v1/messages", raw=orjson.dumps({**ASKED, "stream": True}))
    assert prefill.seen[0].body["max_tokens"] == 1
    assert decode.seen[0].body["kv_transfer_params"] == PARAMS
    usage = b'"usage":{"input_tokens":24,"output_tokens":2,"cache_read_input_tokens":16}}\n\n'
    start, end = (
        START.replace(
            b'"input_tokens":40,"output_tokens":0',
            b'"input_tokens":24,"output_tokens":0,"cache_read_input_tokens":16',
        ),
        USAGE.partition(b'"usage"')[0] + usage,
    )
    assert answer.body == start + DELTA + DELTA + end + STOP
    metrics = router.server.metrics
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.completed_tokens) == (40, 16, 2)


async def test_a_stream_that_breaks_off_ends_in_an_error_of_its_own_form(harness):
    """Its rest is asked of no other worker; it must not look complete."""
    worker, router = await harness.served("aggregated")
    worker.otherwise = harness.answers.stream(START, DELTA, broken=True)
    body = orjson.dumps({**ASKED, "stream": True})
    stream = await router.client.stream(
        "POST", f"{router.url}/v1/messages", body=body, headers=((b"content-type", b"application/json"),)
    )
    received = await router.broken(stream)
    begun, _, event = received.partition(b"event: error\ndata: ")
    assert begun.rstrip() == (START + DELTA).rstrip()
    error = orjson.loads(event)
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")


async def test_an_error_before_the_first_token_is_an_answer(harness):
    """VLLM begins a stream before it has the KV, so that an error event may be all that comes: a new prefill is tried."""
    prefill, decode, router = await harness.served("prefill", "decode")
    prefill.otherwise = _prefilled
    lost = _event("error", error={"type": "internal_error", "message": "KV load failed"})
    decode.script = [harness.answers.stream(START, lost)]
    decode.otherwise = harness.answers.stream(START, DELTA, STOP)
    answer = await router.post("/v1/messages", raw=orjson.dumps({**ASKED, "stream": True}))
    assert answer.status == 200
    assert answer.body.endswith(STOP)
    assert len(prefill.seen) == 2


async def test_rejections_have_the_form_that_the_client_reads(harness):
    """A full queue is a rate limit, no worker an overload, each with Retry-After."""
    router = (await harness.served("aggregated", config={"prefillQueue": {"maxWaitSeconds": 0.05}}))[-1]
    router.server.admission.set_drained("aggregated-0", drained=True)
    answer = await router.post("/v1/messages", raw=orjson.dumps(ASKED))
    error = orjson.loads(answer.body)
    assert (answer.status, error["type"], error["error"]["type"]) == (503, "error", "overloaded_error")
    assert b"retry-after" in answer.headers


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (b'{"detail":"Not Found"}', "do not serve /v1/messages"),
        (b'{"type":"error","error":{"type":"x","message":"The model `a` does not exist."}}', "The model `a`"),
    ],
)
async def test_workers_that_lack_the_api_are_not_charged(harness, lack, words):
    """An engine of another kind or age; one that has not loaded an adapter yet says that itself."""
    worker, router = await harness.served("aggregated")
    worker.otherwise = harness.answers.status(404, lack)
    for _ in range(12):
        answer = await router.post("/v1/messages", raw=orjson.dumps(ASKED))
        assert (answer.status, orjson.loads(answer.body)["error"]["type"]) == (404, "not_found_error")
        assert words in orjson.loads(answer.body)["error"]["message"]
    assert len(worker.seen) == 12


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({"messages": [{"role": "user", "content": "abc"}], "system": "de"}, 5),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "ü"}]}]}, 2),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "content": [{"type": "text", "text": "abcd"}]}],
                    }
                ]
            },
            4,
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "x" * 900}}]}]}, 0),
    ],
)
def test_the_prompt_is_its_texts(more, size):
    """System prompt, messages and tools' results; an image is not text."""
    request = _parsed(**more)
    assert (request.prompt_bytes, request.is_single) == (size, True)


@pytest.mark.parametrize("more", [{"max_tokens": None}, {"messages": []}, {"messages": ["x"]}])
def test_what_prefill_would_not_notice_is_refused(more):
    """Prefill is asked for one token whatever the client left out, so a prompt would be computed for nothing."""
    with pytest.raises(RequestRefused):
        _parsed(**more)


def test_prefixes_are_those_of_the_chat_that_workers_make():
    """Text in one form or the other is one prompt, and a header that changes with each request is not part of it."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=0f3;"}
    system = [billing, {"type": "text", "text": "You keep the gate. " * 30}]
    blocks = [{"role": "user", "content": [{"type": "text", "text": ASKED["messages"][0]["content"]}]}]
    one = read_prompt(_parsed(system=system))
    assert one.chain
    assert read_prompt(_parsed(system=system[1]["text"], messages=blocks)) == one
    assert read_prompt(_parsed(system="Other. " * 90)).chain[0] != one.chain[0]
    chat = chat_of({**ASKED, "system": system})
    assert [each["role"] for each in chat] == ["system", "user"]
    assert render_chat(chat).count(b"billing") == 0
    assert is_plain(chat)
    assert not is_plain(chat_of({"messages": [{"role": "user", "content": [{"type": "image"}]}]}))


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"input_tokens": 7, "output_tokens": 3}, (7, 3, None)),
        ({"input_tokens": 7, "cache_read_input_tokens": 5, "output_tokens": 3}, (12, 3, 5)),
        ({"input_tokens": 7, "cache_creation_input_tokens": 2, "output_tokens": 3}, (9, 3, None)),
        ({"input_tokens": 7, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3}, (7, 3, 4)),
        ({"input_tokens": "7", "output_tokens": 3}, (None, 3, None)),
    ],
)
def test_usage_counts_the_prompt_as_a_whole(usage, counts):
    """Anthropic's counts cached tokens apart from the others, the Responses API's among them."""
    assert read_usage(usage) == counts


def test_an_unknown_count_of_cached_tokens_is_left_out():
    """Prefill did not say; decode's count is of what it fetched."""
    usage = {"input_tokens": 1, "cache_read_input_tokens": 39, "output_tokens": 2}
    with_cached_tokens(usage, None)
    assert usage == {"input_tokens": 40, "output_tokens": 2}
