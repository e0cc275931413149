"""Prefill and decode through the proxy: what each worker gets, and what the client sees."""

import hashlib

import orjson


async def test_each_stage_gets_its_request(harness):
    """Prefill: one token, remote decode; decode: the client's request with prefill's params, unread, and a salt."""
    prefill, decode, router = await harness.served("prefill", "decode")

    answer = await router.post(
        max_tokens=3,
        min_tokens=2,
        stream_options=None,
        headers=((b"content-type", b"application/json"), (b"x-request-id", b"mine-1")),
    )

    assert answer.status == 200
    (at_prefill,), (at_decode,) = prefill.seen, decode.seen
    assert (at_prefill.body["max_tokens"], at_prefill.body["stream"]) == (1, False)
    assert at_prefill.body["kv_transfer_params"]["do_remote_decode"]
    assert at_decode.body == {
        "model": "llama",
        "prompt": "hello",
        "max_tokens": 3,
        "min_tokens": 2,
        "stream_options": None,
        "kv_transfer_params": harness.params,
        "cache_salt": hashlib.sha256(b"\0engine-1/0").hexdigest(),
    }
    for seen in (at_prefill, at_decode):
        assert seen.path == "/v1/completions"
        assert seen.headers[b"x-request-id"] == b"mine-1"
    assert answer.headers[b"x-request-id"] == b"mine-1"


async def test_streams_pass_untouched_but_for_usage(harness):
    """Every event is the worker's, byte for byte; the usage event carries the prefill's count."""
    prefill, decode = await harness.pair()
    prefill.cached_tokens, decode.cached_tokens = 32, 39
    router = await harness.router(prefill, decode)

    stream = await router.stream(max_tokens=4, stream_options={"include_usage": True})
    body = await stream.read(limit_bytes=10_000)

    *tokens, usage, done, rest = body.split(b"\n\n")
    assert stream.headers[b"content-type"] == b"text/event-stream"
    assert [token + b"\n\n" for token in tokens] == [harness.token_event(number) for number in range(4)]
    assert orjson.loads(usage.removeprefix(b"data: "))["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_tokens_leave_as_they_come(harness):
    """The first event reaches the client while the worker still holds the second."""
    prefill, decode = await harness.pair()
    second = decode.hold_stream()
    router = await harness.router(prefill, decode)

    stream = await router.stream()

    assert await anext(stream) == harness.token_event(0)
    assert (await router.workers())["decode-0"]["inflight_requests"] == 1
    assert (await router.workers())["decode-0"]["inflight_tokens"] == 41
    second.set()
    assert await stream.read(limit_bytes=100) == harness.done


async def test_a_prefill_that_keeps_no_blocks_is_decoded_alone(harness):
    """Its one token ended the text, say; decode gets the client's bytes and keeps its own usage."""
    prefill, decode = await harness.pair()
    empty = orjson.dumps({"choices": [], "usage": prefill.usage(1), "kv_transfer_params": None})
    prefill.script = [harness.answers.status(200, empty)]
    decode.cached_tokens = 8
    router = await harness.router(prefill, decode)

    answer = orjson.loads((await router.post()).body)

    assert "kv_transfer_params" not in decode.seen[0].body
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_tokens_are_counted(harness):
    """Prompt, generated and cached tokens, TTFT and gaps of one stream."""
    *_, router = await harness.served("prefill", "decode")
    stream = await router.stream(max_tokens=4, stream_options={"include_usage": True})
    await stream.read(limit_bytes=10_000)

    model = {"model_name": "llama"}
    for name, expected in {
        "prompt_tokens_total": 40,
        "generation_tokens_total": 4,
        "cached_tokens_total": 16,
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
        "prefill_queue_seconds_count": 1,
        "prefill_queue_requests": 0,
    }.items():
        assert await router.metric(f"penstock_router_{name}", **model) == expected
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="200") == 1
