"""The picker by the clauses of the endpoint picker protocol (1.0.0), spoken to as a data plane does: gRPC without an Envoy.

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/004-endpoint-picker-protocol

Before a real Envoy the same clauses hold in test_gateway.py (a stream, subsets, rejections, health) and test_gateway_limits.py.
"""

import asyncio
import contextlib

import orjson
import pytest

pytest.importorskip("grpc", reason="needs penstock[gateway]")
pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2", reason="needs penstock[gateway]")

import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf.json_format import MessageToDict
from router_harness import Router

from penstock.api import Role, RouterConfig
from penstock.router.core.worker import WorkerSpec
from penstock.router.gateway.messages import endpoint_of
from penstock.router.gateway.server import GatewayPicker
from penstock.router.settings import RouterSettings

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
BODY = orjson.dumps({"model": "llama", "messages": [{"role": "user", "content": "Hello"}]})
REQUEST = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    ":authority": "a",
    "content-type": "application/json",
}
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
LIMIT_S = 20.0


def head(**values):
    """Return headers as messages have them."""
    return HttpHeaders(
        headers=HeaderMap(
            headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()]
        )
    )


class DataPlane:
    """A Gateway's side of one picker."""

    def __init__(self, picker, stub, until):
        self.picker, self.until, self._stub = picker, until, stub

    @contextlib.asynccontextmanager
    async def request(self, **metadata):
        """Send a chat, with metadata by namespace; give its call and the first answer."""
        call = self._stub.Process(timeout=LIMIT_S)
        first = ProcessingRequest(
            request_headers=head(**REQUEST),
            protocol_config=ProtocolConfiguration(request_body_mode=DUPLEX, response_body_mode=DUPLEX),
        )
        for namespace, values in metadata.items():
            first.metadata_context.filter_metadata[namespace].update(values)
        await call.write(first)
        await call.write(ProcessingRequest(request_body=HttpBody(body=BODY, end_of_stream=True)))
        try:
            yield call, await call.read()
        finally:
            call.cancel()

    async def ask(self, **metadata):
        """Return the first answer to a chat."""
        async with self.request(**metadata) as (_, answer):
            return answer


@pytest.fixture
async def plane(harness):
    """Start pickers before workers; all stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*workers, config=None):
            specs = tuple(WorkerSpec(each.name, Role(each.role), each.url) for each in workers)
            picker = GatewayPicker(
                RouterSettings(
                    model="llama",
                    disaggregated=False,
                    config=RouterConfig.model_validate(config or {}),
                    workers=specs,
                    shutdown_grace_s=0.1,
                ),
                ext_proc_port=0,
            )
            await picker.start()
            stack.push_async_callback(picker.close)
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(f"127.0.0.1:{picker.ext_proc_port}")
            )
            found = DataPlane(picker, ExternalProcessorStub(channel), Router(picker, harness.client).until)
            await found.until(
                lambda: (
                    len(picker.core.pool.routable(Role.AGGREGATED, 0)) == len(workers)
                    and not any(each.health_problem for each in picker.core.pool)
                )
            )
            return found

        yield start


def set_headers(answer):
    """Return the request headers that a picker's answer sets."""
    mutation = answer.request_headers.response.header_mutation
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def named(answer):
    """Return the endpoint of an answer's header."""
    return set_headers(answer)[DESTINATION]


def status_of(answer):
    """Return the status of an ImmediateResponse."""
    assert answer.WhichOneof("response") == "immediate_response", answer
    return answer.immediate_response.status.code


async def test_destination_is_set_as_a_header_and_as_metadata_of_envoy_lb_and_both_agree(harness, plane):
    """'Setting the header to one or more selected endpoints'; 'MUST not set two different values'."""
    worker = await harness.worker("aggregated")
    answer = await (await plane(worker)).ask()
    assert named(answer) == endpoint_of(worker.url)
    assert MessageToDict(answer.dynamic_metadata) == {"envoy.lb": {DESTINATION: endpoint_of(worker.url)}}


async def test_without_a_subset_all_endpoints_of_the_pool_are_selected_from(harness, plane):
    """'The EPP MUST select from the set defined by the InferencePool selector': in turn, as each is held."""
    workers = [await harness.worker("aggregated") for _ in range(3)]
    found = await plane(*workers, config={"policy": "round-robin"})
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(found.request()) for _ in workers]
        assert {named(answer) for _, answer in held} == {endpoint_of(each.url) for each in workers}


async def test_with_a_subset_only_its_endpoints_are_selected(harness, plane):
    """'The EPP MUST only select endpoints from the specified list', however loaded they are."""
    workers = [await harness.worker("aggregated") for _ in range(3)]
    found = await plane(*workers, config={"policy": "round-robin"})
    hint = {"envoy.lb.subset_hint": {SUBSET: [endpoint_of(workers[1].url)]}}
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(found.request(**hint)) for _ in range(4)]
        assert {named(answer) for _, answer in held} == {endpoint_of(workers[1].url)}


@pytest.mark.parametrize("subset", [[], ["192.0.2.1:8000"]])
async def test_a_subset_that_is_empty_or_has_no_eligible_endpoint_is_503(harness, plane, subset):
    """'If none of the endpoints in the list is eligible or the list is empty': an ImmediateResponse with 503."""
    found = await plane(await harness.worker("aggregated"))
    assert status_of(await found.ask(**{"envoy.lb.subset_hint": {SUBSET: subset}})) == 503


async def test_no_ready_endpoints_is_503(harness, plane):
    """'ImmediateResponse with 503 if there are no ready endpoints'."""
    found = await plane(worker := await harness.worker("aggregated"))
    found.picker.core.pool.set_drained(worker.name, drained=True)
    assert status_of(await found.ask()) == 503


async def test_a_request_to_be_dropped_is_429(harness, plane):
    """'429 if the request should be dropped': a queue that is full."""
    queue = {"maxRequests": 1, "maxWaitSeconds": LIMIT_S, "workerTokens": 1}
    config = {"policy": "prefix-cost", "prefillQueue": queue}
    found = await plane(await harness.worker("aggregated"), config=config)
    async with found.request():
        waiting = asyncio.create_task(found.ask())
        await found.until(lambda: waiting.done() or len(found.picker.core.entry_queue) == 1)
        assert status_of(await found.ask()) == 429
        waiting.cancel()
        await asyncio.wait([waiting])


@pytest.mark.parametrize(("is_elsewhere", "counted"), [(True, 1), (False, 0)])
async def test_the_endpoint_that_served_is_taken_from_the_metadata_of_envoy_lb(
    harness, plane, is_elsewhere, counted
):
    """'The data plane MUST communicate the endpoint that served': another one than picked counts as the Gateway's own retry."""
    worker = await harness.worker("aggregated")
    found = await plane(worker)
    async with found.request() as (call, answer):
        served = "192.0.2.1:8000" if is_elsewhere else named(answer)
        said = ProcessingRequest(
            response_headers=head(**{":status": "200", "content-type": "application/json"})
        )
        said.metadata_context.filter_metadata["envoy.lb"].update({SERVED: served})
        await call.write(said)
        body = orjson.dumps({"choices": [], "usage": {"completion_tokens": 1}})
        await call.write(ProcessingRequest(response_body=HttpBody(body=body, end_of_stream=True)))
        while (answer := await call.read()) is not grpc.aio.EOF:
            assert answer.WhichOneof("response") != "immediate_response", answer
    assert found.picker.metrics.retries["gateway"] == counted
