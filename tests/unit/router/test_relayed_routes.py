"""Routes that one worker answers without new tokens: tokenizer, embeddings, rerank, score, pooling, classify."""

import asyncio

import orjson
import pytest
from router_harness import error_of

from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.routes import PATHS

RELAYED = [path for path, endpoint in PATHS.items() if endpoint.is_relayed]
OF_TOKENIZER = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}


def _answering(answer):
    async def handler(_, responder):
        responder.send(200, orjson.dumps(answer))

    return handler


@pytest.mark.parametrize("path", RELAYED)
async def test_one_worker_answers_each_route_and_it_is_counted(harness, path):
    """The body and the answer pass through; a split graph sends it to decode alone, and prefill sees nothing of it."""
    prefill, decode, router = await harness.served("prefill", "decode")
    decode.otherwise = _answering({"data": [[0.25]], "usage": {"prompt_tokens": 7, "completion_tokens": 0}})
    answer = await router.post(path, input="three words here", dimensions=8)
    assert (answer.status, orjson.loads(answer.body)["data"]) == (200, [[0.25]])
    assert [each.path for each in decode.seen] == [path]
    assert decode.seen[0].body["dimensions"] == 8
    assert not prefill.seen
    assert await router.metric("penstock_router_requests_total", endpoint=PATHS[path], code="200") == 1
    is_load = path not in OF_TOKENIZER
    assert router.server.metrics.arrivals == router.server.metrics.completed == is_load
    assert router.server.metrics.prompt_tokens == 7 * is_load


@pytest.mark.parametrize("answer", [(404, b'{"detail":"Not Found"}'), (405, b"no"), (404, b"<html>")])
async def test_a_route_that_the_workers_lack_is_refused_with_a_list(harness, answer):
    """Nothing is tried again for it, and no worker is charged: it serves its model well."""
    first, second, router = await harness.served("aggregated", "aggregated")
    for each in (first, second):
        each.otherwise = harness.answers.status(*answer)
    refused = await router.post("/v1/embeddings", input="x")
    error = error_of(refused)
    assert (refused.status, error["code"]) == (answer[0], "not_served")
    assert error["message"].startswith("path: the workers of this model do not serve /v1/embeddings")
    assert "/v1/chat/completions, " in error["message"]
    assert "/tokenize" in error["message"]
    assert len(first.seen) + len(second.seen) == 1
    assert {each["state"] for each in (await router.workers()).values()} == {"ready"}


async def test_an_api_that_the_model_lacks_costs_no_worker_its_place(harness):
    """VLLM answers 501 to it, which a client could send repeatedly."""
    worker, router = await harness.served("aggregated")
    worker.otherwise = harness.answers.status(501, b'{"error":{"message":"The model has no Score API"}}')
    for _ in range(12):
        refused = await router.post("/score", text_1="a", text_2="b")
        assert (refused.status, error_of(refused)["message"]) == (501, "The model has no Score API")
    assert len(worker.seen) == 12


async def test_limits_hold_for_relayed_requests(harness):
    """They wait in the queue, and are turned away where completions would be."""
    config = {"prefillQueue": {"maxRequests": 1, "workerTokens": 1}}
    worker, router = await harness.served("aggregated", config=config)
    held = worker.hold(_answering({"data": []}))
    tasks = [asyncio.create_task(router.post("/v1/embeddings", input="x")) for _ in range(2)]
    queue = router.server.core.entry_queue
    await router.until(lambda: len(queue) == 1)
    refused = await router.post("/v1/embeddings", input="x")
    assert (refused.status, error_of(refused)["code"]) == (429, "queue_full")
    worker.otherwise = _answering({"data": []})
    held.set()
    assert {each.status for each in await asyncio.gather(*tasks)} == {200}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "other"}, 404, "this router serves 'llama'"),
        ({"stream": True}, 400, "stream: /v1/embeddings has no streams"),
        ({"encoding_format": "bytes"}, 400, "ask for float or base64"),
    ],
)
async def test_what_cannot_be_relayed_is_refused_in_words(harness, body, status, words):
    """A name of another model, a stream, and an answer that is not JSON."""
    worker, router = await harness.served("aggregated")
    refused = await router.post("/v1/embeddings", input="x", **body)
    assert refused.status == status
    assert words in error_of(refused)["message"]
    assert not worker.seen


@pytest.mark.parametrize(
    ("path", "body", "size"),
    [
        ("/v1/embeddings", {"input": ["abcd", "ü"], "dimensions": 256}, (6, 0)),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, (0, 3)),
        ("/rerank", {"query": "abc", "documents": ["de", {"text": "f"}], "top_n": 2}, (6, 0)),
        ("/tokenize", {"prompt": "abc"}, (0, 0)),
    ],
)
def test_the_load_of_a_request_is_the_text_that_the_model_reads(path, body, size):
    """A tokenizer's requests load no engine; a request may leave the model out, as for vLLM."""
    raw = orjson.dumps(body)
    request = parse_completion(path, b"application/json", raw, model="llama")
    assert (request.prompt_bytes, request.prompt_ids) == size
    assert (request.raw, request.is_single) == (raw, False)
