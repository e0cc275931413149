"""The router before real vLLM workers: one that does both stages, and a pair joined by NIXL."""

import signal
import threading
import time

import openai
import orjson
import pytest
from endpoint import GREEDY, SENTENCE, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = SENTENCE * 12
MESSAGES = [{"role": "user", "content": PROMPT}]


def _completions(process, **changes):
    """Return the text of a whole and a streamed answer, and their usages."""
    client, body = process.client(), {"prompt": PROMPT, **GREEDY, **changes}
    whole = client.completions.create(**body)
    events = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    return whole.choices[0].text, text_of(events), whole.usage, events[-1].usage


def test_completions(aggregated, workers):
    """Whole and streamed answers are the worker's own text, with its usage."""
    expected = workers["aggregated"].post(prompt=PROMPT, **GREEDY)

    whole, streamed, *usages = _completions(aggregated)

    assert whole == streamed == expected["choices"][0]["text"]
    for usage in usages:
        assert (usage.prompt_tokens, usage.completion_tokens) == (expected["usage"]["prompt_tokens"], 24)


def test_chat(aggregated):
    """Whole and streamed answers agree."""
    client = aggregated.client()
    body = {"messages": MESSAGES, **GREEDY}

    whole = client.chat.completions.create(**body)
    events = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))

    assert events[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert text_of(events) == whole.choices[0].message.content
    assert events[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "does not exist"),
        ({"prompt": "water " * 5000}, openai.BadRequestError, "maximum context length is 2048"),
        ({"prompt": [5] * 2100}, openai.BadRequestError, "maximum context length is 2048"),
        (
            {"max_tokens": 5000},
            openai.BadRequestError,
            "max_tokens=5000 cannot be greater than max_model_len",
        ),
    ],
)
@pytest.mark.parametrize("stages", ["aggregated", "disaggregated"])
def test_errors(request, stages, changes, error, message):
    """The worker's own refusals arrive as the client's exceptions, through either kind of graph."""
    client = request.getfixturevalue(stages).client()

    with pytest.raises(error, match=message):
        client.completions.create(**{"prompt": "x", **GREEDY, **changes})


def test_a_vanished_client_ends_its_request(aggregated, workers):
    """Its generation stops, and until then its KV blocks show in `/workers`."""
    worker = workers["aggregated"]
    stream = aggregated.client().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))

    def shown():
        (one,) = orjson.loads(aggregated.get("/workers"))["workers"]
        return one["kv_usage_fraction"]

    aggregated.until(lambda: shown() > 0)
    assert worker.metric("vllm:num_requests_running") == 1
    stream.close()

    aggregated.until(lambda: worker.metric("vllm:num_requests_running") == 0, within_s=10)
    aggregated.until(lambda: shown() == 0)
    assert worker.metric("vllm:generation_tokens_total") < 1500


@pytest.mark.parametrize("repeats", [1, 3, 12, 20])
def test_a_hand_over_gives_the_same_text(disaggregated, workers, repeats):
    """As one worker alone, for prompts of part of a block and of several; and KV was really transferred."""
    prompt = f"{repeats}: Water that waits above the dam is work. " * repeats
    decode = workers["decode"]
    names = (
        "vllm:nixl_xfer_time_seconds_count",
        "vllm:external_prefix_cache_hits_total",
        "vllm:prompt_tokens_cached_total",
    )
    before = [decode.metric(name) for name in names]
    retries = disaggregated.metric("penstock_router_retries_total")

    alone = workers["aggregated"].post(prompt=prompt, **GREEDY)
    whole, streamed, first, second = _completions(disaggregated, prompt=prompt)

    assert whole == streamed == alone["choices"][0]["text"]
    transfers, hits, cached = (decode.metric(name) - value for name, value in zip(names, before, strict=True))
    prompt_tokens = alone["usage"]["prompt_tokens"]
    if disaggregated.metric("penstock_router_retries_total") > retries:
        pytest.skip(
            "this machine took longer than the lease, so the router prefilled again; the text is right"
        )
    assert transfers == 2
    assert prompt_tokens <= hits <= cached == 2 * prompt_tokens
    # The prefill's own cache: nothing at first, then every whole block, though decode counts all as cached.
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == (prompt_tokens - 1) // 128 * 128


