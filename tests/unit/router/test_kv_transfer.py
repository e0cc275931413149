"""Prefill and decode through the proxy: what each worker and the client get, leases that may have run out, and KV given back."""

import asyncio
import hashlib

import orjson
import pytest
from fake_workers import DONE, Answers

from penstock.api import Role
from penstock.router.core import request as request_machine
from penstock.router.proxy import worker_calls
from penstock.router.proxy.kv_transfer import REFUSED_MODEL
from penstock.runtimes.kv_transfer import Nixl


async def _transfers(router):
    """Return the router's counts of KV transfers by result, which its page and `/workers` agree on."""
    answer = await router.get("/workers")
    counts = orjson.loads(answer.body)["kv_transfers"]
    for result, count in counts.items():
        assert (await router.metric("penstock_router_kv_transfers_total", result=result) or 0) == count
    return counts


async def test_each_stage_gets_its_request(harness):
    """Prefill: one token, remote decode; decode: the client's request with prefill's params, unread, and a salt."""
    prefill, decode, router = await harness.served("prefill", "decode")

    answer = await router.post(
        max_tokens=3,
        min_tokens=2,
        stream_options=None,
        headers=((b"content-type", b"application/json"), (b"x-request-id", b"mine-1")),
    )

    assert answer.status == 200
    (at_prefill,), (at_decode,) = prefill.seen, decode.seen
    assert (at_prefill.body["max_tokens"], at_prefill.body["stream"]) == (1, False)
    assert at_prefill.body["kv_transfer_params"]["do_remote_decode"]
    assert at_decode.body == {
        "model": "llama",
        "prompt": "hello",
        "max_tokens": 3,
        "min_tokens": 2,
        "stream_options": None,
        "kv_transfer_params": harness.params,
        "cache_salt": hashlib.sha256(b"\0engine-1/0").hexdigest(),
    }
    for seen in (at_prefill, at_decode):
        assert seen.path == "/v1/completions"
        assert seen.headers[b"x-request-id"] == b"mine-1"
    assert answer.headers[b"x-request-id"] == b"mine-1"
    assert await _transfers(router) == {"done": 1, "none": 0, "lost": 0}


async def test_both_requests_of_a_prompt_carry_one_number(harness, monkeypatch):
    """A KV transfer that names a prompt by it finds it again; another prompt has another number."""
    sources = []
    for name in ("prefill_fields", "decode_fields"):
        own = getattr(Nixl, name)
        monkeypatch.setattr(
            Nixl,
            name,
            lambda self, source, *answer, own=own: sources.append(source) or own(self, source, *answer),
        )
    _, _, router = await harness.served("prefill", "decode")

    for _ in range(2):
        assert (await router.post(max_tokens=1)).status == 200

    assert sources[0] == sources[1]
    assert sources[2] == sources[3]
    assert sources[0].number != sources[2].number


