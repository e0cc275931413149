"""A real worker on a real socket: answers, streams, drain, aborts."""

import asyncio
import json

import pytest

from penstock.core.errors import StreamBroken

RUNNING = "vllm:num_requests_running"
ENDED = "vllm:request_success_total"


async def events_of(response):
    """Read a stream to its end; return its data."""
    body = b"".join([piece async for piece in response])
    assert body.endswith(b"data: [DONE]\n\n")
    return [json.loads(event[6:]) for event in body.split(b"\n\n")[:-2]]


async def test_stream_has_one_event_per_token_and_usage(serving):
    """Events carry one word each; the last has the reason, the next the usage."""
    async with serving() as client:
        response = await client.stream(max_tokens=6, stream_options={"include_usage": True})
        assert response.status == 200
        assert response.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        events = await events_of(response)
        texts = [event["choices"][0]["text"] for event in events[:-1]]
        assert [len(text) for text in texts] == [4] * 6
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 5 + ["length"]
        assert events[-1]["usage"]["completion_tokens"] == 6
        whole = await client.complete(max_tokens=6)
        assert whole["choices"][0]["text"] == "".join(texts)


async def test_stream_interval_merges_tokens(serving):
    """The first token comes alone, then three at a time, the rest at the end."""
    async with serving(stream_interval=3) as client:
        events = await events_of(await client.stream(max_tokens=9))
    assert [len(event["choices"][0]["text"]) // 4 for event in events] == [1, 3, 3, 2]


@pytest.mark.parametrize("interval", [1, 4])
async def test_merged_tokens_are_cut_alike(serving, interval):
    """A stop ends the text where it begins, whatever the number of tokens an event carries."""
    async with serving(stream_interval=interval) as client:
        text = (await client.complete(max_tokens=20))["choices"][0]["text"]
        events = await events_of(await client.stream(max_tokens=20, stop=text[41:48]))

    assert "".join(event["choices"][0]["text"] for event in events) == text[:41]
    assert events[-1]["choices"][0]["stop_reason"] == text[41:48]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_continuous_usage_counts_up(serving, path):
    """As some load generators ask: every event has the counts so far, the last one the whole."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
    async with serving(stream_interval=4) as client:
        events = await events_of(await client.stream(path, max_tokens=3, stream_options=options, **fields))

    counts = [event["usage"] for event in events if "usage" in event]
    assert [each["completion_tokens"] for each in counts] == [1, 2, 3, 3]
    assert events[-1]["choices"] == []
    assert len({each["prompt_tokens"] for each in counts}) == 1


async def test_seeds_choose_the_words(serving):
    """The same again for the same seed."""
    async with serving() as client:
        one, again, other, none = [
            (await client.complete(max_tokens=5, **seed))["choices"][0]["text"]
            for seed in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {})
        ]

    assert one == again
    assert len({one, other, none}) == 3


async def test_request_id_is_carried_through(serving):
    """The caller's id comes back in header and body; two requests may share it; one that breaks logs is not taken."""
    async with serving() as client:
        for _ in range(2):
            status, body, headers = await client.post(
                "/v1/completions", {"prompt": "hello", "max_tokens": 2}, headers=((b"x-request-id", b"abc"),)
            )
            assert (status, body["id"], headers[b"x-request-id"]) == (200, "cmpl-abc", b"abc")
        status, body, headers = await client.post(
            "/v1/completions", {"prompt": "hello", "max_tokens": 2}, headers=((b"x-request-id", b"a\tb"),)
        )
        assert (status, b"x-request-id" in headers, "a\tb" in body["id"]) == (200, False, False)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/completions", {"prompt": "a", "model": "gpt"}, 404, "NotFoundError"),
        ("/v1/completions", {"prompt": "a" * 500}, 400, "BadRequestError"),
        ("/v1/completions", b"{", 400, "BadRequestError"),
        ("/v1/embeddings", {}, 404, "NotFoundError"),
        ("/v1/models", {}, 405, "MethodNotAllowedError"),
        ("/kv/notify", {"read": "a"}, 400, "BadRequestError"),
        ("/kv/notify", b"[1", 400, "BadRequestError"),
    ],
)
async def test_errors_have_openai_form(serving, path, body, status, kind):
    """Status, type and code agree."""
    async with serving(max_model_len=100) as client:
        got, answer, headers = await client.post(path, body)
    assert (got, answer["error"]["type"], answer["error"]["code"]) == (status, kind, status)
    assert headers.get(b"allow") == (b"GET" if status == 405 else None)


async def test_client_that_leaves_ends_its_request(serving):
    """A broken stream is aborted: it runs on no more, and the blocks are free."""
    async with serving(speed=1.0) as client:
        response = await client.stream(max_tokens=1000)
        await anext(aiter(response))
        await client.until(RUNNING, 1)
        response.abort()
        await client.until(RUNNING, 0)
        assert await client.metric(ENDED, finished_reason="abort") == 1
        assert await client.metric("vllm:kv_cache_usage_perc") == 0


