"""`penstock up` with real vLLM: chats through a prefill and a decode worker, and the planner's scaling of prefill."""

import asyncio
import os
import signal

import psutil
import pytest
from endpoint import Endpoint, text_of
from up_graph import UpGraph

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = "Water that waits above the dam is work that has not been done yet. "
LONG = 80
"""Sentences of a prompt of about 1,600 tokens, which takes longer to compute than its answer of two tokens."""
CONCURRENCY = 40
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


@pytest.fixture(scope="module")
def graph(vllm, tmp_path_factory):
    """The graph, stopped in the end."""
    graph = UpGraph(tmp_path_factory.mktemp("up"))
    try:
        graph.up()
        yield graph
    finally:
        graph.down()


async def _chat(client, number, *, tokens=32, sentences=None):
    """Stream one chat to its end; return its text. Without ``sentences`` its prompt has 2 to 11 of them."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"{number}: {PROMPT * (sentences or 2 + number % 10)}"}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    events = [event async for event in stream]
    assert events[-1].usage.completion_tokens == tokens
    return text_of(events)


@pytest.fixture
async def client(graph):
    """The official client, its connections closed with the test."""
    async with graph.client() as client:
        yield client


async def test_chats_and_completions(client):
    """Streamed and whole, the same text."""
    whole = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"2: {PROMPT * 4}"}],
        max_tokens=32,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    completion = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    stream = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, stream=True
    )

    assert await _chat(client, 2) == whole.choices[0].message.content
    texts = [event.choices[0].text async for event in stream]
    assert "".join(texts) == completion.choices[0].text


async def test_prefill_is_scaled_up_and_down_under_load_without_a_loss(graph, client):
    """By the planner itself, from the workers' own metrics; forty streams at a time, and nothing is restarted.

    Long prompts and short answers: with short prompts the decode worker is what they wait for, and prefill rightly stays.
    """
    stop = asyncio.Event()
    served = 0

    async def ask(first):
        nonlocal served
        number = first
        while not stop.is_set():
            await _chat(client, number, tokens=2, sentences=LONG)
            served, number = served + 1, number + CONCURRENCY

    async with asyncio.TaskGroup() as group:
        for first in range(CONCURRENCY):
            group.create_task(ask(first))
        await graph.until(lambda: graph.ready("prefill") == (2, 2))
        enough = served + 2 * CONCURRENCY
        await graph.until(lambda: served >= enough)
        stop.set()
    await graph.until(lambda: graph.ready("prefill") == (1, 1))

    assert served >= 3 * CONCURRENCY
    workers = graph.processes("prefill") + graph.processes("decode")
    assert [each["restarts"] for each in workers] == [0, 0]


async def test_a_stopped_engine_core_takes_its_worker_out_of_routing(graph, client):
    """Its API server still answers 200; a request that meets it waits, and is served once the core continues."""
    (decode,) = graph.processes("decode")
    (core,) = (each for each in psutil.Process(decode["pid"]).children() if "EngineCor" in each.name())
    core.suspend()
    try:
        await graph.until(lambda: graph.ready("decode") == (0, 1), within_s=30)
        (stopped,) = graph.processes("decode")
        asked = asyncio.create_task(_chat(client, 3))
    finally:
        core.resume()
    await graph.until(lambda: graph.ready("decode") == (1, 1), within_s=60)
    await asked
    assert str(core.pid) in stopped["reason"]
    assert graph.processes("decode")[0]["restarts"] == decode["restarts"]


async def test_a_killed_decode_worker_loses_no_request(graph, client):
    """Its prompts' leases run out in the prefill worker's own count, it is started again, and the text is right."""
    expected = await _chat(client, 5)
    (prefill,), (decode,) = graph.processes("prefill"), graph.processes("decode")
    page = Endpoint(prefill["url"])
    before = page.metric(EXPIRED)
    os.killpg(decode["pid"], signal.SIGSTOP)
    asked = asyncio.create_task(_chat(client, 5))
    await graph.until(lambda: page.metric("vllm:kv_cache_usage_perc") > 0)
    os.killpg(decode["pid"], signal.SIGKILL)

    assert await asked == expected
    await graph.until(lambda: page.metric(EXPIRED) > before, within_s=60)
    (decode,) = graph.processes("decode")
    assert decode["restarts"] == 1