def test_chat_through_a_pair(disaggregated, workers):
    """The same text as from one worker."""
    body = {"messages": MESSAGES, **GREEDY}
    alone = workers["aggregated"].client().chat.completions.create(**body)
    whole = disaggregated.client().chat.completions.create(**body)
    events = list(disaggregated.client().chat.completions.create(**body, stream=True))

    assert whole.choices[0].message.content == text_of(events) == alone.choices[0].message.content


def _overwrite(prefill):
    """Fill all KV blocks of a worker with other prompts."""
    for first in (11, 12, 13):
        prefill.post(model="tiny", prompt=[first] + [5 + n % 400 for n in range(2000)], max_tokens=1)


def _expire(prefill, before):
    prefill.until(lambda: prefill.metric("vllm:nixl_num_kv_expired_reqs_total") > before)
    _overwrite(prefill)


def test_what_an_expired_hand_over_does_without_the_router(workers):
    """Vllm answers 200 with other text, then and to whoever asks the same: what the router is there to prevent."""
    prefill, decode = workers["prefill"], workers["decode"]
    prompt = "A pipe too narrow loses its head; a pipe too wide costs more than it carries. " * 14
    expected = workers["aggregated"].post(prompt=prompt, **GREEDY)["choices"][0]["text"]
    before = prefill.metric("vllm:nixl_num_kv_expired_reqs_total")
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    params = prefill.post(**body, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    _expire(prefill, before)

    answer = decode.post(prompt=prompt, **GREEDY, kv_transfer_params=params["kv_transfer_params"])

    assert params["kv_transfer_params"]["remote_blocks_expiry_time"] is None
    assert answer["choices"][0]["text"] != expected
    assert decode.post(prompt=prompt, **GREEDY)["choices"][0]["text"] != expected


@pytest.mark.parametrize("stream", [False, True])
def test_an_expired_hand_over_is_prefilled_again(disaggregated, workers, stream):
    """Decode stands still while the lease runs out and the blocks are overwritten; this text and the next are right."""
    prefill, decode = workers["prefill"], workers["decode"]
    prompt = f"{stream}: Water that waits above the dam is work that has not been done yet. " * 14
    expected = workers["aggregated"].post(prompt=prompt, **GREEDY)["choices"][0]["text"]
    # An earlier prompt's lease must not be the one that is seen to run out.
    prefill.until(lambda: prefill.metric("vllm:kv_cache_usage_perc") == 0)
    before = prefill.metric("vllm:nixl_num_kv_expired_reqs_total")
    retries = disaggregated.metric("penstock_router_retries_total")
    texts = []

    def ask():
        whole = disaggregated.client().completions.create(prompt=prompt, **GREEDY, stream=stream)
        texts.append(text_of(whole) if stream else whole.choices[0].text)

    disaggregated.wait_for("/ready")
    decode.signal_all(signal.SIGSTOP)
    client = threading.Thread(target=ask)
    try:
        client.start()
        prefill.until(lambda: prefill.metric("vllm:kv_cache_usage_perc") > 0)
        _expire(prefill, before)
    finally:
        decode.signal_all(signal.SIGCONT)
    client.join(timeout=300)

    assert texts == [expected]
    # Which reason depends on how decode wakes: it may also say that the blocks are lost, or break the connection.
    assert disaggregated.metric("penstock_router_retries_total") > retries
    ask()
    assert texts == [expected, expected]


def test_a_vanished_client_of_a_pair(disaggregated, workers):
    """Decode stops, and prefill's blocks are let go without an expiry."""
    prefill, decode = workers["prefill"], workers["decode"]
    before = prefill.metric("vllm:nixl_num_kv_expired_reqs_total")
    stream = disaggregated.client().completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert decode.metric("vllm:num_requests_running") == 1
    stream.close()

    disaggregated.until(lambda: decode.metric("vllm:num_requests_running") == 0, within_s=10)
    time.sleep(1)
    assert prefill.metric("vllm:kv_cache_usage_perc") == 0
    assert prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == before
