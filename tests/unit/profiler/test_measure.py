"""Points are measured against a server that may fail, lie or hang, while all streams decode."""

import asyncio
from itertools import accumulate

import pytest

from penstock.core.errors import UpstreamError
from penstock.core.http.client import ConnectionPool
from penstock.profiler.measure import Measurer, Stream, steady
from penstock.workload.exchange import Destination


@pytest.fixture
async def measurer(fake_engine):
    """Measures the fake engine; gives up on a request after a second."""
    pool = ConnectionPool()
    yield Measurer(pool, Destination(fake_engine.url, "llama", timeout_s=1.0), speed=1.0, seed=7)
    await pool.close()


async def test_prompts_come_out_as_long_as_asked_for_in_the_servers_tokens(fake_engine, measurer):
    """A tokenizer of 2.5 bytes a token that adds one of its own. No prompt is sent twice, so nothing can be cached."""
    fake_engine.tokens_per_byte = 0.4
    await measurer.calibrate()
    fake_engine.bodies.clear()

    point = await measurer.prefill(2000)

    assert point.prompt_tokens == pytest.approx(2000, rel=0.01)
    assert point.ttft_s > 0
    assert len({body["prompt"][:40] for body in fake_engine.bodies}) == 3


async def test_warmed_prompts_are_those_that_decode(fake_engine, measurer):
    """Each begins as its warmed one does, so the server finds it in its cache."""
    await measurer.warm(600, 3)
    warmed = [body["prompt"] for body in fake_engine.bodies]
    point, _ = await measurer.decode(600, 2)

    decoded = [body["prompt"] for body in fake_engine.bodies[3:]]
    assert all(any(whole.startswith(text) for whole in warmed) for text in decoded)
    assert (point.context, point.concurrency) == (600, 2)
    assert point.tokens_per_s == pytest.approx(2 / point.itl_s, rel=0.2)


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (
            {"prompt_tokens_details": {"cached_tokens": 64}},
            "64 tokens of a prompt that was never sent before",
        ),
        *(
            ({"prompt_tokens": value}, "usage reports prompt_tokens")
            for value in ("absent", None, 0, -5, "many", float("nan"))
        ),
    ],
)
async def test_a_server_that_lies_or_says_nothing_is_refused(fake_engine, measurer, usage, said):
    """What it caches unsent is not the prompt's TTFT, and without the prompt's length a TTFT belongs nowhere."""
    fake_engine.usage = usage

    with pytest.raises(UpstreamError, match=said):
        await measurer.prefill(100)


async def test_a_first_token_without_text_is_tried_again(fake_engine, measurer):
    """Part of a letter alone: its stream is whole, and shows no TTFT."""
    silent = iter([True, False, True, False, False])

    async def now_and_then(body, responder):
        if not next(silent):
            await fake_engine.stream(body, responder)
            return
        responder.start(200)
        responder.write(b'data: {"choices":[{"index":0,"text":""}]}\n\ndata: [DONE]\n\n')
        responder.end()

    fake_engine.script = now_and_then

    assert (await measurer.prefill(100)).ttft_s > 0
    assert len(fake_engine.bodies) == 5


async def _failing(_, responder):
    responder.send(500, b'{"error": {"message": "out of memory"}}')


async def _hanging(_, responder):
    responder.start(200)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "said"),
    [(_failing, "http_500: out of memory; finished points are kept"), (_hanging, "timeout_total")],
)
async def test_a_server_that_fails_or_hangs_is_named(fake_engine, measurer, script, said):
    """Status and message, or the longest time of a request."""
    fake_engine.script = script

    with pytest.raises(UpstreamError, match=said):
        await measurer.prefill(100)


async def test_prompts_that_fell_out_of_the_cache_are_a_doubt(fake_engine, measurer):
    """Prefill then runs alongside decode."""
    fake_engine.usage = {"prompt_tokens_details": {"cached_tokens": 0}}

    _, doubts = await measurer.decode(600, 2)

    assert "2 of 2 warmed prompts were not in the cache" in doubts[0]


async def test_an_engine_that_runs_fewer_at_once_says_so(fake_engine, measurer):
    """One after the other: no point, and why."""
    turn = asyncio.Semaphore(1)
    fake_engine.gap_s = 0.0

    async def in_turn(body, responder):
        async with turn:
            await fake_engine.stream(body, responder)

    fake_engine.script = in_turn

    assert await measurer.decode(600, 3) == (None, ("3 requests of 600 tokens do not run at once",))


def stream(first_s, gaps_s):
    """A stream of single tokens."""
    return Stream(tuple(accumulate(gaps_s, initial=first_s)), len(gaps_s) + 1)


@pytest.mark.parametrize(
    ("other", "itl_s"),
    [
        (stream(0.05, [0.01] * 40), 0.01),
        # While the second prompt was read, the first stream stood still for a second.
        (stream(1.0, [0.01] * 30), 0.01),
        # Too few tokens, or none: the engine did not run both at once.
        (stream(0.35, [0.01] * 40), None),
        (stream(5.0, [0.01] * 40), None),
    ],
)
def test_streams_show_their_gap_while_all_decode(other, itl_s):
    """Two streams of 10 ms make 200 tokens a second; gaps before the last stream begins do not count."""
    one = stream(0.0, [0.9, 0.09] + [0.01] * 30 if other.times[0] == 1.0 else [0.01] * 40)

    assert steady([one, other]) == (None if itl_s is None else pytest.approx((itl_s, 2 / itl_s), rel=1e-3))
