"""Prefill and decode workers, each on its own socket: KV hand-over, heartbeats, expiry, failures."""

import asyncio

import pytest

PROMPT = "p" * 400
KV = "vllm:kv_cache_usage_perc"
RECOMPUTE = '{"kv_load_failure_policy": "recompute"}'


async def test_decode_goes_on_where_prefill_stopped(serving, hand_over):
    """The prefill worker keeps the blocks until they are read; the decode worker answers all tokens."""
    async with serving(role="prefill") as prefill, serving(role="decode") as decode:
        params = await hand_over(prefill, PROMPT)
        assert params["remote_num_tokens"] == 100
        assert [len(group) for group in params["remote_block_ids"]] == [7]
        assert (params["remote_blocks_expiry_time"], params["remote_prefill_cached_tokens"]) == (None, 0)
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", prefill.server.port)
        assert (params["do_remote_prefill"], params["do_remote_decode"], params["tp_size"]) == (
            True,
            False,
            1,
        )
        assert await prefill.metric(KV) > 0
        body = await decode.complete(PROMPT, max_tokens=8, kv_transfer_params=params)
        assert body["usage"]["completion_tokens"] == 8
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert body["kv_transfer_params"] is None
        assert await prefill.metric(KV) == 0
        assert await decode.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert await decode.metric("vllm:nixl_bytes_transferred_sum") == 100 * 131_072
        assert await decode.metric("vllm:external_prefix_cache_hits_total") == 100


async def test_both_workers_speak_the_same_words(serving, hand_over):
    """A handed-over request answers what an aggregated worker answers."""
    async with serving(role="prefill") as prefill, serving(role="decode") as decode, serving() as alone:
        params = await hand_over(prefill, PROMPT)
        fetched = await decode.complete(PROMPT, max_tokens=8, kv_transfer_params=params)
        local = await alone.complete(PROMPT, max_tokens=8)
        assert fetched["choices"] == local["choices"]


async def test_second_read_of_the_same_blocks_is_refused(serving, hand_over):
    """Blocks that are gone cannot be decoded from: 500 before any token, and it is counted."""
    async with serving(role="prefill") as prefill, serving(role="decode") as decode:
        params = await hand_over(prefill, PROMPT)
        await decode.complete(PROMPT, max_tokens=2, kv_transfer_params=params)
        fields = {"prompt": PROMPT + "x" * 64, "max_tokens": 4, "stream": True, "kv_transfer_params": params}
        status, body, _ = await decode.post("/v1/completions", fields)
        assert (status, body["error"]["type"]) == (500, "KVLoadError")
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert await decode.metric("vllm:request_success_total", finished_reason="error") == 1
        assert await decode.metric(KV) == 0
        assert await prefill.metric("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_a_message_may_renew_and_read_the_same_blocks(serving, hand_over):
    """The heartbeat counts first, so the read of a lease that stands is never answered as unknown."""
    async with serving(role="prefill") as prefill:
        params = await hand_over(prefill, PROMPT)
        mine = [params["remote_request_id"]]
        status, body, _ = await prefill.post("/kv/notify", {"heartbeat": mine, "read": mine})
        assert (status, body) == (200, {"unknown": []})
        assert await prefill.metric(KV) == 0


async def test_unreachable_prefill_worker_fails_the_request(serving, hand_over):
    """A prefill worker that died after its answer is a failed transfer."""
    async with serving(role="decode") as decode:
        async with serving(role="prefill") as prefill:
            params = await hand_over(prefill, PROMPT)
        fields = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params}
        status, body, _ = await decode.post("/v1/completions", fields)
        assert status == 500
        assert "could not be fetched" in body["error"]["message"]
        assert await decode.metric("vllm:nixl_num_failed_notifications_total") >= 1
        assert await decode.metric("vllm:num_requests_running") == 0


async def test_recompute_policy_computes_the_prompt_here(serving, hand_over):
    """With kv_load_failure_policy recompute the client notices nothing."""
    async with serving(role="decode", kv_transfer_config=RECOMPUTE) as decode:
        async with serving(role="prefill") as prefill:
            params = await hand_over(prefill, PROMPT)
        body = await decode.complete(PROMPT, max_tokens=4, kv_transfer_params=params)
        assert body["usage"]["completion_tokens"] == 4
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert decode.server.worker.is_idle


async def test_unread_blocks_expire(serving, hand_over):
    """Nobody comes for the blocks: after the lease they are free and counted, and the drain ends."""
    config = '{"kv_connector_extra_config": {"kv_lease_duration": 6}}'
    async with serving(role="prefill", kv_transfer_config=config) as prefill:
        await hand_over(prefill, PROMPT)
        await asyncio.wait_for(prefill.server.drain(), 5)
        assert await prefill.metric(KV) == 0
        assert await prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 1


@pytest.mark.slow
async def test_waiting_requests_keep_their_blocks_alive(serving, hand_over):
    """A request that waits longer than its lease for a place is renewed by heartbeats and then served.

    The lease is six seconds by the host's clock, so that a busy machine renews it in time.
    """
    config = '{"kv_connector_extra_config": {"kv_lease_duration": 60}}'
    async with (
        serving(role="prefill", kv_transfer_config=config, speed=10.0) as prefill,
        serving(role="decode", kv_transfer_config=config, speed=10.0, max_num_seqs=1) as decode,
    ):
        first = asyncio.create_task(decode.complete("busy", max_tokens=36_000))
        await decode.until("vllm:num_requests_running", 1)
        params = await hand_over(prefill, PROMPT)
        body = await decode.complete(PROMPT, max_tokens=2, kv_transfer_params=params)
        assert body["usage"]["completion_tokens"] == 2
        assert (await first)["usage"]["completion_tokens"] == 36_000
        assert await decode.metric("vllm:request_queue_time_seconds_sum") > 60
        assert await prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_abort_before_the_read_frees_the_prefill_worker(serving, hand_over):
    """A client that leaves while its request waits gives the remote blocks back."""
    async with (
        serving(role="prefill") as prefill,
        serving(role="decode", max_num_seqs=1, speed=1.0) as decode,
    ):
        busy = await decode.stream(prompt="busy", max_tokens=2000)
        await anext(aiter(busy))
        params = await hand_over(prefill, PROMPT)
        waiting = asyncio.create_task(decode.complete(PROMPT, max_tokens=2, kv_transfer_params=params))
        await decode.until("vllm:num_requests_waiting", 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await prefill.until(KV, 0)
        assert await prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
        busy.abort()


async def test_heartbeats_of_strangers_change_nothing(serving):
    """Unknown ids are named in the answer."""
    async with serving(role="prefill") as prefill:
        status, body, _ = await prefill.post("/kv/notify", {"heartbeat": ["a"], "read": ["b"]})
        assert (status, body) == (200, {"unknown": ["a", "b"]})
