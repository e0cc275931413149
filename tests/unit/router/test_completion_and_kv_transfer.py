"""Requests as the router reads them, on all endpoints, what prefill and decode get, and the Responses API through the router."""

import hashlib

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.http.messages import request_id
from penstock.router.core.retries import KvLease
from penstock.router.proxy.completion import RequestRefused, parse_completion
from penstock.router.proxy.kv_transfer import (
    PrefillResponse,
    decode_body,
    prefill_body,
    read_prefill_response,
    with_cached_tokens,
)
from penstock.router.proxy.prefix import read_prompt
from penstock.router.proxy.routes import PATHS
from penstock.runtimes.kv_transfer import NIXL, KvSource

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def _parse(body, path=COMPLETIONS, content_type=b"application/json"):
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return parse_completion(path, content_type, raw, model="llama")


TEXT, PICTURE = {"type": "text", "text": "de"}, {"type": "image_url", "image_url": {}}


@pytest.mark.parametrize(
    ("path", "body", "size", "ids", "single"),
    [
        (COMPLETIONS, {"prompt": "hello"}, 5, 0, True),
        (COMPLETIONS, {"prompt": "grün"}, 5, 0, True),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 0, 3, True),
        (COMPLETIONS, {"prompt": ["hello"]}, 5, 0, True),
        (COMPLETIONS, {"prompt": ["hello", "you"]}, 8, 0, False),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, 0, 3, False),
        (COMPLETIONS, {"prompt": [[1, 2]]}, 0, 2, True),
        (
            CHAT,
            {"messages": [{"content": "abc"}, {"content": [TEXT, PICTURE]}, {"content": None}]},
            5,
            0,
            True,
        ),
        (RESPONSES, {"input": "hello"}, 5, 0, True),
        (RESPONSES, {"input": "grün", "instructions": "abc"}, 8, 0, True),
        (RESPONSES, {"input": [{"role": "user", "content": "ab"}, {"type": "reasoning"}]}, 2, 0, True),
        (RESPONSES, {"input": [{"role": "user", "content": [TEXT, 5]}]}, 2, 0, True),
    ],
)
def test_prompts_are_measured_in_every_form(path, body, size, ids, single):
    """Bytes of text and text parts, or token ids; and whether it has one prompt and one answer."""
    request = _parse({"model": "llama", "stream": True, **body}, path)

    assert (request.prompt_bytes, request.prompt_ids, request.is_single) == (size, ids, single)
    assert (request.endpoint, request.stream) == (PATHS[path], True)


@pytest.mark.parametrize(
    ("body", "path", "status", "words"),
    [
        (b"{", COMPLETIONS, 400, "not valid JSON"),
        (b"[1]", COMPLETIONS, 400, "JSON object"),
        (b"\xff\xfe", COMPLETIONS, 400, "not valid JSON"),
        ({"prompt": "x"}, COMPLETIONS, 400, "model: missing"),
        ({"model": 5, "prompt": "x"}, COMPLETIONS, 400, "model: missing"),
        ({"model": "gpt", "prompt": "x"}, COMPLETIONS, 404, "'gpt' does not exist"),
        ({"model": "llama"}, COMPLETIONS, 400, "prompt: must be"),
        ({"model": "llama", "prompt": []}, COMPLETIONS, 400, "prompt: must be"),
        ({"model": "llama", "prompt": [1, "x"]}, COMPLETIONS, 400, "prompt: must be"),
        ({"model": "llama", "prompt": "x", "stream": "yes"}, COMPLETIONS, 400, "stream: 'yes'"),
        *(({"model": "llama", "messages": sent}, CHAT, 400, "messages:") for sent in (None, [], "x", ["x"])),
        *(({"model": "llama", "input": sent}, RESPONSES, 400, "input:") for sent in (None, "", [], 5, ["x"])),
    ],
)
def test_requests_that_cannot_be_served_are_refused(body, path, status, words):
    """Each with its status and a message that names the key."""
    with pytest.raises(RequestRefused, match=words) as caught:
        _parse(body, path)

    assert caught.value.status == status


