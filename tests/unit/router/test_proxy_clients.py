"""Clients: those that leave, those that read slowly, those that must wait, those without a key."""

import asyncio
import logging
import random
import re
import socket
import struct

import orjson
import pytest
from router_harness import error_of

from penstock.api import GraphSpec

JSON_TYPE = (b"content-type", b"application/json")


async def _taken(harness, *, speed=1.0, **queue):
    """A router whose only prefill worker is busy with a request until that is cancelled.

    Returns:
        The router, the prefill worker and the request.
    """
    config = {"prefillQueue": {"workerTokens": 1, **queue}}
    prefill, _, router = await harness.served("prefill", "decode", config=config, speed=speed)
    return router, prefill, await router.hanging(prefill)


@pytest.mark.parametrize("stage", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_cancels_its_worker(harness, stage):
    """In both stages, and in mid-stream, the worker's connection is closed, and every counter returns to zero."""
    prefill, decode, router = await harness.served("prefill", "decode")
    worker = prefill if stage == "prefill" else decode
    if stage == "stream":
        worker.hold_stream()
        stream = await router.begun_stream()
        stream.abort()
    else:
        (await router.hanging(worker)).cancel()

    await router.until(lambda: worker.disconnects == 1)
    await router.assert_idle()
    assert await router.metric("penstock_router_requests_total", endpoint="completions", code="499") == 1
    assert await router.metric("penstock_router_errors_total", reason="client_left") == 1


async def test_a_client_that_closes_at_done_has_its_whole_answer(harness):
    """Many close there, before the body ends: a 200 with its latency, which counts for the worker, and no 499."""
    worker = await harness.worker("aggregated")
    end = asyncio.Event()

    async def dawdle_after_done(request, responder):
        responder.start(200)
        responder.write(harness.token_event(0) + harness.done)
        await end.wait()
        responder.end()

    worker.script = [dawdle_after_done]
    router = await harness.router(worker)
    stream = await router.stream()
    while not (await anext(stream)).endswith(harness.done):
        pass

    stream.abort()
    await router.until(lambda: worker.disconnects == 1)

    await router.assert_idle()
    counts = router.server.metrics
    assert dict(counts.requests) == {("completions", 200): 1}
    assert not counts.errors
    assert await router.metric("penstock_router_e2e_request_latency_seconds_count", model_name="llama") == 1
    assert await router.metric("penstock_router_generation_tokens_total", model_name="llama") == 1
    assert router.server.core.pool.get(worker.name).failures == 0
    end.set()


async def test_a_slow_client_pauses_its_worker(harness):
    """The router holds no more than its buffers; what the client reads later is complete."""
    worker = await harness.worker("aggregated")
    sent = 0
    total = 500
    chunk = b'data: {"choices":[{"index":0,"text":"' + b"x" * 65_536 + b'"}]}\n\n'

    async def flood(request, responder):
        nonlocal sent
        room = asyncio.Event()
        room.set()
        responder.on_pause(room.clear)
        responder.on_resume(room.set)
        responder.start(200)
        for _ in range(total):
            responder.write(chunk)
            sent += 1
            await room.wait()
        responder.write(harness.done)
        responder.end()

    worker.script = [flood]
    router = await harness.router(worker)
    stream = await router.stream()
    stream.pause()
    seen = -1
    while seen != sent:
        seen = sent
        await asyncio.sleep(0.1)

    # The kernel holds some megabytes on each of the two hops; the router adds its own two small buffers.
    assert sent < total - 100
    stream.resume()
    body = await stream.read(limit_bytes=(total + 1) * len(chunk))
    assert body == chunk * total + harness.done


async def test_the_prefill_queue_holds_what_workers_cannot_take(harness):
    """One request per slot goes to the worker, the others wait, and the queue's numbers show it."""
    router, prefill, first = await _taken(harness)
    others = [asyncio.create_task(router.post(prompt="x" * 40)) for _ in range(3)]
    await router.until(lambda: len(router.server.core.entry_queue) == 3)

    queue = orjson.loads((await router.get("/workers")).body)["prefill_queue"]
    assert (queue["requests"], queue["tokens"]) == (3, 30)
    assert queue["oldest_s"] >= 0
    assert await router.metric("penstock_router_prefill_queue_requests", model_name="llama") == 3
    assert await router.metric("penstock_router_prefill_queue_tokens", model_name="llama") == 30
    assert len(prefill.seen) == 1
    first.cancel()
    assert [answer.status for answer in await asyncio.gather(*others)] == [200] * 3


async def test_a_full_queue_refuses(harness):
    """429 with Retry-After, and not ready; the waiting ones are not disturbed."""
    router, _, first = await _taken(harness, maxRequests=1)
    waiter = asyncio.create_task(router.post())
    await router.until(lambda: len(router.server.core.entry_queue) == 1)

    refused = await router.post()

    assert (refused.status, error_of(refused)["code"]) == (429, "queue_full")
    assert int(refused.headers[b"retry-after"]) >= 1
    assert (await router.get("/ready")).status == 503
    first.cancel()
    assert (await waiter).status == 200
    assert await router.metric("penstock_router_errors_total", reason="queue_full") == 1


@pytest.mark.parametrize("speed", [1.0, 20.0])
async def test_waits_are_bounded(harness, speed):
    """503 with Retry-After once the longest wait is over, in the client's own seconds, which at speed 20 are a twentieth."""
    router, _, first = await _taken(harness, maxWaitSeconds=0.1 * speed, speed=speed)

    refused = await router.post()

    assert (refused.status, error_of(refused)["code"]) == (503, "queue_timeout")
    assert int(refused.headers[b"retry-after"]) >= 1
    assert 0.1 <= float(re.search(r"within ([0-9.]+) s", error_of(refused)["message"])[1]) < 1.0
    assert await router.metric("penstock_router_queue_timeouts_total", model_name="llama") == 1
    assert await router.metric("penstock_router_refused_requests_total", model_name="llama") == 0
    first.cancel()


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/nowhere", "GET", 404, "not_found"),
        ("/v1/completions", "GET", 405, "method_not_allowed"),
        ("/v1/models", "POST", 405, "method_not_allowed"),
        ("/metrics", "POST", 405, "method_not_allowed"),
        ("/v1/models/other", "GET", 404, "model_not_found"),
        ("/workers/x/drain", "POST", 404, "worker_not_found"),
        ("/workers/x/explode", "POST", 404, "not_found"),
        ("/workers/aggregated-0/drain", "GET", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_served_is_said(harness, path, method, status, code):
    """An OpenAI-style error with a code, whatever the path."""
    router = await harness.router(await harness.worker("aggregated"))

    answer = await harness.client.request(method, router.url + path)

    assert (answer.status, error_of(answer)["code"]) == (status, code)
    allowed = {"/v1/completions": b"POST", "/workers/aggregated-0/drain": b"POST"}.get(path, b"GET, HEAD")
    assert answer.headers.get(b"allow") == (allowed if status == 405 else None)


async def test_a_request_without_a_key_is_refused_before_its_body(harness):
    """It is answered from its head, and nothing of its body is kept; with the key it is served."""
    router = await harness.router(await harness.worker("aggregated"), api_keys=frozenset({b"key"}))
    reader, writer = await asyncio.open_connection("127.0.0.1", router.server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 9000)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"www-authenticate: Bearer" in head
    assert router.server._http.intake.buffered_bytes == 0
    writer.close()
    assert (await router.post(headers=(JSON_TYPE, (b"authorization", b"Bearer key")))).status == 200


@pytest.mark.parametrize(
    ("raw", "headers", "status", "code"),
    [
        (b"{", (JSON_TYPE,), 400, "invalid_json"),
        (b"{}", (), 415, "unsupported_media_type"),
        (b"{}", (JSON_TYPE, (b"content-encoding", b"br")), 415, "unsupported_media_type"),
        (b'{"model":"x","prompt":"x"}', (JSON_TYPE,), 404, "model_not_found"),
        (b" " * 5000, (JSON_TYPE,), 413, "body_too_large"),
        (b"{}", (JSON_TYPE, (b"x-long", b"x" * 5000)), 431, "headers_too_large"),
    ],
)
async def test_bad_requests_never_reach_a_worker(harness, raw, headers, status, code):
    """Each is answered by the router, with a body that clients understand."""
    limits = {"maxBodyBytes": 4096, "maxHeaderBytes": 4096}
    worker, router = await harness.served("aggregated", config={"limits": limits})

    answer = await router.post(raw=raw, headers=headers)

    assert (answer.status, error_of(answer)["code"]) == (status, code)
    assert worker.seen == []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"Bearer right", 200),
        (b"bearer other", 200),
        (b"Bearer wrong", 401),
        (b"Bearer ", 401),
        (b"Basic right", 401),
        (b"right", 401),
        (None, 401),
    ],
)
async def test_keys_are_asked_for(harness, sent, status):
    """Any of the keys opens completions and models; the worker never sees it."""
    worker, router = await harness.served("aggregated", api_keys=frozenset({b"right", b"other"}))
    headers = (JSON_TYPE, *(((b"authorization", sent),) if sent is not None else ()))

    answers = [
        await router.post(headers=headers),
        await harness.client.request("GET", router.url + "/v1/models", headers=headers),
    ]

    assert [answer.status for answer in answers] == [status] * 2
    if status == 401:
        assert {error_of(answer)["code"] for answer in answers} == {"invalid_api_key"}
        assert answers[0].headers[b"www-authenticate"] == b"Bearer"
    assert all(b"authorization" not in seen.headers for seen in worker.seen)
    for open_path in ("/health", "/ready", "/metrics", "/workers"):
        assert (await router.get(open_path)).status == 200


