"""What the router counts at its frontend for the planner: arrivals, not answers, and the prompt tokens behind them."""

import asyncio

import pytest

from penstock.router.discovery.watch import parse_page

COUNTS = (
    "arrivals_total",
    "arrived_prompt_tokens_total",
    "refused_requests_total",
    "queue_timeouts_total",
    "completed_requests_total",
    "completed_output_tokens_total",
    "routed_prompt_tokens_total",
    "routed_uncached_tokens_total",
    "computed_prompt_tokens_total",
    "prefill_queue_requests",
    "prefill_queue_uncached_tokens",
)


BY_REASON = """\
vllm:num_requests_waiting{engine="0"} 9
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 5
"""


async def _counts(router):
    """Return the frontend's counts that are not 0."""
    found = {name: await router.metric(f"penstock_router_{name}", model_name="llama") for name in COUNTS}
    return {name: value for name, value in found.items() if value}


@pytest.mark.parametrize("policy", ["dualmap", "least-loaded"])
async def test_arrivals_count_when_they_come_and_outcomes_when_they_end(harness, policy):
    """One runs, one waits, one is refused; then both are answered. Prompts of 10 tokens; the worker says 40, 16 cached."""
    config = {"policy": policy, "prefillQueue": {"workerTokens": 1, "maxRequests": 1}}
    prefill, _, router = await harness.served("prefill", "decode", config=config)
    hold = prefill.hold()
    first = asyncio.create_task(router.post(prompt="x" * 40, max_tokens=3))
    await router.until(lambda: prefill.seen)
    second = asyncio.create_task(router.post(prompt="y" * 40, max_tokens=3))
    await router.until(lambda: len(router.server.core.entry_queue) == 1)

    refused = await router.post(prompt="z" * 40)

    assert refused.status == 429
    assert await _counts(router) == {
        "arrivals_total": 3,
        "arrived_prompt_tokens_total": 30,
        "refused_requests_total": 1,
        "routed_prompt_tokens_total": 20,
        "routed_uncached_tokens_total": 20,
        "prefill_queue_requests": 1,
        "prefill_queue_uncached_tokens": 10,
    }
    pending = {"worker": prefill.name, "role": "prefill"}
    assert await router.metric("penstock_router_worker_pending_prompt_tokens", **pending) == 10
    hold.set()
    await asyncio.gather(first, second)
    counts = await _counts(router)
    assert counts["completed_requests_total"] == 2
    assert counts["completed_output_tokens_total"] == 6
    assert counts["computed_prompt_tokens_total"] == counts["routed_uncached_tokens_total"] == 20
    assert await router.metric("penstock_router_worker_pending_prompt_tokens", **pending) == 0
    assert not counts.keys() & {"prefill_queue_requests", "prefill_queue_uncached_tokens"}


async def test_agents_prompts_are_counted_as_the_worker_counts_them(harness):
    """Tools and images count for what they cost, as the metric of estimates shows; a text afterwards costs what it did before."""
    worker, router = await harness.served("aggregated", config={"policy": "least-loaded"})
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": "what it does " * 60}}
        for i in range(30)
    ]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2000}}
    text = "word " * 400

    async def ask(number, tokens, content, **more):
        worker.prompt_tokens = tokens
        before = (await _counts(router)).get("arrived_prompt_tokens_total", 0.0)
        messages = [{"role": "user", "content": content}]
        for _ in range(number):
            answer = await router.post("/v1/chat/completions", prompt=None, messages=messages, **more)
            assert answer.status == 200
        return ((await _counts(router))["arrived_prompt_tokens_total"] - before) / (number * tokens)

    assert await ask(20, 500, text) == pytest.approx(1, abs=0.1)
    factors = [
        await ask(20, 8_300, text, tools=tools),
        await ask(20, 1_010, [{"type": "text", "text": "What is in this picture?"}, image]),
        await ask(20, 500, text),
    ]

    assert all(1 / 1.2 < each < 1.2 for each in factors), factors
    below = await router.metric("penstock_router_prompt_estimate_ratio_bucket", model_name="llama", le="0.83")
    within = await router.metric("penstock_router_prompt_estimate_ratio_bucket", model_name="llama", le="1.2")
    assert within - below >= 70


