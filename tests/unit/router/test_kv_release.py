"""Prompts that were prefilled and that no decode worker was asked to serve: their KV is given back at once."""

import asyncio

import pytest

from penstock.api import Role
from penstock.router.proxy.kv_transfer import REFUSED_MODEL

AT_CAPACITY = b'{"error":{"message":"Server overloaded: worker at capacity","type":"ServiceUnavailableError","code":503}}'
UNKNOWN_MODEL = b'{"error":{"message":"The model does not exist.","type":"NotFoundError","code":404}}'
RELEASES = "penstock_router_kv_releases_total"


def _refuse(harness):
    """Answer as vLLM does where a model is unknown."""
    return harness.answers.status(404, UNKNOWN_MODEL)


def _releases(worker):
    """Return the parameters that a worker was sent to be released."""
    return [each.body["kv_transfer_params"] for each in worker.seen if each.body["model"] == REFUSED_MODEL]


async def _waiting_for_decode(harness, tmp_path):
    """A request that is prefilled and waits, since the only decode worker takes none."""
    router, pair, request = await harness.prefilled_without_decode(tmp_path / "llama.json")
    await router.until(lambda: len(router.server.core.queues[Role.DECODE]) == 1)
    return router, pair[1], request


async def test_a_client_that_leaves_between_prefill_and_decode_frees_the_blocks(harness, tmp_path):
    """A decode worker gets the prompt's parameters in a request that it refuses, which makes it tell prefill."""
    router, decode, request = await _waiting_for_decode(harness, tmp_path)
    decode.script = [_refuse(harness)]

    request.cancel()

    await router.until(lambda: _releases(decode) == [harness.params])
    await router.assert_idle()
    await router.until(lambda: router.server.metrics.kv_releases == {"released": 1})
    assert await router.metric(RELEASES, outcome="released") == 1
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="499") == 1


async def test_a_request_that_every_decode_worker_refuses_is_released(harness):
    """It was refused for want of room, so that no worker has its blocks; the client gets its 503."""
    _, decode, router = await harness.served("prefill", "decode")
    decode.script = [harness.answers.status(503, AT_CAPACITY), _refuse(harness)]

    assert (await router.post(max_tokens=1)).status == 503

    await router.until(lambda: _releases(decode) == [harness.params])


async def test_a_worker_that_runs_something_is_told_before_an_idle_one(harness):
    """Its next step sends the message on; an idle vLLM that never met the prefill worker has none."""
    prefill, first = await harness.pair()
    second = await harness.worker("decode")
    router = await harness.router(prefill, first, second)
    started = asyncio.Event()
    first.script, second.script = [harness.answers.hang(started)], [harness.answers.hang(started)]
    running = asyncio.create_task(router.post())
    await started.wait()
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
    started = asyncio.Event()
    decode.script = [harness.answers.hang(started)]
    request = asyncio.create_task(router.post())
    await started.wait()
    request.cancel()
    await router.assert_idle()
    assert _releases(decode) == []
    assert not router.server.metrics.kv_releases


@pytest.mark.parametrize("broken", [True, False])
async def test_a_release_that_fails_is_counted(harness, tmp_path, broken):
    """The worker breaks off, or takes the request after all; the lease ends by itself."""
    router, decode, request = await _waiting_for_decode(harness, tmp_path)
    decode.script = [harness.answers.drop() if broken else decode.complete]
    request.cancel()
    await router.until(lambda: router.server.metrics.kv_releases == {"failed": 1})


async def test_the_router_waits_for_releases_when_it_stops(harness, tmp_path):
    """A message under way is not cut off."""
    router, decode, request = await _waiting_for_decode(harness, tmp_path)
    finish = asyncio.Event()

    async def slow(request, responder):
        await finish.wait()
        responder.send(404, UNKNOWN_MODEL)

    decode.script = [slow]
    request.cancel()
    await router.until(lambda: len(_releases(decode)) == 1)
    closing = asyncio.create_task(router.server.close())
    await asyncio.sleep(0)
    finish.set()
    await closing
    assert router.server.metrics.kv_releases == {"released": 1}


async def test_a_prompt_that_waited_too_long_for_decode_is_prefilled_again(harness, tmp_path):
    """Nobody renewed its lease meanwhile, so decode is not even asked to read it."""
    path = tmp_path / "llama.json"
    router, pair, request = await harness.prefilled_without_decode(path)
    await router.until(lambda: len(router.server.core.queues[Role.DECODE]) == 1)
    router.server._transfers._lease_s = 1e-9
    pair[1].script = [_refuse(harness)]
    harness.write_state(path, pair)
    assert (await request).status == 200
    assert _releases(pair[1]) == [harness.params]
    assert await router.metric("penstock_router_retries_total", reason="lease_expired") == 1