async def test_without_keys_of_its_own_the_router_is_transparent(harness):
    """The workers may ask for one; trace headers pass as well."""
    worker, router = await harness.served("aggregated")
    passed = (
        (b"authorization", b"Bearer theirs"),
        (b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"),
    )

    await router.post(headers=(JSON_TYPE, *passed, (b"cookie", b"private")))

    (seen,) = worker.seen
    assert all(seen.headers[name] == value for name, value in passed)
    assert b"cookie" not in seen.headers


async def test_models_are_listed(harness):
    """As a list and one by one."""
    services = {"frontend": {"role": "router"}, "workers": {"role": "aggregated"}}
    spec = {"model": {"name": "llama", "contextTokens": 16384}, "services": services}
    _, router = await harness.served("aggregated", graph=GraphSpec.model_validate(spec))

    (model,) = orjson.loads((await router.get("/v1/models")).body)["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("llama", "model", 16384)
    assert orjson.loads((await router.get("/v1/models/llama")).body) == model


async def test_prompts_are_in_no_log(harness, tmp_path, caplog):
    """Neither the access log nor the debug log holds what was said."""
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "access.log"
    *_, router = await harness.served("prefill", "decode", access_log=str(path))
    await router.post(prompt="secret words", max_tokens=5)
    await router.post(raw=b'{"model":"llama","prompt":"secret words"', headers=(JSON_TYPE,))
    await router.end()

    served, refused = map(orjson.loads, path.read_text().splitlines())
    assert "secret" not in path.read_text() + caplog.text
    assert (served["status"], refused["status"]) == (200, 400)
    for key, value in {
        "endpoint": "completions",
        "stream": False,
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "output_tokens": 5,
        "prefill_worker": "prefill-0",
        "worker": "decode-0",
        "retries": 0,
        "error": None,
    }.items():
        assert served[key] == value


RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close resets the connection."""


def completion(body):
    """Return a raw completion request."""
    content = orjson.dumps({"model": "llama", "prompt": "hello", **body})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


async def leave_early(port, request, turns):
    """Send a request, and reset its connection after this many turns of the event loop."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, request)
        for _ in range(turns):
            await asyncio.sleep(0)


async def test_clients_that_reset_early_leave_nothing(harness):
    """Hundreds of requests, reset at any turn of their way, leave no connection, no assignment and no queue."""
    rng = random.Random(1)
    worker, router = await harness.served("aggregated")
    answer, worker.otherwise = worker.otherwise, harness.answers.hang()  # each request needs a new connection
    pool = router.server.context.pool
    request = completion({"stream": True, "max_tokens": 3})
    for _ in range(8):
        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(leave_early(router.server.port, request, rng.randrange(30)))
    await router.until(lambda: not router.server._http.handlers)
    await router.until(lambda: pool.connections == pool.idle_connections)
    worker.otherwise = answer
    assert (await router.post(max_tokens=3)).status == 200