async def test_the_wait_for_a_worker_is_in_the_ttft_and_not_in_the_time_from_dispatch(harness):
    """Of two streams one waits until the worker has computed the other's prompt: the two histograms differ by that."""
    config = {"policy": "least-loaded", "prefillQueue": {"workerTokens": 1}}
    prefill, _, router = await harness.served("prefill", "decode", config=config)
    hold = prefill.hold()
    streams = [asyncio.create_task(router.post(prompt=each * 40, stream=True)) for each in "xy"]
    await router.until(lambda: prefill.seen and len(router.server.core.entry_queue) == 1)
    hold.set()
    assert [answer.status for answer in await asyncio.gather(*streams)] == [200, 200]
    totals = {}
    for name in ("time_to_first_token", "dispatch_to_first_token", "prefill_queue"):
        for part in ("count", "sum"):
            totals[name, part] = await router.metric(
                f"penstock_router_{name}_seconds_{part}", model_name="llama"
            )
    assert totals["time_to_first_token", "count"] == totals["dispatch_to_first_token", "count"] == 2
    waited_s = totals["time_to_first_token", "sum"] - totals["dispatch_to_first_token", "sum"]
    assert waited_s >= totals["prefill_queue", "sum"] > 0


async def test_prompts_that_a_worker_is_believed_to_hold_are_routed_as_cached(harness):
    """Of a prompt seen before nearly nothing is new; it arrives in full all the same."""
    prefill, _, router = await harness.served("prefill", "decode", config={"policy": "dualmap"})
    prefill.cached_tokens = None
    prompt = "a long prompt " * 2000

    for _ in range(2):
        assert (await router.post(prompt=prompt)).status == 200

    counts = await _counts(router)
    assert counts["arrivals_total"] == 2
    assert counts["routed_uncached_tokens_total"] < 0.6 * counts["routed_prompt_tokens_total"]


async def test_a_body_that_is_no_request_does_not_arrive(harness):
    """A 400 is not a demand for workers; a worker's own refusal is none of the frontend's."""
    worker, router = await harness.served("aggregated")
    worker.otherwise = harness.answers.status(429)

    assert (await router.post(raw=b"{")).status == 400
    assert (await router.post()).status == 429

    counts = await _counts(router)
    assert (counts["arrivals_total"], counts.get("refused_requests_total")) == (1, None)


@pytest.mark.parametrize(
    ("usages", "blocks", "expected"),
    [
        (["0.25"], ["1000"], ((0.25,), 0.25, 1000, 16_000)),
        (["0.2", "0.4"], ["1000", "500"], ((0.2, 0.4), pytest.approx(0.3), 1500, 24_000)),
        (["0.2", "0.4"], ["1000", "None"], ((0.2, 0.4), pytest.approx(0.3), None, None)),
        *((["0.5"], [none], ((0.5,), 0.5, None, None)) for none in ("None", "0", "-1", "9" * 5000)),
        *(([wrong], ["1000"], ((), None, 1000, 16_000)) for wrong in ("+Inf", "1.5")),
        (["0.5", "NaN"], ["1000", "500"], ((), None, None, None)),
    ],
)
def test_kv_usage_and_size_are_those_of_all_ranks(usages, blocks, expected):
    """The mean of the usage, the sum of the sizes; where one is none it is unknown, never zero."""
    page = [f'vllm:kv_cache_usage_perc{{engine="{at}"}} {each}\n' for at, each in enumerate(usages)]
    info = 'vllm:cache_config_info{engine="%d",num_gpu_blocks="%s",block_size="16"} 1\n'
    found = parse_page("".join(page + [info % each for each in enumerate(blocks)]), {})
    shown = found.kv_ranks, found.kv_usage_fraction, found.kv_total_blocks, found.kv_capacity_tokens
    assert shown == expected


@pytest.mark.parametrize(
    ("waiting", "count"),
    [
        ('vllm:num_requests_waiting{engine="0"} 9\nvllm:num_requests_waiting{engine="1"} 1', 10),
        (BY_REASON, 4),
        ("vllm:num_requests_waiting NaN", None),
        ("vllm:num_requests_waiting -1", None),
        ("", None),
    ],
)
def test_requests_that_wait_in_a_worker_are_read(waiting, count):
    """Those that wait for room, of all its engines; of older workers all. What is not a number is unknown."""
    assert parse_page(waiting + "\n", {}).waiting_requests == count


def test_a_workers_page_is_read_by_its_runtimes_names():
    """What differs is declared; the rest has vLLM's names."""
    page = "acme:kv 0.25\nvllm:num_requests_waiting 3\nvllm:kv_cache_usage_perc 0.75\n"
    found = parse_page(page, {"vllm:kv_cache_usage_perc": "acme:kv"})
    assert (found.kv_usage_fraction, found.waiting_requests) == (0.25, 3.0)
