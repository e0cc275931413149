"""KV events of real vLLMs, started as the graph renders them for Kubernetes, and the router that follows them."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KEY_TOKENS = 512
"""Tokens of a prefix block of the router."""
TEXT = "Water that waits above the dam is work that has not been done yet. " * 100


def ids(first, tokens):
    """Return a prompt of token ids that shares nothing with those that begin otherwise."""
    return [first] + [5 + n % 400 for n in range(tokens - 1)]


def compute(process, prompt):
    """Have one token made; return its usage."""
    return process.post(model="tiny", prompt=prompt, max_tokens=1)["usage"]


def blocks(router):
    """Return the prefix blocks that the worker is believed to hold."""
    return router.metric("penstock_router_worker_prefix_blocks")


def batches(router):
    """Return the batches of events heard so far."""
    return router.metric("penstock_router_kv_event_batches_total")


def clear(worker, router):
    """Clear the worker's cache, once no lease holds a part of it; vLLM tells of it with its next step."""
    worker.until(lambda: worker.post("/reset_prefix_cache") == {"success": True})
    compute(worker, "Hello")
    router.until(lambda: blocks(router) == 0)


@pytest.fixture
def cleared(followed):
    """The worker and the router, nothing cached; afterwards the router has lost and misunderstood nothing."""
    worker, router = followed

    def is_heard():
        # A subscription takes a moment, and what is published before is lost.
        worker.post("/reset_prefix_cache")
        compute(worker, ids(11, 3 * KEY_TOKENS + 1))
        return batches(router) > 0

    router.until(is_heard)
    clear(worker, router)
    compute(worker, ids(12, 2 * KEY_TOKENS + 1))
    # Two blocks were never held before: all that came earlier has been heard.
    router.until(lambda: blocks(router) == 2)
    clear(worker, router)
    yield followed
    assert router.metric("penstock_router_kv_events_malformed_total") == 0
    assert router.metric("penstock_router_kv_event_gaps_total") == 0


def test_what_was_sent_past_the_router_is_known(cleared):
    """By the keys of the router's own tokens: the same text, sent through it, adds its begun block alone."""
    worker, router = cleared

    tokens = compute(worker, TEXT)["prompt_tokens"]

    whole = tokens // KEY_TOKENS
    assert whole >= 2
    assert tokens % KEY_TOKENS > 0
    router.until(lambda: blocks(router) == whole)
    usage = compute(router, TEXT)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= whole * KEY_TOKENS
    assert blocks(router) == whole + 1


def test_chats_are_known_by_the_models_template(cleared):
    """A chat sent past the router adds its begun block alone when it comes through; grown, it is found again."""
    worker, router = cleared
    chat = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}],
        "max_tokens": 1,
    }

    tokens = worker.post("/v1/chat/completions", **chat)["usage"]["prompt_tokens"]

    whole = tokens // KEY_TOKENS
    assert tokens % KEY_TOKENS > 0
    router.until(lambda: blocks(router) == whole)
    usage = router.post("/v1/chat/completions", **chat)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= whole * KEY_TOKENS
    assert blocks(router) == whole + 1
    chat["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    usage = router.post("/v1/chat/completions", **chat)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= whole * KEY_TOKENS


def test_a_cleared_cache_is_forgotten(cleared):
    """What was served through the router, too."""
    worker, router = cleared
    compute(router, TEXT)
    assert blocks(router) > 2

    clear(worker, router)

    assert compute(worker, TEXT)["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_the_worker_evicts_is_forgotten(cleared):
    """Its 32 blocks hold two prompts of 2,000 tokens; of five, the last two are known."""
    worker, router = cleared
    before = batches(router)

    for first in range(20, 25):
        compute(worker, ids(first, 2000))
    router.until(lambda: batches(router) == before + 5)

    assert blocks(router) == 2 * 3
    compute(router, ids(24, 2000))
    assert blocks(router) == 2 * 3 + 1
