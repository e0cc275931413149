"""One wrong worker of two: nothing is lost that a retry could save, and the worker is ejected and named."""

import asyncio
import itertools
import logging
import random

import orjson
import pytest
from fake_workers import Answers
from router_harness import error_of

from penstock.api import BreakerConfig, Role
from penstock.router.core.breaker import CircuitBreaker
from penstock.router.core.retries import KvTransfer, end_at_fault
from penstock.router.core.worker import Worker, WorkerSpec

REQUESTS, AT_ONCE = 120, 16
HTML = b"<html><body>It works!</body></html>"
KV_LOST = b'{"error":{"message":"gone","type":"InternalServerError","param":null,"code":500}}'
NO_MODEL = b'{"error":{"message":"The model `llama` does not exist.","type":"NotFoundError","code":404}}'


def _failing(worker, error, is_poison):
    """Answer 500 with an error where a body is poison, and right elsewhere."""

    async def handler(request, responder):
        if is_poison(orjson.loads(request.body)):
            responder.send(500, error)
        else:
            await worker.complete(request, responder)

    return handler


WRONG = {
    "200 with HTML": (Answers.status(200, HTML, content_type="text/html"), "text/html"),
    "200 with other JSON": (Answers.status(200, b'{"status":"ok"}'), ""),
    "302": (Answers.status(302, b""), "302"),
    "status 999": (Answers.status(999, HTML, content_type="text/html"), "999"),
    "404 for the model": (Answers.status(404, NO_MODEL), "does not serve the model llama"),
    "401 that no client caused": (Answers.status(401, b'{"error":"Unauthorized"}'), "401"),
    "400 with HTML": (Answers.status(400, HTML, content_type="text/html"), "400 without an error object"),
    "500": (Answers.status(500, b'{"error":{"message":"boom","code":500}}'), "500"),
    "503": (Answers.status(503, HTML, content_type="text/html"), "503"),
    "broken connection": (Answers.drop(), "closed"),
}
WRONG_STREAMS = {
    "error event": (Answers.stream(b"data: " + KV_LOST + b"\n\n", b"data: [DONE]\n\n"), ""),
    "error event of no transfer": (Answers.stream(b'data: {"error":"no"}\n\n'), "500"),
    "events of another API": (Answers.stream(b'data: {"type":"message_start"}\n\n'), "not a chunk"),
    "end at once": (Answers.stream(b"data: [DONE]\n\n"), "not JSON"),
}
CASES = [
    *((role, kind) for role in ("prefill", "decode", "aggregated") for kind in WRONG),
    *((role, kind) for role in ("decode", "aggregated") for kind in WRONG_STREAMS),
]


