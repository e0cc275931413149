"""What refers to an earlier response reaches the worker that has it, or is refused in words."""

import pytest
from router_harness import error_of


async def _response(_, responder):
    responder.send(200, b'{"id":"resp_1","output":[],"usage":{"input_tokens":3,"output_tokens":1}}')


async def test_the_only_worker_has_every_response(harness):
    """The reference goes to it as it is; in a split graph decode answers the Responses API alone."""
    _, decode, router = await harness.served("prefill", "decode")
    decode.otherwise = _response
    answer = await router.post("/v1/responses", input="and then?", previous_response_id="resp_1")
    assert answer.status == 200
    assert decode.seen[0].body["previous_response_id"] == "resp_1"


async def test_one_of_several_workers_cannot_be_guessed(harness):
    """One that has not the response would answer 404, or its client would get an answer to half a conversation."""
    first, second, router = await harness.served("aggregated", "aggregated")
    answer = await router.post("/v1/responses", input="and then?", previous_response_id="resp_1")
    error = error_of(answer)
    assert (answer.status, error["code"]) == (400, "responses_not_kept")
    assert "this graph has 2 that may be it; send the whole conversation as input" in error["message"]
    assert not first.seen
    assert not second.seen
    first.otherwise = second.otherwise = _response
    assert (await router.post("/v1/responses", input="x", previous_response_id=None)).status == 200


async def test_an_answer_that_could_only_be_fetched_is_not_computed(harness):
    """A background response costs a GPU for what no client would read."""
    worker, router = await harness.served("aggregated")
    answer = await router.post("/v1/responses", input="x", background=True)
    assert (answer.status, error_of(answer)["code"]) == (400, "responses_not_kept")
    assert not worker.seen


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ],
)
async def test_kept_responses_are_refused_in_words(harness, method, path):
    """The client reads what to do instead, with its key alone."""
    _, router = await harness.served("aggregated", api_keys=frozenset({b"sk-1"}))
    keyless = await router.client.request(method, router.url + path)
    assert keyless.status == 401
    key = ((b"authorization", b"Bearer sk-1"),)
    answer = await router.client.request(method, router.url + path, headers=key)
    assert (answer.status, error_of(answer)["code"]) == (404, "responses_not_kept")
    assert "keep the answer of POST /v1/responses" in error_of(answer)["message"]
    assert await router.metric("penstock_router_requests_total", endpoint="responses", code="404") == 1
