"""Tiers on a worker that serves: who waits less, what its page says, what a dropped client is told."""

import asyncio
import json

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


async def test_a_prompt_too_long_for_its_tier_is_refused_at_the_frontend(serving):
    """Half of 1,024 tokens are premium's; the same prompt is served with premium's priority."""
    async with serving(**tiers(premiumReservedFraction=0.5)) as worker:
        body = {"prompt": "abcd" * 600, "ignore_eos": True, "max_tokens": 1}
        status, answer, _ = await worker.post("/v1/completions", {**body, "priority": 1})
        assert (status, answer["error"]["param"]) == (400, "input_tokens")
        assert "maximum context length is 512 tokens" in answer["error"]["message"]
        assert (await worker.post("/v1/completions", {**body, "priority": 0}))[0] == 200
