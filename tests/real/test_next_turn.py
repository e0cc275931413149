"""KV that a vLLM decode worker keeps for a conversation's next turn: who hears of it, and that it can be read.

What docs/leases.md says about bidirectional transfer in a graph rests on this.
"""

import pytest
from endpoint import LEASE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TTL_S = 4 * LEASE_S
FIRST = [40 + n % 300 for n in range(500)]
GREEDY = {"model": "tiny", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
USED = "vllm:kv_cache_usage_perc"


@pytest.fixture(scope="module")
def pair(deployment):
    """A prefill and a decode worker with transfers both ways; they have exchanged a prompt."""
    manifest = deployment.manifest("turns", {}, "prefill", "decode")
    workers = deployment.workers(manifest, bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=TTL_S)
    prefill, decode = workers["prefill"], workers["decode"]
    decode.post(**GREEDY, prompt=[7] * 300, kv_transfer_params=_handed_over(prefill, [7] * 300))
    yield prefill, decode
    for worker in (prefill, decode):
        worker.stop()


def _handed_over(prefill, prompt, **params):
    """Return what a prefill worker tells decode."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, **params}
    answer = prefill.post(model="tiny", prompt=prompt, max_tokens=1, kv_transfer_params=params)
    return answer["kv_transfer_params"]


def _idle(decode):
    decode.until(lambda: decode.metric(USED) == 0, within_s=3 * TTL_S)


def test_a_complete_answer_tells_where_its_kv_is_and_the_next_turn_reads_it(pair):
    """Prefill fetches the answer's KV instead of computing it, decode's copy is freed, and the text is right."""
    prefill, decode = pair
    _idle(decode)
    answer = decode.post(
        **GREEDY, prompt=FIRST, kv_transfer_params=_handed_over(prefill, FIRST), return_token_ids=True
    )
    kept = answer["kv_transfer_params"]
    assert (kept["do_remote_decode"], kept["remote_num_tokens"]) == (True, len(FIRST) + 199)
    assert decode.metric(USED) > 0
    fetched = prefill.metric("vllm:external_prefix_cache_hits_total")
    expired = decode.metric("vllm:nixl_num_kv_expired_reqs_total")
    second = [*FIRST, *answer["choices"][0]["token_ids"], *FIRST[:200]]

    params = _handed_over(prefill, second, **kept)

    assert prefill.metric("vllm:external_prefix_cache_hits_total") > fetched
    decode.until(lambda: decode.metric(USED) == 0)
    assert decode.metric("vllm:nixl_num_kv_expired_reqs_total") == expired
    few = {**GREEDY, "max_tokens": 24, "prompt": second}
    text = decode.post(**few, kv_transfer_params=params)["choices"][0]["text"]
    assert text == prefill.post(**few, cache_salt="alone")["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_does_not_tell_and_its_kv_stays_until_the_time_to_live_is_over(pair, path):
    """Nobody can ask for it, yet decode keeps it: vLLM 0.32 has no kv_transfer_params in events."""
    prefill, decode = pair
    _idle(decode)
    expired = decode.metric("vllm:nixl_num_kv_expired_reqs_total")
    asked = (
        {"prompt": FIRST}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "A" * 400}]}
    )
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    first = prefill.post(path, model="tiny", max_tokens=1, kv_transfer_params=remote, **asked)
    body = {**GREEDY, **asked, "stream": True, "kv_transfer_params": first["kv_transfer_params"]}

    events = decode.stream(path, **body)

    assert events[-1] == "[DONE]"
    assert not any("kv_transfer_params" in event for event in events)
    assert decode.metric(USED) > 0
    decode.until(lambda: decode.metric(USED) == 0, within_s=3 * TTL_S)
    assert decode.metric("vllm:nixl_num_kv_expired_reqs_total") == expired + 1