@pytest.mark.parametrize("content_type", [b"text/plain", b"x" * 20_000, None])
def test_another_content_type_is_refused(content_type):
    """With the one to send."""
    with pytest.raises(RequestRefused, match="application/json") as caught:
        _parse({"model": "llama", "prompt": "x"}, content_type=content_type)

    assert caught.value.status == 415
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize("key", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", [{"remote_host": "evil"}, "x", None])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_client_sets_no_transfer(path, key, value, is_nested):
    """VLLM takes both keys alongside the prompt and, of any type, within vllm_xargs, on all three endpoints."""
    given = {"vllm_xargs": {"top": 1, key: value}} if is_nested else {key: value}
    place = f"vllm_xargs.{key}" if is_nested else key
    texts = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(RequestRefused, match=f"^{place}: set by the router alone; leave it out$") as caught:
        _parse({"model": "llama", **texts, **given}, path)

    assert caught.value.status == 400


@pytest.mark.parametrize("key", ["model", "stream"])
def test_a_long_value_does_not_come_back_whole(key):
    """Else a request of megabytes is answered by as many."""
    body = {"model": "llama", "prompt": "x", key: "y" * 100_000}
    with pytest.raises(RequestRefused, match=key) as caught:
        _parse(body)

    assert len(caught.value.message) < 400


def test_the_prefill_request_is_vllms():
    """One token, no stream, remote decode asked for; all else as the client sent it."""
    request = _parse(
        {
            "model": "llama",
            "prompt": "x",
            "stream": True,
            "stream_options": {"include_usage": True},
            "min_tokens": 5,
            "max_tokens": 100,
            "temperature": 0.5,
            "ignore_eos": True,
        }
    )

    assert orjson.loads(prefill_body(request, NIXL, SOURCE)) == {
        "model": "llama",
        "prompt": "x",
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "temperature": 0.5,
        "ignore_eos": True,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


@given(
    st.dictionaries(
        st.text(), st.none() | st.integers(-(2**53), 2**53) | st.text() | st.lists(st.booleans()), max_size=5
    ),
    st.sampled_from([b"", b" ", b"\r\n\t"]),
)
def test_the_decode_request_is_the_clients_own_bytes_and_the_params(extra, space):
    """Whatever keys and trailing space: the same bytes in front, and one more key when parsed."""
    extra = {
        key: value
        for key, value in extra.items()
        if key not in {"stream", "n", "best_of", "kv_transfer_params"}
    }
    raw = orjson.dumps({**extra, "model": "llama", "prompt": "x"}) + space
    params = {"remote_host": "h", "remote_block_ids": [[1, 2]]}

    body = decode_body(_parse(raw), _prefilled(params))

    assert body.startswith(raw.rstrip()[:-1])
    assert orjson.loads(body) == {**orjson.loads(raw), "kv_transfer_params": params}


def _prefilled(params, expired=None):
    return PrefillResponse({"kv_transfer_params": params}, None, None, KvLease(None, 0.0, expired))


SOURCE = KvSource("10.0.0.1", None, 7)
IDS = {"remote_engine_id": "e", "remote_request_id": "r"}


@pytest.mark.parametrize(
    ("params", "expired", "era"),
    [
        (IDS, 0.0, "e/0"),
        (IDS, 1.0, "e/1"),
        ({**IDS, "remote_engine_id": "f"}, 1.0, "f/1"),
        (IDS, None, "r"),
        ({"remote_request_id": "r"}, 1.0, "r"),
        ({"remote_host": "h"}, 1.0, None),
    ],
)
@pytest.mark.parametrize("own", [None, "mine"])
def test_what_decode_cached_after_an_expiry_is_not_found_again(params, expired, era, own):
    """Each process of a prefill worker and each count of its expired leases salts decode's cache again."""
    sent = {"model": "llama", "prompt": "x"} | ({"cache_salt": own} if own else {})

    raw = decode_body(_parse(sent), _prefilled(params, expired))

    body = orjson.loads(raw)
    salt = body.pop("cache_salt", None)
    assert salt == (hashlib.sha256(f"{own or ''}\0{era}".encode()).hexdigest() if era else own)
    # What vLLM 0.32 takes.
    assert salt is None or (len(salt) <= 128 and not set(salt) & set("@/\\\0"))
    assert body | ({"cache_salt": own} if own else {}) == {**sent, "kv_transfer_params": params}
    assert raw.count(b"cache_salt") == (salt is not None)


def test_a_null_salt_does_not_come_twice():
    """Of a key that comes twice, not every reader takes the last."""
    sent = {"model": "llama", "prompt": "x", "cache_salt": None}
    assert decode_body(_parse(sent), _prefilled(IDS, 1.0)).count(b"cache_salt") == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            {
                "kv_transfer_params": {"remote_host": "h"},
                "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
            },
            ({"remote_host": "h"}, 9, 4),
        ),
        ({"kv_transfer_params": None, "usage": {"prompt_tokens": 9}}, (None, 9, None)),
        ({"kv_transfer_params": {}, "usage": None}, (None, None, None)),
        (
            {"usage": {"prompt_tokens": "9", "prompt_tokens_details": {"cached_tokens": -1}}},
            (None, None, None),
        ),
        ({"usage": {"prompt_tokens": True, "prompt_tokens_details": []}}, (None, None, None)),
    ],
)
def test_prefill_answers_are_read(answer, expected):
    """What is absent or of the wrong type is unknown, never zero."""
    fields = NIXL.decode_fields(SOURCE, answer)
    read = read_prefill_response(answer, fields, KvLease(None, 0.0, None))

    assert (fields and fields["kv_transfer_params"], read.prompt_tokens, read.cached_tokens) == expected