async def test_streams_pass_untouched_but_for_usage(harness):
    """Every event is the worker's, byte for byte; the usage event carries the prefill's count."""
    prefill, decode, router = await harness.served("prefill", "decode")
    prefill.cached_tokens, decode.cached_tokens = 32, 39

    stream = await router.stream(max_tokens=4, stream_options={"include_usage": True})
    body = await stream.read(limit_bytes=10_000)

    *tokens, usage, done, rest = body.split(b"\n\n")
    assert stream.headers[b"content-type"] == b"text/event-stream"
    assert [token + b"\n\n" for token in tokens] == [harness.token_event(number) for number in range(4)]
    assert orjson.loads(usage.removeprefix(b"data: "))["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    assert (done, rest) == (b"data: [DONE]", b"")


async def test_tokens_leave_as_they_come(harness):
    """The first event reaches the client while the worker still holds the second."""
    _, decode, router = await harness.served("prefill", "decode")
    second = decode.hold_stream()

    stream = await router.stream()

    assert await anext(stream) == harness.token_event(0)
    assert (await router.workers())["decode-0"]["inflight_requests"] == 1
    assert (await router.workers())["decode-0"]["inflight_tokens"] == 41
    second.set()
    assert await stream.read(limit_bytes=100) == harness.done


async def test_a_prefill_that_keeps_no_blocks_is_decoded_alone(harness):
    """Its one token ended the text, say; decode gets the client's bytes and keeps its own usage."""
    prefill, decode, router = await harness.served("prefill", "decode")
    empty = orjson.dumps({"choices": [], "usage": prefill.usage(1), "kv_transfer_params": None})
    prefill.script = [harness.answers.status(200, empty)]
    decode.cached_tokens = 8

    answer = orjson.loads((await router.post()).body)

    assert "kv_transfer_params" not in decode.seen[0].body
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert await _transfers(router) == {"done": 0, "none": 1, "lost": 0}


async def test_tokens_are_counted(harness):
    """Prompt, generated and cached tokens, TTFT and gaps of one stream."""
    *_, router = await harness.served("prefill", "decode")
    stream = await router.stream(max_tokens=4, stream_options={"include_usage": True})
    await stream.read(limit_bytes=10_000)

    model = {"model_name": "llama"}
    for name, expected in {
        "prompt_tokens_total": 40,
        "generation_tokens_total": 4,
        "cached_tokens_total": 16,
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
        "prefill_queue_seconds_count": 1,
        "prefill_queue_requests": 0,
    }.items():
        assert await router.metric(f"penstock_router_{name}", **model) == expected
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="200") == 1


LEASE_S = 0.0001
"""Over before any decode worker can answer, so that the prefill worker's count decides."""
VLLM_ERROR = (
    b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'
)
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"right"},"finish_reason":null}]}\n\n'


def _expire(worker, answer):
    """Let a lease of a worker run out before an answer."""

    async def handler(request, responder):
        worker.expired_leases += 1
        await answer(request, responder)

    return handler


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("lease_s", "expires", "tries"),
    [(LEASE_S, True, 2), (LEASE_S, False, 1), (60.0, True, 1)],
    ids=["a lease has run out", "none has: heartbeats keep them", "another's: its own is not over yet"],
)
async def test_text_from_an_expired_transfer_is_not_passed_on(harness, lease_s, expires, tries, stream):
    """The prompt is prefilled again, and the second decode's text is what the client gets."""
    prefill, decode, router = await harness.served("prefill", "decode", lease_s=lease_s)
    first = harness.answers.stream(TOKEN.replace(b"right", b"first"), harness.done)
    first = first if stream else decode.complete
    decode.script = [_expire(prefill, first) if expires else first]

    answer = await router.post(max_tokens=2, stream=stream)

    assert (answer.status, b"first" in answer.body) == (200, stream and tries == 1)
    assert (len(prefill.seen), len(decode.seen)) == (tries, tries)
    assert len({seen.body["cache_salt"] for seen in decode.seen}) == tries
    assert await router.metric("penstock_router_retries_total", reason="lease_expired") == tries - 1
    assert await _transfers(router) == {"done": 1, "none": 0, "lost": tries - 1}


async def test_a_busy_prefill_workers_page_is_waited_for(harness):
    """Longer than a health check waits: what would follow is the whole prefill once more."""
    config = {"health": {"timeoutRealSeconds": 0.2}}
    prefill, _, router = await harness.served("prefill", "decode", lease_s=LEASE_S, config=config)
    prefill.page_delay_s = 0.4

    assert (await router.post(max_tokens=2)).status == 200
    assert len(prefill.seen) == 1


async def test_an_unknown_count_is_no_proof(harness):
    """When it stays unknown the client is told, rather than given text that may be wrong."""
    prefill, decode = await harness.pair()
    prefill.expired_leases = None
    config = {"retries": {"maxPerRequest": 1}}
    router = await harness.router(prefill, decode, lease_s=LEASE_S, config=config)

    answer = await router.post()

    assert answer.status == 502
    assert orjson.loads(answer.body)["error"]["code"] == "lease_expired"
    assert len(prefill.seen) == 2