async def _statuses(router, *, stream, requests=REQUESTS, first=0):
    """Send many requests, some at a time; return (status, whether the answer is whole) of each."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number):
        async with room:
            answer = await router.post(prompt=f"{number} is the prompt", stream=stream, max_tokens=2)
            whole = answer.body.endswith(b"data: [DONE]\n\n") if stream else b'"xx"' in answer.body
            return answer.status, whole

    return await asyncio.gather(*(one(number) for number in range(first, first + requests)))


async def _fleet(harness, role, handler, **config):
    """A router before two workers of ``role``, of which one is wrong, and one of the other role, if there is one.

    Returns:
        The router, the wrong worker and the right one.
    """
    wrong, right = await harness.worker(role), await harness.worker(role)
    wrong.otherwise = handler
    others = {"prefill": ["decode"], "decode": ["prefill"], "aggregated": []}[role]
    router = await harness.router(
        wrong,
        right,
        *[await harness.worker(each) for each in others],
        config={"policy": "least-loaded", "breaker": {"openSeconds": 600}, **config},
    )
    return router, wrong, right


@pytest.mark.parametrize(("role", "kind"), CASES)
async def test_a_wrong_worker_costs_no_request(harness, role, kind, caplog):
    """120 requests, 0 lost; the log and /workers name worker and cause, and few requests have gone there."""
    caplog.set_level(logging.WARNING)
    handler, cause = (WRONG | WRONG_STREAMS)[kind]
    router, wrong, _ = await _fleet(harness, role, handler)

    answers = await _statuses(router, stream=role != "prefill")

    assert answers == [(200, True)] * REQUESTS
    shown = (await router.workers())[wrong.name]
    assert shown["state"] == "circuit_open"
    assert cause in shown["reason"]
    (ejected,) = [each.keys for each in caplog.records if each.getMessage() == "worker ejected"]
    assert (ejected["worker"], ejected["role"]) == (wrong.name, role)
    assert cause in ejected["cause"]
    assert len(wrong.seen) <= 2 * AT_ONCE
    labels = {"role": role, "worker": wrong.name}
    assert await router.metric("penstock_router_worker_ejections_total", **labels) == 1


@pytest.mark.parametrize("kind", ["200 with HTML", "302", "404 for the model", "500"])
async def test_whole_answers_and_prefix_policies_lose_nothing_either(harness, kind):
    """The default policy sends equal prompts to one worker; a retry leaves it."""
    router, *_ = await _fleet(harness, "aggregated", WRONG[kind][0], policy="prefix-cost")

    assert await _statuses(router, stream=False) == [(200, True)] * REQUESTS


async def test_a_failure_that_follows_the_request_opens_no_circuit(harness):
    """A request that two workers answer by 500 is the request's fault: others are served, and it is counted apart."""
    config = {"policy": "least-loaded", "retries": {"minPerSecond": 1000}}
    *workers, router = await harness.served("aggregated", "aggregated", config=config)
    boom = b'{"error":{"message":"boom","type":"InternalServerError","code":500}}'
    for each in workers:
        each.otherwise = _failing(each, boom, lambda body: "best_of" in body)

    for _ in range(4):
        poison = await asyncio.gather(*(router.post(best_of=[]) for _ in range(20)))
        assert {(each.status, error_of(each)["message"]) for each in poison} == {(500, "boom")}
        assert {each.breaker.failures for each in router.server.core.pool} == {0}
    assert await _statuses(router, stream=True) == [(200, True)] * REQUESTS

    assert {each["state"] for each in (await router.workers()).values()} == {"ready"}
    assert await router.metric("penstock_router_errors_total", reason="request_fault") == 80