@pytest.mark.parametrize(
    ("details", "cached", "expected"),
    [
        ({"cached_tokens": 100}, 16, {"cached_tokens": 16}),
        ({"cached_tokens": 100, "audio_tokens": 1}, 16, {"cached_tokens": 16, "audio_tokens": 1}),
        (None, 0, {"cached_tokens": 0}),
        ({"cached_tokens": 100}, None, None),
    ],
)
def test_usage_shows_the_prefills_own_cache(details, cached, expected):
    """Decode's count of transferred tokens is replaced, by null where prefill does not tell."""
    usage = {"prompt_tokens": 100, "prompt_tokens_details": details}
    with_cached_tokens(usage, cached)

    assert usage == {"prompt_tokens": 100, "prompt_tokens_details": expected}


@pytest.mark.parametrize("sent", [b"abc-1", b"A" * 128, b"a.b_c:d+e/f="])
def test_request_ids_are_accepted(sent):
    """Up to 128 harmless characters."""
    assert request_id(sent) == sent


@pytest.mark.parametrize("sent", [None, b"", b"A" * 129, b"a b", b'a"', b"a\xff", b"<x>"])
def test_other_request_ids_are_replaced_by_new_ones(sent):
    """Each by its own."""
    first, second = request_id(sent), request_id(sent)

    assert sent not in {first, second}
    assert first != second


USAGE = {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 2}


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


def test_a_response_has_one_prefix_however_its_messages_are_sent():
    """That of a chat to which the engine adds special tokens, as vLLM does for this API."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x" * 3000}]
    chat = read_prompt(_parse({"model": "llama", "messages": messages, "add_special_tokens": True}, CHAT))

    for body in ({"input": messages}, {"input": "x" * 3000, "instructions": "Be brief."}):
        assert read_prompt(_parse({"model": "llama", **body}, RESPONSES)).chain == chat.chain


@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")])
async def test_streams_are_relayed_as_they_are(harness, roles):
    """By the worker that decodes; no prefill is asked for."""
    *workers, router = await harness.served(*roles)
    workers[-1].otherwise = harness.answers.stream(*EVENTS)

    got = await router.post(RESPONSES, raw=orjson.dumps({"model": "llama", "input": "hi", "stream": True}))

    assert (got.status, got.body) == (200, b"".join(EVENTS))
    assert [len(worker.seen) for worker in workers] == [0, 1][-len(roles) :]
    assert await router.metric("penstock_router_requests_total", endpoint="responses", code="200") == 1
    assert await router.metric("penstock_router_generation_tokens_total", model_name="llama") == 2
    assert await router.metric("penstock_router_cached_tokens_total", model_name="llama") == 16


async def test_whole_responses_are_counted(harness):
    """By the names that they give their usage."""
    worker, router = await harness.served("aggregated")
    body = orjson.dumps({"object": "response", "output": [], "usage": USAGE})
    worker.otherwise = harness.answers.status(200, body)

    got = await router.post(RESPONSES, raw=orjson.dumps({"model": "llama", "input": "hi"}))

    assert (got.status, got.body) == (200, body)
    assert await router.metric("penstock_router_prompt_tokens_total", model_name="llama") == 40
    assert await router.metric("penstock_router_generation_tokens_total", model_name="llama") == 2


async def test_a_worker_without_this_api_goes_on_serving_the_others(harness):
    """An older server of the right model answers 404 for the path: that is passed on, and no worker is ejected."""
    worker, router = await harness.served("aggregated")
    worker.script = [harness.answers.status(404, b'{"detail":"Not Found"}')] * 12

    for _ in range(12):
        got = await router.post(RESPONSES, raw=orjson.dumps({"model": "llama", "input": "hi"}))
        assert (got.status, orjson.loads(got.body)["error"]["message"]) == (404, "Not Found")
    assert (await router.post()).status == 200
