"""Prefill and decode that get one request at once and meet, as SGLang's do: what each gets, and who is told of a failure."""

import asyncio

import orjson
import pytest
from fake_workers import Answers
from router_harness import error_of

from penstock.api import GraphSpec

SGLANG = GraphSpec.model_validate(
    {
        "model": {"name": "llama"},
        "runtime": "sglang",
        "services": {
            "router": {"role": "router"},
            "prefill": {"role": "prefill"},
            "decode": {"role": "decode"},
        },
        "planner": {"enabled": False},
    }
)
NO_RETRY = {"retries": {"maxPerRequest": 0}}


class Rooms:
    """Where the two of each prompt wait for each other."""

    def __init__(self):
        self._rooms = {}
        self.computed = asyncio.Event()
        self.computed.set()

    def join(self, *workers):
        """Have workers answer only once both have come."""
        for worker in workers:
            worker.otherwise = self._handler(worker)

    def _handler(self, worker):
        async def handler(request, responder):
            body = orjson.loads(request.body)
            here, there = self._rooms.setdefault(body["bootstrap_room"], (asyncio.Event(), asyncio.Event()))
            mine, others = (here, there) if worker.role == "prefill" else (there, here)
            if worker.role == "prefill":
                await self.computed.wait()
            mine.set()
            await others.wait()
            await worker.complete(request, responder)

        return handler


@pytest.fixture
def rooms():
    """Of one test."""
    return Rooms()


async def _served(harness, rooms, *roles, config=None):
    *workers, router = await harness.served(*(roles or ("prefill", "decode")), graph=SGLANG, config=config)
    rooms.join(*workers)
    return *workers, router


async def test_both_get_the_request_at_once_with_one_room(harness, rooms):
    """Neither answers before the other has come; prefill's has one token and no stream, and usage its cached tokens."""
    prefill, decode, router = await _served(harness, rooms)

    answer = await router.post(max_tokens=3)
    again = await router.post(max_tokens=3)

    assert (answer.status, again.status) == (200, 200)
    first, second = prefill.seen
    keys = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    assert [first.body[key] for key in keys] == [decode.seen[0].body[key] for key in keys]
    assert (first.body["bootstrap_host"], first.body["bootstrap_port"]) == ("127.0.0.1", 8998)
    assert (first.body["max_tokens"], first.body["stream"]) == (1, False)
    assert decode.seen[0].body["max_tokens"] == 3
    assert first.body["bootstrap_room"] != second.body["bootstrap_room"]
    assert (
        orjson.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"] == prefill.cached_tokens
    )
    assert await router.metric("penstock_router_kv_transfers_total", result="done") == 2
    await router.assert_idle()


async def test_a_stream_does_not_wait_for_the_prefills_answer(harness, rooms):
    """SGLang's prefill answers within one of its later steps; the first token goes out before."""
    prefill, decode, router = await _served(harness, rooms)
    end = decode.hold_stream()
    finish = prefill.hold()

    stream = await router.begun_stream(max_tokens=2)
    finish.set()
    end.set()

    assert b"[DONE]" in await stream.read(limit_bytes=10_000)
    await router.assert_idle()


@pytest.mark.parametrize("fails", ["prefill", "decode"])
async def test_both_are_tried_again_where_one_fails(harness, rooms, fails):
    """In a new room; the other's request is broken off at once, although it would wait for minutes."""
    *workers, router = await _served(harness, rooms, "prefill", "prefill", "decode", "decode")
    for each in workers:
        if each.role == fails:
            each.script = [Answers.drop()]
            break

    answers = [await router.post(max_tokens=2) for _ in range(4)]

    assert [each.status for each in answers] == [200] * 4
    rooms_of = [
        seen.body["bootstrap_room"] for each in workers if each.role == "decode" for seen in each.seen
    ]
    assert len(set(rooms_of)) == len(rooms_of)
    await router.assert_idle()


@pytest.mark.parametrize("fails", ["prefill", "decode"])
async def test_a_failure_names_its_cause_and_holds_nothing(harness, rooms, fails):
    """Without a retry the client gets the failing side's answer, and the other's request ends."""
    prefill, decode, router = await _served(harness, rooms, config=NO_RETRY)
    failing, other = (prefill, decode) if fails == "prefill" else (decode, prefill)
    failing.script = [Answers.drop()]

    answer = await router.post(max_tokens=2)

    assert (answer.status, error_of(answer)["code"]) == (502, "upstream_broken")
    await router.until(lambda: other.disconnects == len(other.seen))
    await router.assert_idle()


async def test_a_client_that_leaves_breaks_both_off(harness, rooms):
    """While the prompt is computed, neither worker continues it."""
    prefill, decode, router = await _served(harness, rooms)
    rooms.computed.clear()

    request = asyncio.create_task(router.post(max_tokens=2))
    await router.until(lambda: prefill.seen and decode.seen)
    request.cancel()

    await router.until(lambda: (prefill.disconnects, decode.disconnects) == (1, 1))
    await router.assert_idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_what_no_room_can_carry_is_refused_in_words(harness, rooms, path, body):
    """A decode worker of SGLang computes no prompts, so nothing is sent to wait for ever."""
    prefill, decode, router = await _served(harness, rooms)

    answer = await router.post(path, **body)

    assert answer.status == 400
    assert b"a KV transfer carries one prompt for one answer" in answer.body
    assert not prefill.seen
    assert not decode.seen
