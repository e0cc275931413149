"""The endpoint picker before a real Envoy, whose configuration is the sample's."""

import asyncio

import orjson
import pytest

pytest.importorskip("grpc", reason="needs penstock[gateway]")
pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2", reason="needs penstock[gateway]")

import grpc.aio
from envoy.config.core.v3.base_pb2 import Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from gateway_harness import CHAT, JSON, metadata_filter, needs_envoy

from penstock.api import Role
from penstock.core.errors import StreamBroken
from penstock.router.core.worker import WorkerSpec
from penstock.router.gateway import messages
from penstock.router.gateway.server import GatewayPicker
from penstock.router.settings import RouterSettings


def tell(*endpoints):
    """Return metadata with a subset hint."""
    found = Metadata()
    found.filter_metadata["envoy.lb.subset_hint"].update({messages.SUBSET: list(endpoints)})
    return found


def test_a_subset_is_a_list_or_a_text():
    """The protocol lists endpoints; some gateways write them into one text; an empty list is none at all."""
    assert messages.read_subset(Metadata()) is None
    assert messages.read_subset(tell()) == frozenset()
    assert messages.read_subset(tell("10.0.0.1:80", "10.0.0.2:80")) == {"10.0.0.1:80", "10.0.0.2:80"}
    text = Metadata()
    text.filter_metadata["envoy.lb.subset_hint"].update({messages.SUBSET: "10.0.0.1:80, [::1]:80"})
    assert messages.read_subset(text) == {"10.0.0.1:80", "[::1]:80"}


def test_endpoints_are_written_as_the_protocol_does():
    """Host and port, of IPv6 in brackets."""
    urls = {"http://10.0.0.1:8000": "10.0.0.1:8000", "http://[::1]:81": "[::1]:81", "http://a": "a:80"}
    assert {url: messages.endpoint_of(url) for url in urls} == urls


def test_a_long_body_goes_in_parts():
    """Each within the window of a stream; the last one ends it."""
    head, *parts = messages.picked("h:1", ((b"a", b"b"),), b"x" * 130_000)
    found = [each.request_body.response.body_mutation.streamed_response for each in parts]
    assert [len(each.body) for each in found] == [62_000, 62_000, 6_000]
    assert [each.end_of_stream for each in found] == [False, False, True]
    assert head.dynamic_metadata["envoy.lb"][messages.DESTINATION] == "h:1"
    *_, last, end = messages.picked("h:1", (), b"x", has_trailers=True)
    assert not last.request_body.response.body_mutation.streamed_response.end_of_stream
    assert end.WhichOneof("response") == "request_trailers"


@needs_envoy
async def test_a_chat_is_streamed_through_envoy(harness, served):
    """Tokens come as the worker makes them; the picker has counted them, and the worker is free afterwards."""
    worker, found = await served()
    more = worker.hold_stream()
    stream = await found.stream()
    assert (stream.status, await anext(stream)) == (200, harness.token_event(0))
    assert [each.inflight_requests for each in found.server.core.pool] == [1]
    more.set()
    assert await stream.read(limit_bytes=1000) == harness.done
    await found.assert_idle()
    metrics = found.server.metrics
    await found.until(lambda: metrics.completed == 1)
    assert metrics.requests["chat_completions", 200] == 1
    assert worker.seen[0].body == {**CHAT, "stream": True}


@needs_envoy
async def test_complete_answers_and_those_of_the_picker_alone(harness, served):
    """A complete answer is the worker's; models are listed and refusals made without any worker."""
    worker, found = await served(config={"limits": {"maxBodyBytes": 400_000}})
    answer = await found.post(max_tokens=2)
    assert (answer.status, orjson.loads(answer.body)["choices"][0]["text"]) == (200, "xx")
    assert answer.headers[b"x-request-id"]
    models = await harness.client.request("GET", found.url + "/v1/models")
    assert [each["id"] for each in orjson.loads(models.body)["data"]] == ["llama"]
    assert (await found.post(model="other")).status == 404
    for path in ("/sleep", "/metrics", f"/workers/{worker.name}/drain"):
        assert (await found.post(path)).status == 404
    assert (await harness.client.request("GET", found.url + "/v1/completions")).status == 405
    long = await found.post(messages=[{"role": "user", "content": "x" * 300_000}])
    assert (long.status, len(worker.seen)) == (200, 2)
    too_long = await found.post(messages=[{"role": "user", "content": "x" * 500_000}])
    assert (too_long.status, len(worker.seen)) == (413, 2)