def _error_event(*opening, code=b"500"):
    """Answer by a stream with an error of vLLM's before its first token."""
    return Answers.stream(*opening, b"data: " + VLLM_ERROR.replace(b"500", code) + b"\n\n", DONE)


@pytest.mark.parametrize(
    ("first", "stream", "status", "tries"),
    [
        (_error_event(), True, 200, 2),
        (_error_event(ROLE), True, 200, 2),
        (Answers.status(500, VLLM_ERROR), False, 200, 2),
        (_error_event(code=b"400"), True, 400, 1),
    ],
    ids=["in a stream", "after a chat's role", "by its status", "a refused parameter is the client's"],
)
async def test_an_error_before_the_first_token_is_prefilled_again(harness, first, stream, status, tries):
    """Vllm says so after a lost transfer; the client sees only what follows, and decode's circuit is not charged."""
    config = {"breaker": {"consecutiveFailures": 1}}
    prefill, decode, router = await harness.served("prefill", "decode", config=config)
    decode.script = [first]

    answer = await router.post(stream=stream, max_tokens=1)

    assert (answer.status, len(prefill.seen), len(decode.seen)) == (status, tries, tries)
    if stream and status == 200:
        assert answer.body == harness.token_event(0) + harness.done
    assert await router.metric("penstock_router_retries_total", reason="kv_lost") == tries - 1
    assert await _transfers(router) == {"done": int(status == 200), "none": 0, "lost": tries - 1}
    assert (await router.workers())[decode.name]["state"] == "ready"


async def test_a_stream_of_roles_that_ends_is_broken(harness):
    """No token ever came: another try, then 502."""
    _, decode, router = await harness.served("prefill", "decode", config={"retries": {"maxPerRequest": 0}})
    decode.otherwise = harness.answers.stream(ROLE)

    assert (await router.post(stream=True)).status == 502


@pytest.mark.parametrize(
    "first",
    [
        b"data: not json\n\n",
        b"data: 5\n\n",
        b'data: {"detail":"x"}\n\n',
        b": keep\n\ndata: [harness.done]\n\n",
        pytest.param(b": keep\n\n" * (1 << 20), id="comments without an end"),
    ],
)
async def test_a_stream_that_begins_with_no_chunk_is_no_answer(harness, first):
    """The client sees nothing of it: 502 where there is no other worker."""
    _, decode, router = await harness.served("prefill", "decode")
    decode.otherwise = harness.answers.stream(first)

    answer = await router.post(stream=True)

    assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (502, "upstream_wrong_answer")


AT_CAPACITY = b'{"error":{"message":"Server overloaded: worker at capacity","type":"ServiceUnavailableError","code":503}}'
UNKNOWN_MODEL = b'{"error":{"message":"The model does not exist.","type":"NotFoundError","code":404}}'
RELEASES = "penstock_router_kv_releases_total"


def _refuse(harness):
    """Answer as vLLM does where a model is unknown."""
    return harness.answers.status(404, UNKNOWN_MODEL)


def _releases(worker):
    """Return the parameters that a worker was sent to be released."""
    return [each.body["kv_transfer_params"] for each in worker.seen if each.body["model"] == REFUSED_MODEL]


async def _waiting_for_decode(harness):
    """A request that is prefilled and waits, since the only decode worker takes none."""
    router, pair, request = await harness.prefilled_without_decode()
    await router.until(lambda: len(router.server.core.queues[Role.DECODE]) == 1)
    return router, pair[1], request


async def test_a_client_that_leaves_between_prefill_and_decode_frees_the_blocks(harness):
    """A decode worker gets the prompt's parameters in a request that it refuses, which makes it tell prefill."""
    router, decode, request = await _waiting_for_decode(harness)
    decode.script = [_refuse(harness)]

    request.cancel()

    await router.until(lambda: _releases(decode) == [harness.params])
    await router.assert_idle()
    await router.until(lambda: router.server.metrics.kv_releases == {"released": 1})
    assert await router.metric(RELEASES, outcome="released") == 1
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="499") == 1


