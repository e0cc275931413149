"""Hand-overs whose lease may have run out, and those whose KV a vLLM worker could not fetch."""

import orjson
import pytest

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
async def test_text_from_an_expired_hand_over_is_not_passed_on(harness, stream):
    """The prompt is prefilled again, and the second decode's text is what the client gets."""
    prefill, decode, router = await harness.served("prefill", "decode", lease_s=LEASE_S)
    wrong = harness.answers.stream(TOKEN.replace(b"right", b"wrong"), harness.done)
    decode.script.append(_expire(prefill, wrong if stream else decode.complete))

    answer = await router.post(max_tokens=2, stream=stream)

    assert answer.status == 200
    assert b"wrong" not in answer.body
    assert (len(prefill.seen), len(decode.seen)) == (2, 2)
    first, second = (seen.body["cache_salt"] for seen in decode.seen)
    assert first != second
    assert await router.metric("penstock_router_retries_total", reason="lease_expired") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_late_answer_is_trusted_while_no_lease_has_expired(harness, stream):
    """Heartbeats keep leases alive for as long as decode needs."""
    prefill, decode, router = await harness.served("prefill", "decode", lease_s=LEASE_S)

    answer = await router.post(max_tokens=2, stream=stream)

    assert answer.status == 200
    assert (len(prefill.seen), len(decode.seen)) == (1, 1)


async def test_a_busy_prefill_workers_page_is_waited_for(harness):
    """Longer than a health check waits: what would follow is the whole prefill once more."""
    prefill, decode = await harness.pair()
    config = {"health": {"timeoutRealSeconds": 0.2}}
    router = await harness.router(prefill, decode, lease_s=LEASE_S, config=config)
    prefill.page_delay_s = 0.4

    assert (await router.post(max_tokens=2)).status == 200
    assert len(prefill.seen) == 1


async def test_expiries_within_the_lease_are_other_requests(harness):
    """A lease of a minute cannot have run out yet."""
    prefill, decode, router = await harness.served("prefill", "decode", lease_s=60.0)
    decode.script.append(_expire(prefill, decode.complete))

    assert (await router.post()).status == 200
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


@pytest.mark.parametrize("opening", [(), (ROLE,)])
async def test_an_error_before_the_first_token_is_prefilled_again(harness, opening):
    """A vLLM says so in a stream of status 200, after the role in a chat; the client sees only what follows."""
    prefill, decode, router = await harness.served("prefill", "decode")
    decode.script += [
        harness.answers.stream(*opening, b"data: " + VLLM_ERROR + b"\n\n", harness.done),
        harness.answers.stream(ROLE, TOKEN, harness.done),
    ]

    answer = await router.post(stream=True)

    assert answer.body == ROLE + TOKEN + harness.done
    assert len(prefill.seen) == 2
    assert await router.metric("penstock_router_retries_total", reason="kv_lost") == 1


async def test_a_refused_parameter_in_a_stream_is_not_tried_again(harness):
    """A 4xx is the client's, wherever it stands."""
    _, decode, router = await harness.served("prefill", "decode")
    decode.script.append(harness.answers.stream(b"data: " + VLLM_ERROR.replace(b"500", b"400") + b"\n\n"))

    assert (await router.post(stream=True)).status == 400
    assert len(decode.seen) == 1


async def test_vllms_500_after_a_hand_over_is_prefilled_again(harness):
    """Whole answers say it by their status; the decode worker's circuit is not charged."""
    prefill, decode, router = await harness.served(
        "prefill", "decode", config={"breaker": {"consecutiveFailures": 1}}
    )
    decode.script.append(harness.answers.status(500, VLLM_ERROR))

    assert (await router.post()).status == 200
    assert len(prefill.seen) == 2
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
        b": keep\n\n" * (1 << 20),
    ],
)
async def test_a_stream_that_begins_with_no_chunk_is_no_answer(harness, first):
    """The client sees nothing of it: 502 where there is no other worker."""
    _, decode, router = await harness.served("prefill", "decode")
    decode.otherwise = harness.answers.stream(first)

    answer = await router.post(stream=True)

    assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (502, "upstream_wrong_answer")
