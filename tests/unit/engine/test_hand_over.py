"""Prefill and decode workers, each on its own socket: KV transfer, heartbeats, expiry, failures."""

import asyncio
import json

import pytest

PROMPT = "p" * 400
KV = "vllm:kv_cache_usage_perc"
LEASES = "penstock_engine_leases"
LEASED = "penstock_engine_leased_blocks"
EXPIRIES = "penstock_engine_lease_expiries_total"
IGNORED = "penstock_engine_ignored_notifications_total"


def lease_of(duration_s, **more):
    """Return --kv-transfer-config with a lease and further keys of the connector."""
    return json.dumps({"kv_connector_extra_config": {"kv_lease_duration": duration_s, **more}})


RECOMPUTE = '{"kv_load_failure_policy": "recompute"}'


async def test_decode_goes_on_where_prefill_stopped(serving, hand_over):
    """The prefill worker keeps the blocks until they are read; the decode worker answers all tokens."""
    async with serving(role="prefill") as prefill, serving(role="decode") as decode:
        params = await hand_over(prefill, PROMPT)
        assert params["remote_num_tokens"] == 100
        assert [len(group) for group in params["remote_block_ids"]] == [7]
        assert (params["remote_blocks_expiry_time"], params["remote_prefill_cached_tokens"]) == (None, 0)
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", prefill.server.port)
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert await prefill.metric(KV) > 0
        body = await decode.complete(PROMPT, max_tokens=8, kv_transfer_params=params)
        assert body["usage"]["completion_tokens"] == 8
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert body["kv_transfer_params"] is None
        assert await prefill.metric(KV) == 0
        assert await decode.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert await decode.metric("vllm:nixl_bytes_transferred_sum") == 100 * 131_072
        assert await decode.metric("vllm:external_prefix_cache_hits_total") == 100


async def test_workers_of_both_roles_do_what_each_request_says(serving, hand_over):
    """The first keeps a prompt for the second, then reads one that the second kept: a role is the router's word for it."""
    async with serving(role="both") as first, serving(role="both") as second:
        for keeper, reader in ((first, second), (second, first)):
            prompt = f"{keeper.server.port}" + PROMPT
            params = await hand_over(keeper, prompt)
            assert (params["do_remote_prefill"], params["remote_port"]) == (True, keeper.server.port)
            body = await reader.complete(prompt, max_tokens=8, kv_transfer_params=params)
            assert (body["usage"]["completion_tokens"], body["kv_transfer_params"]) == (8, None)
            assert await keeper.metric(KV) == await reader.metric(KV) == 0
            assert await reader.metric("vllm:nixl_xfer_time_seconds_count") == 1


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


@pytest.mark.parametrize(("config", "status"), [("{}", 500), (RECOMPUTE, 200)], ids=["fail", "recompute"])
async def test_the_policy_says_what_becomes_of_a_request_whose_prefill_worker_died(
    serving, hand_over, config, status
):
    """A failed transfer either way: refused before any token, or computed here, and the client notices nothing."""
    async with serving(role="decode", kv_transfer_config=config) as decode:
        async with serving(role="prefill") as prefill:
            params = await hand_over(prefill, PROMPT)
        fields = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params}
        answered, body, _ = await decode.post("/v1/completions", {**fields, "ignore_eos": True})
        assert answered == status
        told = body["error"]["message"] if status == 500 else body["usage"]["completion_tokens"]
        assert told == 4 or "could not be fetched" in told
        assert await decode.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert await decode.metric("vllm:nixl_num_failed_notifications_total") >= 1
        assert await decode.metric("vllm:num_requests_running") == 0
        assert decode.server.worker.is_idle


async def test_unread_blocks_expire(serving, hand_over):
    """Nobody comes for the blocks: after the lease they are free and counted, and the drain ends."""
    config = '{"kv_connector_extra_config": {"kv_lease_duration": 6}}'
    async with serving(role="prefill", kv_transfer_config=config) as prefill:
        await hand_over(prefill, PROMPT)
        await prefill.server.drain()
        assert await prefill.metric(KV) == 0
        assert await prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 1


async def test_a_prefill_worker_that_is_told_to_end_waits_for_its_readers(serving, hand_over):
    """It takes no new requests, and ends when decode has read what it keeps: no lease is lost to a rolling update."""
    async with serving(role="prefill") as prefill, serving(role="decode") as decode:
        params = await hand_over(prefill, PROMPT)
        drained = asyncio.create_task(prefill.server.drain())
        await asyncio.sleep(0.1)
        assert not drained.done()
        status, _, _ = await prefill.post("/v1/completions", {"prompt": PROMPT})
        assert status == 503
        body = await decode.complete(PROMPT, max_tokens=4, kv_transfer_params=params)
        assert body["usage"]["completion_tokens"] == 4
        await drained
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


async def test_a_message_for_another_process_is_ignored(serving, hand_over):
    """A worker that was restarted at its address keeps to its own prompts."""
    async with serving(role="prefill") as prefill:
        params = await hand_over(prefill, PROMPT)
        mine = params["remote_request_id"]
        message = {"engine_id": "the one before", "heartbeat": [mine], "read": [[mine, 0, 0, 1]]}
        status, body, _ = await prefill.post("/kv/notify", message)
        assert (status, body) == (200, {"unknown": [mine]})
        assert await prefill.metric(LEASES) == 1
        assert await prefill.metric(IGNORED, reason="wrong_engine") == 1


MALFORMED = [
    b"",
    b'{"heartbeat": ["a"]}',
    b'{"engine_id": "e", "heartbeat": [1]}',
    b'{"engine_id": "e", "read": [["a", 0, 0, 0]]}',
    b'{"engine_id": "e", "read": [["a", 0, 0, 99999]]}',
    b'{"engine_id": "e", "read": [["a", true, 0, 1]]}',
]