async def _leave(request, router):
    """Let a client leave; the router has seen that once it has answered another one."""
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await router.workers()


async def test_a_client_that_leaves_in_the_last_step_of_a_prefill_frees_the_blocks(harness):
    """Its worker cannot stop any more, so what it says of its blocks is waited for, and they are given back."""
    prefill, decode, router = await harness.served("prefill", "decode")
    finish = prefill.hold()
    request = asyncio.create_task(router.post(max_tokens=3))
    await router.until(lambda: len(prefill.seen) == 1)
    decode.script = [_refuse(harness)]

    await _leave(request, router)
    finish.set()

    await router.until(lambda: _releases(decode) == [harness.params])
    await router.assert_idle()
    assert [each.body["model"] for each in decode.seen] == [REFUSED_MODEL]
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="499") == 1


async def test_a_prefill_that_goes_on_for_long_is_broken_off_and_one_that_fails_is_not_tried_again(
    harness, monkeypatch
):
    """The client is gone, so nothing more is computed for it than a last step."""
    prefill, _, router = await harness.served("prefill", "decode")
    monkeypatch.setattr(worker_calls, "_LAST_STEP_REAL_S", 0.05)
    (await router.hanging(prefill)).cancel()
    await router.assert_idle()
    monkeypatch.setattr(worker_calls, "_LAST_STEP_REAL_S", 60.0)
    finish = prefill.hold(harness.answers.status(500, VLLM_ERROR))
    request = asyncio.create_task(router.post())
    await router.until(lambda: len(prefill.seen) == 2)
    await _leave(request, router)
    finish.set()
    await router.assert_idle()
    assert len(prefill.seen) == 2


async def test_a_request_that_every_decode_worker_refuses_is_released(harness):
    """It was refused for lack of room, so that no worker has its blocks; the client gets its 503."""
    _, decode, router = await harness.served("prefill", "decode")
    decode.script = [harness.answers.status(503, AT_CAPACITY), _refuse(harness)]

    assert (await router.post(max_tokens=1)).status == 503

    await router.until(lambda: _releases(decode) == [harness.params])


async def test_a_worker_that_runs_something_is_told_before_an_idle_one(harness):
    """Its next step sends the message on; an idle vLLM that never met the prefill worker has none."""
    _, first, second, router = await harness.served("prefill", "decode", "decode")
    running = await router.hanging(first, second)
    busy, idle = (first, second) if first.seen else (second, first)
    full = harness.answers.status(503, AT_CAPACITY)
    busy.script, idle.script = [full, _refuse(harness)], [full, _refuse(harness)]

    assert (await router.post(max_tokens=1)).status == 503

    await router.until(lambda: _releases(busy) == [harness.params])
    assert _releases(idle) == []
    running.cancel()


async def test_a_decode_worker_that_was_asked_answers_for_the_blocks(harness):
    """Served, failed and cancelled requests release nothing: the worker that has them does."""
    _, decode, router = await harness.served("prefill", "decode", config={"retries": {"maxPerRequest": 0}})
    assert (await router.post(max_tokens=1)).status == 200
    decode.script = [harness.answers.drop()]
    assert (await router.post(max_tokens=1)).status == 502
    (await router.hanging(decode)).cancel()
    await router.assert_idle()
    assert _releases(decode) == []
    assert not router.server.metrics.kv_releases


@pytest.mark.parametrize("broken", [True, False])
async def test_a_release_that_fails_is_counted(harness, broken):
    """The worker breaks off, or takes the request after all; the lease ends by itself."""
    router, decode, request = await _waiting_for_decode(harness)
    decode.script = [harness.answers.drop() if broken else decode.complete]
    request.cancel()
    await router.until(lambda: router.server.metrics.kv_releases == {"failed": 1})