@pytest.mark.parametrize(
    ("status", "body", "expected", "message"),
    [
        (500, HTML, 502, "the worker answered 500"),
        (503, b"", 503, "the worker answered 503"),
        (413, HTML, 413, "the worker answered 413"),
        (500, b'{"error":{"message":"boom"}}', 500, "boom"),
        (
            400,
            b'{"detail":"There was an error parsing the body"}',
            400,
            "There was an error parsing the body",
        ),
        (400, b'{"object":"error","message":"too long","code":400}', 400, "too long"),
        (422, b'{"detail":[{"loc":["body"]}]}', 422, "the worker answered 422"),
        (999, HTML, 502, "the worker broke off before its answer was complete"),
        (204, b"", 502, "the worker's answer is not one of this model; GET /workers names it"),
        (
            400,
            b'{"error":{"message":"m","type":"BadRequestError","param":"p","code":400}}',
            400,
            {"message": "m", "type": "invalid_request_error", "param": "p", "code": "upstream_4xx"},
        ),
        (
            429,
            b'{"error":{"message":"full","type":"x","code":"queue_full"}}',
            429,
            {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"},
        ),
    ],
)
async def test_errors_have_one_shape(harness, status, body, expected, message):
    """Whatever the worker wrote: an error in OpenAI's words, not vLLM's class names, and a status that exists."""
    worker, router = await harness.served("aggregated")
    worker.otherwise = Answers.status(status, body, content_type="text/html")

    answer = await router.post()

    error = orjson.loads(answer.body)["error"]
    assert (answer.status, error if isinstance(message, dict) else error["message"]) == (expected, message)
    assert answer.headers[b"content-type"] == b"application/json"


async def test_a_lost_prefill_worker_is_not_decodes_fault(harness):
    """Of the two ends of a lost KV transfer, the one that other transfers have reached since is sound."""
    roles = ("prefill", "prefill", "decode", "decode")
    bad, good, *decodes, router = await harness.served(*roles, config={"policy": "least-loaded"})

    async def prefill_badly(request, responder):
        params = {**harness.params, "remote_engine_id": "bad"}
        responder.send(200, orjson.dumps({"choices": [], "kv_transfer_params": params}))

    bad.otherwise = prefill_badly
    for each in decodes:
        each.otherwise = _failing(
            each, KV_LOST, lambda body: body["kv_transfer_params"]["remote_engine_id"] == "bad"
        )

    assert await _statuses(router, stream=True) == [(200, True)] * REQUESTS

    shown = await router.workers()
    assert [shown[each.name]["state"] for each in (bad, good, *decodes)] == ["circuit_open", *["ready"] * 3]
    assert "KV transfers in a row were lost" in shown[bad.name]["reason"]


async def test_transfers_lost_by_the_request_are_no_workers_fault(harness):
    """A decode worker's 500 after a transfer may be the request's doing: only one that is served later proves more."""
    config = {"policy": "least-loaded", "retries": {"minPerSecond": 1000}}
    *workers, router = await harness.served("prefill", "prefill", "decode", "decode", config=config)
    for each in workers[2:]:
        each.otherwise = _failing(each, KV_LOST, lambda body: "best_of" in body)

    poison = await asyncio.gather(*(router.post(best_of=[]) for _ in range(40)))

    assert {each.status for each in poison} == {500}
    assert {each["state"] for each in (await router.workers()).values()} == {"ready"}
    assert await _statuses(router, stream=True) == [(200, True)] * REQUESTS
    assert {each["state"] for each in (await router.workers()).values()} == {"ready"}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_workers_answer_no_slot_is_lost_and_all_serve_again(harness, seed):
    """Wrong and right answers in any order: each request gets one, counters return to zero, circuits close."""
    choose = random.Random(seed)
    workers = [await harness.worker(role) for role in ("prefill", "prefill", "decode", "decode")]

    def moody(worker):
        kinds = WRONG if worker.role == "prefill" else WRONG | WRONG_STREAMS

        async def handler(request, responder):
            kind = choose.choice(sorted(kinds))
            await (worker.complete if choose.random() < 0.5 else kinds[kind][0])(request, responder)

        return handler

    for each in workers:
        each.otherwise = moody(each)
    breaker = {"consecutiveFailures": 2, "openSeconds": 1, "maxOpenSeconds": 2}
    policy = ("prefix-cost", "least-loaded")[seed % 2]
    router = await harness.router(*workers, config={"policy": policy, "breaker": breaker}, speed=50)
    answers = await _statuses(router, stream=True, requests=100)
    assert {status for status, _ in answers} <= {200, 400, 401, 404, 500, 502, 503}
    assert all(whole for status, whole in answers if status == 200)
    await router.assert_idle()

    for each in workers:
        each.otherwise = each.complete
    for number in itertools.count():
        if not any(each.is_failing for each in router.server.core.pool):
            break
        assert number < 1000
        assert (await router.post(prompt=f"{number} probes", stream=True)).status == 200
    # Those that broke two workers off stay refused.
    assert await _statuses(router, stream=True, requests=100, first=100) == [(200, True)] * 100


@pytest.mark.parametrize(
    ("arrived", "losses", "fault"),
    [
        ("pe", (9, 0), "d"),
        ("qd", (0, 9), "p"),
        ("qe", (6, 5), "p"),
        ("qe", (5, 6), "d"),
        ("qe", (5, 5), None),
        ("pd", (9, 9), None),
    ],
)
def test_the_end_that_is_not_shared_lost_the_transfer(arrived, losses, fault):
    """From p to d it was lost, and the same request's next one arrived; with no shared end the losses so far tell."""
    workers = {
        name: Worker(WorkerSpec(name, Role.DECODE, "http://x"), CircuitBreaker(BreakerConfig()))
        for name in "pqde"
    }
    workers["p"].lost_transfers, workers["d"].lost_transfers = losses
    lost, next_one = (KvTransfer(*(workers[name] for name in ends)) for ends in ("pd", arrived))

    found = end_at_fault(lost, next_one)

    assert (found and found.name) == fault