async def test_malformed_notifications_are_refused_and_counted(serving, hand_over):
    """Each gets 400 with what is wrong; the worker and its leases continue."""
    async with serving(role="prefill") as prefill:
        await hand_over(prefill, PROMPT)
        for body in MALFORMED:
            status, answer, _ = await prefill.post("/kv/notify", body)
            assert status == 400, body
            assert "a notification is engine_id" in answer["error"]["message"]
        assert await prefill.metric(IGNORED, reason="malformed") == len(MALFORMED)
        assert await prefill.metric(LEASES) == 1


@pytest.mark.parametrize("wrong", [{"model": "nobody"}, {"max_tokens": -1}, {"prompt": ""}])
async def test_a_refused_decode_gives_the_blocks_back(serving, hand_over, wrong):
    """As in vLLM, a request refused before it reaches the engine frees what the prefill worker keeps for it."""
    async with serving(role="prefill") as prefill, serving(role="decode") as decode:
        params = await hand_over(prefill, PROMPT)
        fields = {"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": params, **wrong}
        status, _, _ = await decode.post("/v1/completions", fields)
        assert status in {400, 404}
        await prefill.until(LEASED, 0)
        assert await prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


async def test_leases_show_on_the_page(serving, hand_over):
    """Prompts and blocks kept, shared ones once, the oldest one's age, and every term that a lease can run out of."""
    async with serving(role="prefill") as prefill:
        params = await hand_over(prefill, PROMPT)
        await hand_over(prefill, PROMPT + "another")
        assert await prefill.metric(LEASES) == 2
        assert await prefill.metric(LEASED) == 8
        assert await prefill.metric("penstock_engine_oldest_lease_seconds") > 0
        mine = {"engine_id": params["remote_engine_id"], "heartbeat": [params["remote_request_id"]]}
        await prefill.post("/kv/notify", mine)
        assert await prefill.metric("penstock_engine_heartbeats_received_total") == 1
        assert await prefill.metric("penstock_engine_lease_renewals_total") == 0
        for term in ("initial", "extension", "decoder_ttl"):
            assert await prefill.metric(EXPIRIES, term=term) == 0


# -- the next turn ------------------------------------------------------------------------------------

BOTH_WAYS = {"bidirectional_kv_xfer": True}
TURN = "t" * 2000


async def _first_turn(prefill, decode, hand_over):
    """Serve one turn; return what its answer says about the KV that decode keeps."""
    params = await hand_over(prefill, TURN)
    body = await decode.complete(TURN, max_tokens=16, kv_transfer_params=params)
    return body["kv_transfer_params"]


async def test_the_next_turn_is_read_from_decode(serving, hand_over):
    """Decode keeps the conversation; prefill fetches it, computes the rest alone, and decode's copy is freed."""
    config = lease_of(600, **BOTH_WAYS)
    async with (
        serving(role="prefill", kv_transfer_config=config) as first,
        serving(role="prefill", kv_transfer_config=config) as second,
        serving(role="decode", kv_transfer_config=config) as decode,
    ):
        kept = await _first_turn(first, decode, hand_over)
        assert (kept["do_remote_decode"], kept["do_remote_prefill"]) == (True, False)
        assert kept["remote_num_tokens"] == 500 + 15
        assert kept["remote_blocks_expiry_time"] > 0
        assert await decode.metric(LEASES) == 1
        asks = {"prompt": TURN + "u" * 400, "max_tokens": 1, "kv_transfer_params": kept}
        body = await second.complete(**asks)
        assert body["kv_transfer_params"]["do_remote_prefill"] is True
        assert await decode.metric(LEASES) == 0
        assert await second.metric("vllm:external_prefix_cache_hits_total") == 515
        assert await second.metric("vllm:iteration_tokens_total_sum") == 600 - 515
        answer = await decode.complete(
            asks["prompt"], max_tokens=4, kv_transfer_params=body["kv_transfer_params"]
        )
        alone = await first.complete(asks["prompt"], max_tokens=4)
        assert answer["choices"] == alone["choices"]


async def test_a_turn_that_comes_too_late_is_computed(serving, hand_over):
    """The decoder's time to live is over: it counts, and prefill answers as if there had been none."""
    config = lease_of(600, decoder_kv_blocks_ttl=30, **BOTH_WAYS)
    async with (
        serving(role="prefill", kv_transfer_config=config) as prefill,
        serving(role="prefill", kv_transfer_config=config) as other,
        serving(role="decode", kv_transfer_config=config) as decode,
    ):
        kept = await _first_turn(prefill, decode, hand_over)
        await decode.until(LEASES, 0)
        assert await decode.metric(EXPIRIES, term="decoder_ttl") == 1
        body = await other.complete(TURN + "u" * 400, max_tokens=1, kv_transfer_params=kept)
        assert body["usage"]["completion_tokens"] == 1
        assert body["kv_transfer_params"]["do_remote_prefill"] is True
        assert await other.metric("vllm:nixl_num_failed_transfers_total") == 1
        assert await decode.metric("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_a_short_rest_is_not_worth_a_transfer(serving, hand_over):
    """What prefill has cached itself it does not fetch; decode's copy is freed all the same."""
    config = lease_of(600, **BOTH_WAYS)
    async with (
        serving(role="prefill", kv_transfer_config=config) as prefill,
        serving(role="decode", kv_transfer_config=config) as decode,
    ):
        kept = await _first_turn(prefill, decode, hand_over)
        body = await prefill.complete(TURN + "u" * 400, max_tokens=1, kv_transfer_params=kept)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 496
        assert await prefill.metric("vllm:nixl_xfer_time_seconds_count") == 0
        await decode.until(LEASES, 0)