async def test_slow_client_costs_no_memory_and_loses_nothing(serving):
    """A client that stops reading gets every token once it reads again, while others are served."""
    async with serving(speed=1000.0) as client:
        slow = await client.stream(max_tokens=30_000)
        slow.pause()
        await client.until(ENDED, 1, finished_reason="length")
        assert not client.server.worker.is_idle
        await client.complete(max_tokens=3)
        slow.resume()
        events = await events_of(slow)
        assert len(events) == 30_000
        while not client.server.worker.is_idle:  # noqa: ASYNC110 - as the drain does
            await asyncio.sleep(0.005)


async def test_drain_refuses_new_requests_and_finishes_streams(serving):
    """During the drain health is 503 and requests are refused; the stream ends whole."""
    async with serving(speed=2.0) as client:
        stream = await client.stream(max_tokens=40)
        drain = asyncio.create_task(client.server.drain())
        await asyncio.sleep(0)
        assert (await client.get("/health")).status == 503
        status, body, _ = await client.post("/v1/completions", {"prompt": "a"})
        assert (status, body["error"]["message"]) == (503, "This worker is draining.")
        assert not drain.done()
        assert len(await events_of(stream)) == 40
        await drain


async def test_error_after_the_first_token_breaks_the_stream(serving):
    """A stream that has begun cannot turn into an error answer, so the connection ends."""
    async with serving(speed=1.0) as client:
        response = await client.stream(max_tokens=1000)
        await anext(aiter(response))
        (reply,) = client.server.worker._replies.values()
        reply.fail("broken", 500, "KVLoadError")
        with pytest.raises(StreamBroken):
            async for _ in response:
                pass


NO_RESERVE = {"premiumReservedFraction": 0.0}


def tiers(**changes):
    """Return the flags of a worker of 64 blocks (1,024 tokens) whose tiers preempt."""
    return {
        "scheduling_policy": "priority",
        "num_gpu_blocks_override": 64,
        "preemption_config": json.dumps({**NO_RESERVE, **changes}),
    }


async def occupy(worker):
    """Fill the cache with a long background request; return its task once it runs."""
    task = asyncio.create_task(
        worker.post(
            "/v1/completions",
            {"prompt": "abcd" * 800, "ignore_eos": True, "max_tokens": 220, "priority": 2},
        )
    )
    await worker.until("vllm:num_requests_running", 1)
    return task


async def test_premium_preempts_background_and_both_are_answered(serving):
    """The page counts it under vLLM's name and by kind and tier; the victim's answer is whole."""
    async with serving(**tiers(), speed=1.0) as worker:
        background = await occupy(worker)
        body = await worker.complete("wxyz" * 600, max_tokens=2, priority=0)
        assert body["usage"]["completion_tokens"] == 2
        assert not background.done()
        status, answer, _ = await background
        assert (status, answer["usage"]["completion_tokens"]) == (200, 220)
        assert await worker.metric("vllm:num_preemptions_total") == 1
        by_kind = await worker.metric(
            "penstock_engine_preemptions_total", kind="recompute", tier="background"
        )
        assert by_kind == 1


async def test_a_dropped_client_is_told_to_come_back(serving):
    """503, and its request is counted as one that ended with an error."""
    async with serving(**tiers(dropAboveSeconds=0.001), speed=1.0) as worker:
        background = await occupy(worker)
        await worker.complete("wxyz" * 600, max_tokens=2, priority=0)
        status, answer, _ = await background
        assert (status, answer["error"]["code"]) == (503, 503)
        assert "higher tier" in answer["error"]["message"]
        assert await worker.metric("vllm:request_success_total", finished_reason="error") == 1
        assert worker.server.worker.is_idle


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dropped_choice_ends_the_whole_response(serving, stream):
    """The client cannot use half of it, and the engine computes no choice for nobody."""
    async with serving(**tiers(dropAboveSeconds=0.001), speed=1.0) as worker:
        body = {"prompt": "abcd" * 800, "ignore_eos": True, "max_tokens": 100, "priority": 2, "n": 2}
        if stream:
            response = await worker.stream(**body)
            read = asyncio.create_task(events_of(response))
        else:
            read = asyncio.create_task(worker.post("/v1/completions", body))
        await worker.until("vllm:num_requests_running", 2)
        await worker.complete("wxyz" * 600, max_tokens=2, priority=0)
        if stream:
            with pytest.raises(StreamBroken):
                await read
        else:
            status, answer, _ = await read
            assert (status, "higher tier" in answer["error"]["message"]) == (503, True)
        await worker.until("vllm:num_requests_running", 0)
        assert worker.server.worker.is_idle


async def test_a_prompt_too_long_for_its_tier_is_refused_at_the_frontend(serving):
    """Half of 1,024 tokens are premium's; the same prompt is served with premium's priority."""
    async with serving(**tiers(premiumReservedFraction=0.5)) as worker:
        body = {"prompt": "abcd" * 600, "ignore_eos": True, "max_tokens": 1}
        status, answer, _ = await worker.post("/v1/completions", {**body, "priority": 1})
        assert (status, answer["error"]["param"]) == (400, "input_tokens")
        assert "maximum context length is 512 tokens" in answer["error"]["message"]
        assert (await worker.post("/v1/completions", {**body, "priority": 0}))[0] == 200
