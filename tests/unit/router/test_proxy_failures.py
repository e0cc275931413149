"""What goes wrong at workers: retries before the first byte, none after, and what clients are told."""

import asyncio

import orjson
import pytest
from router_harness import error_of

from penstock.core.errors import SaturatedError
from penstock.router.core.worker import Circuit


async def test_a_dead_worker_is_passed_over_and_left_alone(harness):
    """A refused connection is retried elsewhere, and nothing goes there until a health check succeeds."""
    alive, dead, router = await harness.served("aggregated", "aggregated", config={"policy": "round-robin"})
    await dead.server.close(grace_s=0)

    answers = [await router.post() for _ in range(4)]

    assert [answer.status for answer in answers] == [200] * 4
    assert len(alive.seen) == 4
    assert (await router.workers())["aggregated-1"]["state"] == "unhealthy"


async def test_a_router_without_files_for_connections_blames_no_worker(harness, monkeypatch, caplog):
    """Its own want is a 503 with Retry-After; neither circuits nor health checks count it."""
    worker, router = await harness.served("aggregated")

    async def saturated(*_, **__):
        raise SaturatedError("cannot open a connection: raise the process's limit of open files")

    pools = router.server.context
    with monkeypatch.context() as patch:
        for pool in (pools.pool, pools.probes):
            patch.setattr(pool, "stream", saturated)
        answers = [await router.post() for _ in range(8)]
        watched = router.server.core.pool.get(worker.name)
        for _ in range(5):
            await router.server._watch.check(watched)
    assert {(each.status, error_of(each)["code"]) for each in answers} == {(503, "router_saturated")}
    assert all(each.headers[b"retry-after"] for each in answers)
    assert "Traceback" not in caplog.text
    assert (watched.failed_checks, watched.health_problem) == (0, None)
    assert (await router.post()).status == 200


@pytest.mark.parametrize(
    ("stage", "sent", "seen"),
    [
        ("prefill", None, [2, 1]),
        ("decode", None, [2, 2]),
        # A worker sends the head of a stream at once.
        ("decode", b"", [2, 2]),
        # Of a complete answer that breaks the client has no byte yet.
        ("aggregated", b'{"choices":', [2]),
    ],
)
async def test_what_breaks_before_the_first_byte_is_retried(harness, stage, sent, seen):
    """On the same worker where there is no other."""
    roles = ["aggregated"] if stage == "aggregated" else ["prefill", "decode"]
    *workers, router = await harness.served(*roles)
    (broken,) = (each for each in workers if each.role == stage)
    data = [sent] if sent else []
    broken.script = [harness.answers.drop() if sent is None else harness.answers.stream(*data, broken=True)]

    answer = await router.post(stream=sent == b"")

    assert answer.status == 200
    assert answer.body.endswith(harness.done) is (sent == b"")
    assert [len(each.seen) for each in workers] == seen


ENDS = {"retries": {"maxContinuations": 0}}
"""A stream that broke continues nowhere; see test_stream_continuation for the others."""


@pytest.mark.parametrize("stage", ["decode", "aggregated"])
@pytest.mark.parametrize("end", [b"", b"data: {half an eve"])
@pytest.mark.parametrize("broken", [False, True])
async def test_a_stream_that_breaks_or_ends_without_done_is_never_retried(harness, stage, end, broken):
    """After the first byte, though it looks complete in HTTP: an error event of the router's own, then the end."""
    worker = await harness.worker(stage)
    others = [await harness.worker("prefill")] if stage == "decode" else []
    break_now = asyncio.Event()
    worker.script = [harness.answers.stream(harness.token_event(0), end, event=break_now, broken=broken)]
    router = await harness.router(worker, *others, config=ENDS)
    stream = await router.stream()
    received = await anext(stream)
    break_now.set()

    received += await router.broken(stream)

    first, *_, last, rest = received.split(b"\n\n")
    assert (first + b"\n\n", rest) == (harness.token_event(0), b"")
    assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
    assert (b"[DONE]" in received, len(worker.seen)) == (False, 1)
    assert broken or router.server.core.pool.get(worker.name).last_failure.endswith("without [DONE]")
    assert await router.metric("penstock_router_errors_total", reason="upstream_broken") == 1
    assert await router.metric("penstock_router_e2e_request_latency_seconds_count", model_name="llama") == 0


