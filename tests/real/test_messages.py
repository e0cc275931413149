"""Anthropic's official client, the tokenizer's routes and embeddings, before real vLLM workers."""

import anthropic
import openai
import pytest
from endpoint import SENTENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = SENTENCE * 12
SAID = {
    "model": "tiny",
    "max_tokens": 16,
    "extra_body": {"temperature": 0},
    "system": "You keep the gate.",
    "messages": [{"role": "user", "content": PROMPT}],
}


def _total(usage):
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached


def test_messages_through_prefill_and_decode(disaggregated, workers):
    """Complete and streamed, the text is that of one worker alone, and usage adds up to the counted prompt."""
    client = anthropic.Anthropic(base_url=disaggregated.url, api_key="none", max_retries=0, timeout=300)
    alone = anthropic.Anthropic(base_url=workers["aggregated"].url, api_key="none", timeout=300)
    expected = alone.messages.create(**SAID)
    complete = client.messages.create(**SAID)
    with client.messages.stream(**SAID) as stream:
        streamed = stream.get_final_message()
    assert complete.content[0].text == streamed.content[0].text == expected.content[0].text
    counted = client.messages.count_tokens(
        model="tiny", system=SAID["system"], messages=SAID["messages"]
    ).input_tokens
    assert _total(complete.usage) == _total(streamed.usage) == _total(expected.usage) == counted
    assert complete.usage.output_tokens == streamed.usage.output_tokens == 16
    assert complete.stop_reason == streamed.stop_reason == "max_tokens"
    # Hello of the fixture, and these two.
    assert disaggregated.metric("penstock_router_kv_transfers_total", result="done") == 3


def test_errors_of_vllm_have_the_form_that_the_client_reads(disaggregated):
    """Its message comes through, in Anthropic's form."""
    client = anthropic.Anthropic(base_url=disaggregated.url, api_key="none", max_retries=0, timeout=300)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**SAID, "extra_body": {"temperature": -1}})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_tokenizer_routes_and_what_the_model_lacks(aggregated):
    """Tokens make the text again; a model that generates has no embeddings, which the client reads."""
    tokens = aggregated.post("/tokenize", model="tiny", prompt=PROMPT, add_special_tokens=False)["tokens"]
    assert aggregated.post("/detokenize", model="tiny", tokens=tokens)["prompt"] == PROMPT
    with pytest.raises(openai.NotFoundError, match="do not serve /v1/embeddings"):
        aggregated.client().embeddings.create(model="tiny", input="x")