async def test_the_router_waits_for_releases_when_it_stops(harness):
    """A message under way is not cut off."""
    router, decode, request = await _waiting_for_decode(harness)
    finish = decode.hold(_refuse(harness))
    request.cancel()
    await router.until(lambda: len(_releases(decode)) == 1)
    closing = asyncio.create_task(router.server.close())
    await asyncio.sleep(0)
    finish.set()
    await closing
    assert router.server.metrics.kv_releases == {"released": 1}


async def test_a_prompt_that_waited_too_long_for_decode_is_prefilled_again(harness, monkeypatch):
    """Nobody renewed its lease meanwhile, so decode is not even asked to read it."""
    router, pair, request = await harness.prefilled_without_decode()
    await router.until(lambda: len(router.server.core.queues[Role.DECODE]) == 1)
    monkeypatch.setattr(request_machine, "TRUSTED_FRACTION", 1e-12)
    pair[1].script = [_refuse(harness)]
    harness.write_state(pair)
    assert (await request).status == 200
    assert _releases(pair[1]) == [harness.params]
    assert await router.metric("penstock_router_retries_total", reason="lease_expired") == 1


async def test_kv_goes_between_workers_of_one_version(harness):
    """During a rollout from one version to the next: NIXL's connector refuses a peer of another one."""
    workers = [*await harness.pair(), *await harness.pair()]
    for worker, version in zip(workers, ("0.32.0", "0.32.0", "0.33.0", "0.33.0"), strict=True):
        worker.version = version
    router = await harness.router(*workers)
    await router.until(lambda: all(each.is_version_read for each in router.server.core.pool))

    for number in range(8):
        assert (await router.post(prompt=f"{number}")).status == 200

    for prefill, decode in (workers[:2], workers[2:]):
        assert {each.body["prompt"] for each in prefill.seen} == {each.body["prompt"] for each in decode.seen}
    assert await _transfers(router) == {"done": 8, "none": 0, "lost": 0}


async def test_without_a_decode_worker_of_its_version_a_prompt_is_computed_there_and_released(harness):
    """The text is right; the prefill's blocks do not wait for a reader that cannot come."""
    prefill, decode = await harness.pair()
    prefill.version, decode.version = "0.33.0", "0.32.0"
    router = await harness.router(prefill, decode)
    await router.until(lambda: all(each.is_version_read for each in router.server.core.pool))
    decode.script = [decode.complete, _refuse(harness)]

    assert (await router.post()).status == 200

    await router.until(lambda: _releases(decode) == [harness.params])
    assert "kv_transfer_params" not in decode.seen[0].body
    assert await _transfers(router) == {"done": 0, "none": 1, "lost": 0}


async def test_a_deflected_prompt_is_computed_by_the_decode_worker_that_answers(harness):
    """While every prefill worker is behind; the request reaches it as the client sent it, and is counted."""
    config = {"prefillDeflection": {"enabled": True}}
    prefill, decode, router = await harness.served("prefill", "decode", config=config)
    core = router.server.core
    worker, now_s = core.pool.get(decode.name), router.server.context.clock.now_s()
    core.deflection.computed(0, {prefill.name: 1}, now_s - 10)
    core.deflection.computed(10_000, {}, now_s)
    worker.kv_usage_fraction, worker.kv_capacity_tokens, worker.metrics_at_s = 0.1, 100_000, now_s + 60
    finish = prefill.hold()
    behind = asyncio.create_task(router.post(prompt="x " * 40_000))
    await router.until(lambda: len(prefill.seen) == 1)

    answer = await router.post()

    assert answer.status == 200
    assert await router.metric("penstock_router_deflected_prefills_total", model_name="llama") == 1
    assert len(prefill.seen) == 1
    (at_decode,) = decode.seen
    assert "kv_transfer_params" not in at_decode.body
    finish.set()
    assert (await behind).status == 200
    assert await _transfers(router) == {"done": 1, "none": 0, "lost": 0}