@needs_envoy
async def test_prefill_is_computed_before_the_decode_worker_is_named(harness, gateway):
    """The gateway knows decode workers alone; they get the parameters of the KV transfer, clients the cached tokens."""
    prefill, decode = await harness.pair()
    found = await gateway(prefill, decode)
    answer = orjson.loads((await found.post("/v1/completions", prompt="Hello")).body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == prefill.cached_tokens
    assert prefill.seen[0].body["kv_transfer_params"]["do_remote_decode"]
    assert decode.seen[0].body["kv_transfer_params"]["remote_engine_id"] == "engine-1"
    stream = await found.stream(stream_options={"include_usage": True})
    assert (await stream.read(limit_bytes=10_000)).endswith(harness.done)
    assert (len(prefill.seen), len(decode.seen)) == (2, 2)


@needs_envoy
async def test_rejections_say_when_to_come_back(served):
    """503 while all workers are busy, as `penstock router serve` answers, and 429 when the queue is full."""
    worker, found = await served(config={"admission": {"mode": "token-capacity", "retryAfterSeconds": 3}})
    worker.kv_usage = "0.95"
    await found.until(lambda: found.server.core.busy[Role.AGGREGATED].is_any)
    answer = await found.post()
    assert (answer.status, answer.headers[b"retry-after"], worker.seen) == (503, b"3", [])
    assert answer.headers[b"content-type"] == b"application/json"
    assert orjson.loads(answer.body)["type"] == "service_unavailable"


@needs_envoy
async def test_workers_that_refuse_or_are_gone(harness, gateway, served):
    """The worker's own error passes; one without room or out of reach ends in 503, after one try."""
    worker, found = await served()
    full = b'{"error":{"message":"Server overloaded: worker at capacity","type":"ServiceUnavailableError","code":503}}'
    worker.script = [
        harness.answers.status(400),
        harness.answers.status(500),
        harness.answers.drop(),
        harness.answers.status(503, full),
    ]
    refused = await found.post()
    assert (refused.status, orjson.loads(refused.body)["error"]["message"]) == (400, "worker says no")
    assert (await found.post()).status == 500
    assert (await found.post()).status == 503
    busy = await found.post()
    assert (busy.status, b"retry-after" in busy.headers) == (503, True)
    assert len(worker.seen) == 4
    await found.assert_idle()
    other = await harness.worker("aggregated")
    without = await gateway(other)
    await other.server.close(grace_s=0)
    gone = await without.post()
    assert (gone.status, b"retry-after" in gone.headers) == (503, True)
    assert orjson.loads(gone.body)["error"]["message"]


@needs_envoy
async def test_a_worker_that_fails_again_and_again_is_ejected(harness, gateway):
    """Though no second try proves its fault."""
    bad, good = [await harness.worker("aggregated") for _ in range(2)]
    bad.otherwise = harness.answers.status(500)
    found = await gateway(bad, good, config={"policy": "round-robin", "breaker": {"consecutiveFailures": 2}})
    statuses = [(await found.post()).status for _ in range(8)]
    assert (statuses.count(500), len(bad.seen), statuses[-4:]) == (2, 2, [200] * 4)


@needs_envoy
async def test_a_silent_worker_is_given_up(harness, served):
    """Before its head the client gets 504; in the midst of a stream it is cut off."""
    limits = {"firstByteTimeoutSeconds": 2, "requestTimeoutSeconds": 5}
    worker, found = await served(config={"limits": limits}, settings={"speed": 10.0})
    worker.script = [harness.answers.hang()]
    worker.hold_stream()
    assert (await found.post()).status == 504
    stream = await found.stream()
    with pytest.raises(StreamBroken):
        await stream.read(limit_bytes=10_000)


@needs_envoy
async def test_keys_are_the_routers_own(harness, served):
    """A request without one is refused; a worker gets none, and no offer to compress."""
    worker, found = await served(settings={"api_keys": frozenset({b"key"})})
    assert (await found.post()).status == 401
    headers = (*JSON, (b"authorization", b"Bearer key"), (b"accept-encoding", b"gzip"))
    url = found.url + "/v1/chat/completions"
    answer = await harness.client.request("POST", url, body=orjson.dumps(CHAT), headers=headers)
    assert answer.status == 200
    assert worker.seen[0].headers.keys().isdisjoint({b"authorization", b"accept-encoding"})


@needs_envoy
async def test_a_worker_that_breaks_off_does_not_look_complete(harness, served):
    """Whether its connection breaks, or its stream ends without [DONE]."""
    worker, found = await served()
    seen = asyncio.Event()
    token = harness.token_event(0)
    worker.script = [
        harness.answers.stream(token, event=seen, broken=True),
        harness.answers.stream(token),
    ]
    for _ in range(2):
        stream = await found.stream()
        assert (await anext(stream)).startswith(token)  # the end may come in the same read
        seen.set()
        with pytest.raises(StreamBroken):
            await stream.read(limit_bytes=10_000)


@needs_envoy
async def test_a_client_that_leaves_frees_its_worker(harness, served):
    """While it waits for the head as in the midst of a stream."""
    worker, found = await served()
    (await found.hanging(worker)).cancel()
    await found.assert_idle()
    worker.hold_stream()
    stream = await found.begun_stream()
    stream.abort()
    await found.assert_idle()
    await found.until(lambda: worker.disconnects == 2)
    assert found.server.metrics.errors["client_left"] == 2


@needs_envoy
@pytest.mark.parametrize("fails_open", [False, True])
async def test_a_dead_picker_fails_as_the_gateway_is_told(harness, gateway, fails_open):
    """Closed: refused; open: any worker serves."""
    workers = [await harness.worker("aggregated") for _ in range(2)]
    found = await gateway(*workers, fails_open=fails_open)
    await found.server.close()
    while fails_open and (await found.post(max_tokens=1)).status != 200:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.05)
    for each in workers:
        each.seen.clear()
    statuses = [(await found.post(max_tokens=1)).status for _ in range(4)]
    assert statuses == [200] * 4 if fails_open else all(each >= 500 for each in statuses)
    assert sum(len(each.seen) for each in workers) == (4 if fails_open else 0)


