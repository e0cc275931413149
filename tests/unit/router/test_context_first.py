"""Prefill before decode as TensorRT-LLM does it: what each gets, late tokens, and prompts that none fetches."""

import orjson
import pytest
from fake_workers import Answers

from penstock.api import GraphSpec

GRAPH = GraphSpec.model_validate(
    {
        "model": {"name": "llama"},
        "runtime": "trtllm",
        "services": {role: {"role": role} for role in ("router", "prefill", "decode")},
        "planner": {"enabled": False},
    }
)
SAID = {
    "request_type": "context_only",
    "disagg_request_id": 9,
    "ctx_request_id": 9,
    "first_gen_tokens": [5],
    "encoded_opaque_state": "b3BhcXVl",
}


def context_answer(finish_reason="not_finished"):
    """A context server's answer."""
    choice = {"index": 0, "text": "x", "finish_reason": finish_reason, "disaggregated_params": SAID}
    usage = {"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 32}}
    return Answers.status(200, orjson.dumps({"choices": [choice], "usage": usage}))


async def _served(harness, **settings):
    prefill, decode, router = await harness.served("prefill", "decode", graph=GRAPH, **settings)
    prefill.otherwise = context_answer()
    return prefill, decode, router


async def test_decode_gets_the_parameters_that_prefill_answered(harness):
    """No key that its models do not know: neither a second limit nor a salt."""
    prefill, decode, router = await _served(harness)

    answer = await router.post(max_tokens=3, stream_options=None)

    (first,), (second,) = prefill.seen, decode.seen
    assert first.body.keys() == {"model", "prompt", "max_tokens", "stream", "disaggregated_params"}
    assert first.body["disaggregated_params"]["request_type"] == "context_only"
    assert second.body["disaggregated_params"] == {**SAID, "request_type": "generation_only"}
    assert "cache_salt" not in second.body
    assert orjson.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_a_text_that_its_first_token_ended_is_computed_by_decode(harness):
    """Its KV is gone, and a generation server computes prompts too."""
    prefill, decode, router = await _served(harness)
    prefill.otherwise = context_answer("stop")

    answer = await router.post(max_tokens=3)

    assert answer.status == 200
    assert "disaggregated_params" not in decode.seen[0].body
    assert await router.metric("penstock_router_kv_transfers_total", result="none") == 1


async def test_kv_that_came_late_is_not_distrusted(harness):
    """Who reads freed KV gets an error from TensorRT-LLM, not other blocks."""
    prefill, _, router = await _served(harness, lease_s=0.000_001)

    assert (await router.post(max_tokens=3)).status == 200
    assert len(prefill.seen) == 1
    assert await router.metric("penstock_router_kv_transfers_total", result="done") == 1


async def test_a_prompt_that_none_fetches_is_not_given_back(harness):
    """A generation server would take the message for a request."""
    _, decode, router = await _served(harness, config={"retries": {"maxPerRequest": 0}})
    decode.otherwise = Answers.status(503)

    await router.post(max_tokens=3)

    assert [each.body["model"] for each in decode.seen] == ["llama"]
    for result in ("released", "failed", "no_worker"):
        assert await router.metric("penstock_router_kv_releases_total", result=result) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt_logprobs": 0}),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_what_carries_no_kv_goes_to_decode_alone(harness, path, body):
    """Its server computes the prompt."""
    prefill, decode, router = await _served(harness)

    await router.post(path, **body)

    assert (len(prefill.seen), len(decode.seen)) == (0, 1)