async def test_an_error_event_in_mid_stream_is_a_failure(harness):
    """The client sees it as the worker wrote it; the stream counts as broken, though [DONE] follows."""
    worker, router = await harness.served("aggregated", config=ENDS)
    error = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    token = harness.token_event(0)
    worker.script = [harness.answers.stream(token, token + error + harness.done)]

    assert (await router.post(stream=True)).body == token + token + error + harness.done
    assert router.server.core.pool.get(worker.name).last_failure == "ended a stream by an error event"
    assert await router.metric("penstock_router_errors_total", reason="upstream_broken") == 1
    assert await router.metric("penstock_router_e2e_request_latency_seconds_count", model_name="llama") == 0


async def test_what_breaks_after_done_breaks_nothing(harness):
    """The client has its whole answer, and the worker has given it."""
    worker, router = await harness.served("aggregated")
    worker.script = [harness.answers.stream(harness.token_event(0) + harness.done, broken=True)]

    assert (await router.post(stream=True)).body == harness.token_event(0) + harness.done
    assert router.server.core.pool.get(worker.name).failures == 0


async def test_retries_end(harness):
    """Two by default; then the worker's own answer is passed on, with Retry-After for 503."""
    worker, router = await harness.served("aggregated")
    worker.otherwise = harness.answers.status(503, headers=((b"retry-after", b"7"),))

    answer = await router.post()

    assert (answer.status, error_of(answer)["message"]) == (503, "worker says no")
    assert answer.headers[b"retry-after"] == b"7"
    assert len(worker.seen) == 3


@pytest.mark.parametrize(
    ("limits", "phase", "tries"),
    [({"firstByteTimeoutSeconds": 1}, "first_byte", 2), ({"requestTimeoutSeconds": 5}, "total", 1)],
)
async def test_a_time_out_is_retried_once(harness, limits, phase, tries):
    """Silent workers are not waited for a third time; a request's total limit leaves nothing to try again."""
    *workers, router = await harness.served(*["aggregated"] * 3, config={"limits": limits}, speed=10)
    for worker in workers:
        worker.otherwise = harness.answers.hang()

    answer = await router.post()

    assert (answer.status, error_of(answer)["code"]) == (504, f"upstream_timeout_{phase}")
    assert sum(len(worker.seen) for worker in workers) == tries


async def test_a_stream_that_falls_silent_is_ended(harness):
    """The idle limit breaks it off with an error event."""
    worker, router = await harness.served(
        "aggregated", config={"limits": {"idleTimeoutSeconds": 1}, **ENDS}, speed=10
    )
    worker.hold_stream()

    received = await router.broken(await router.stream())

    assert b"upstream_timeout_idle" in received
    await router.until(lambda: worker.disconnects == 1)


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_client_errors_pass_through_and_never_open_a_circuit(harness, status, stage):
    """A 4xx is the client's doing: the worker's answer as it is, no retry, circuits closed."""
    prefill, decode, router = await harness.served(
        "prefill", "decode", config={"breaker": {"consecutiveFailures": 2}}
    )
    worker = prefill if stage == "prefill" else decode
    worker.otherwise = harness.answers.status(status)

    for _ in range(4):
        answer = await router.post()
        assert (answer.status, error_of(answer)["message"]) == (status, "worker says no")

    assert len(worker.seen) == 4
    assert all(each.breaker.state(0) is Circuit.CLOSED for each in router.server.core.pool)
    assert await router.metric("penstock_router_errors_total", reason="upstream_4xx") == 4