@needs_envoy
async def test_only_workers_of_the_subset_are_picked(harness, gateway):
    """The gateway's hint binds; one that names no worker is answered with 503."""
    workers = [await harness.worker("aggregated") for _ in range(3)]
    hint = {messages.SUBSET: [messages.endpoint_of(workers[1].url)]}
    found = await gateway(*workers, filters=[metadata_filter("envoy.lb.subset_hint", **hint)])
    answers = await asyncio.gather(*(found.post(max_tokens=1) for _ in range(12)))
    assert {each.status for each in answers} == {200}
    assert [len(each.seen) for each in workers] == [0, 12, 0]
    await workers[1].server.close(grace_s=0)
    pool = found.server.core.pool
    await found.until(lambda: len(pool.routable(Role.AGGREGATED, 0)) == 2)
    assert (await found.post()).status == 503
    nobody = await gateway(
        *workers[::2], filters=[metadata_filter("envoy.lb.subset_hint", **{messages.SUBSET: []})]
    )
    assert (await nobody.post()).status == 503
    assert [len(each.seen) for each in workers] == [0, 12, 0]


@needs_envoy
async def test_a_gateway_that_sends_no_bodies_is_told_so(served):
    """Its answer names the key of its filter and the remedy."""
    _, found = await served(response_body_mode="NONE")
    answer = await found.post()
    assert answer.status == 500
    assert "processing_mode.response_body_mode: NONE" in orjson.loads(answer.body)["error"]["message"]


async def test_health_is_told_by_grpc(harness):
    """As the protocol asks: readiness goes by workers, liveness does not."""
    worker = await harness.worker("aggregated")
    spec = WorkerSpec(worker.name, Role.AGGREGATED, worker.url)
    picker = GatewayPicker(
        RouterSettings(model="llama", disaggregated=False, workers=(spec,)), ext_proc_port=0
    )
    await picker.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.ext_proc_port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            picker.core.pool.set_drained(worker.name, drained=True)
            assert await check(b"\x0a\x09readiness") == b"\x08\x02"
            assert await check(b"\x0a\x08liveness") == b"\x08\x01"
            assert ProcessingRequest().WhichOneof("request") is None
    finally:
        await picker.close()