async def test_an_only_workers_500_is_passed_on_and_opens_no_circuit(harness):
    """Without another worker nothing tells whether the request or the worker is at fault."""
    worker, router = await harness.served("aggregated")
    worker.otherwise = harness.answers.status(500)

    answers = [await router.post() for _ in range(6)]

    assert {(answer.status, error_of(answer)["message"]) for answer in answers} == {(500, "worker says no")}
    assert len(worker.seen) == 6
    assert (await router.workers())["aggregated-0"]["state"] == "ready"


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
async def test_while_the_only_circuit_is_open_requests_wait(harness, role):
    """None is refused: one probes the worker when its time is over, and the others follow its first token."""
    worker = await harness.worker(role)
    others = {"prefill": ["decode"], "decode": ["prefill"], "aggregated": []}[role]
    worker.script = [harness.answers.drop()] * 2
    config = {
        "breaker": {"consecutiveFailures": 2, "openSeconds": 2},
        "retries": {"maxPerRequest": 1},
    }
    router = await harness.router(
        worker, *[await harness.worker(each) for each in others], config=config, speed=10
    )
    assert (await router.post()).status == 502
    assert (await router.workers())[worker.name]["state"] == "circuit_open"
    seen = len(worker.seen)
    hold = worker.hold_stream() if role != "prefill" else asyncio.Event()
    waiting = [asyncio.create_task(router.post(stream=True, max_tokens=1)) for _ in range(5)]
    await router.until(lambda: len(worker.seen) == seen + 5)
    hold.set()

    assert [(await each).status for each in waiting] == [200] * 5
    assert (await router.workers())[worker.name]["state"] == "ready"


async def test_without_workers_requests_are_refused_at_once(harness):
    """503 with Retry-After, and /ready tells why."""
    harness.statefile.write_text("{}")
    router = await harness.router(statefile=harness.statefile, ready=False)

    answer = await router.post()
    ready = await router.get("/ready")

    assert (answer.status, error_of(answer)["code"]) == (503, "no_worker")
    assert int(answer.headers[b"retry-after"]) >= 1
    assert ready.status == 503
    assert any("prefill" in reason for reason in orjson.loads(ready.body)["reasons"])


async def test_a_broken_stream_ends_its_connection_and_no_other_request(harness):
    """It does not come to its end in HTTP, so a pooled client takes a new connection and meets no reset."""
    worker, router = await harness.served("aggregated", config=ENDS)
    break_now = asyncio.Event()
    worker.script = [harness.answers.stream(harness.token_event(0), event=break_now, broken=True)]
    stream = await router.stream()
    break_now.set()
    await router.broken(stream)

    assert router.client.connections == 0
    assert (await router.post()).status == 200


DEEP = b'{"model":"llama","prompt":"x","vllm_xargs":' + b'{"a":' * 300 + b"1" + b"}" * 301


@pytest.mark.parametrize("policy", ["prefix-cost", "least-loaded"])
async def test_a_request_that_cannot_be_passed_on_takes_no_worker_away(harness, policy):
    """JSON that can be read and not written is a 400, and the prefill worker has room for the next request."""
    config = {"policy": policy, "prefillQueue": {"workerTokens": 1, "maxWaitSeconds": 1}}
    *_, router = await harness.served("prefill", "decode", config=config)

    refused = await router.post(raw=DEEP)

    assert (refused.status, error_of(refused)["code"]) == (400, "body_too_deep")
    await router.assert_idle()
    assert (await router.post()).status == 200


async def test_a_failure_is_logged_once_under_its_request_id(harness, caplog):
    """Every line of a request names it, the router's own last word too; a rejection is not a failure."""
    worker, router = await harness.served("aggregated", config={"retries": {"maxPerRequest": 1}})
    for number in (b"mine-1", b"mine-2"):
        worker.script = [harness.answers.drop()] * 2
        answer = await router.post(
            headers=((b"content-type", b"application/json"), (b"x-request-id", number))
        )
        assert (answer.status, answer.headers[b"x-request-id"]) == (502, number)
    worker.script = [harness.answers.status(400)]
    await router.post()
    lines = [each for each in caplog.records if each.message == "request failed"]
    assert [each.keys["request_id"] for each in lines] == ["mine-1", "mine-2"]
    assert (lines[0].keys["error"], lines[0].keys["worker"]) == ("upstream_broken", worker.name)
