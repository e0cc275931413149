"""A graph behind a real Gateway controller: Istio makes of InferencePool and HTTPRoute what Envoy does, the picker picks."""

from __future__ import annotations

import contextlib
import json

import gateway_controller
import pytest
from node_agent import NodeAgent, addresses
from operating import edit, graph, process, says, until

from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.kube.kinds import INFERENCE_POOL, POD

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

NAMESPACE = gateway_controller.NAMESPACE
JSON = ((b"content-type", b"application/json"),)


class Behind:
    """A graph whose clients come by a Gateway."""

    def __init__(self, client, url):
        self.client, self.url = client, url
        self.http = ConnectionPool()

    async def post(self, **body):
        """Return a complete answer."""
        content = json.dumps({"model": "s", "prompt": "hello", "max_tokens": 3, **body}).encode()
        return await self.http.request(
            "POST", f"{self.url}/v1/completions", body=content, headers=JSON, timeouts=Timeouts(total_s=60)
        )

    async def stream(self, **body):
        """Return the beginning of a stream."""
        content = json.dumps({"model": "s", "prompt": "hello", "stream": True, **body}).encode()
        url = f"{self.url}/v1/completions"
        return await self.http.stream("POST", url, body=content, headers=JSON, timeouts=Timeouts(total_s=120))

    async def status(self, **body):
        """Return an answer's status; 0 where the gateway does not listen."""
        try:
            return (await self.post(**body)).status
        except PenstockError:
            return 0

    async def picker(self):
        """Return the picker's pod that is ready and not about to go; None: there is none."""
        found = await self.client.list(POD, namespace=NAMESPACE, labels={"penstock.dev/role": "router"})
        for each in found.items:
            conditions = each.get("status", {}).get("conditions", ())
            is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
            if is_ready and "deletionTimestamp" not in each["metadata"]:
                return each
        return None


@pytest.fixture
async def behind(own, tmp_path):
    """A graph of real processes, its operator, the controller and its Envoy."""
    reason = gateway_controller.missing()
    if reason is not None:
        pytest.skip(reason)
    plane, client = own
    plane.start_controllers()
    async with contextlib.AsyncExitStack() as stack:
        free = stack.enter_context(addresses())
        xds = stack.enter_context(gateway_controller.controller(plane, tmp_path))
        await stack.enter_async_context(NodeAgent(plane, client, free, tmp_path).on(gpus=16))
        _, port = stack.enter_context(process(plane.kubeconfig, NAMESPACE))
        await until(says(port, "/readyz"), "an operator")
        worker = {"gpusPerReplica": 1, "terminationGracePeriodSeconds": 30, "scaling": {}}
        made = graph(
            NAMESPACE,
            model={"name": "tiny", "servedName": "s", "contextTokens": 8192},
            # Istio speaks plain text with a picker unless a DestinationRule says otherwise.
            router={"gateway": {"enabled": True, "tls": {"enabled": False}}},
            services={
                "frontend": {"role": "router", "replicas": 1, "terminationGracePeriodSeconds": 30},
                "prefill": {"role": "prefill", "replicas": 1, **worker},
                "decode": {"role": "decode", "replicas": 2, **worker},
            },
            planner={"enabled": False, "maxGpuBudget": 8},
        )
        await client.create(made, field_manager="test")
        found = Behind(
            client,
            stack.enter_context(gateway_controller.gateway(plane, tmp_path, xds, next(free), pool="g-pool")),
        )
        stack.push_async_callback(found.http.close)

        async def serves():
            return await found.status() == 200

        await until(serves, "a request through the gateway")
        yield found


async def test_a_controller_accepts_the_pool_and_its_envoy_relays(behind):
    """The InferencePool's conditions are True; a complete answer, a stream and a rejection reach the client as the picker has them."""
    answer = await behind.post()
    assert answer.status == 200
    content = json.loads(answer.body)
    assert (content["model"], content["usage"]["completion_tokens"]) == ("s", 3)
    pool = await behind.client.get(INFERENCE_POOL, "g-pool", namespace=NAMESPACE)
    (parent,) = pool["status"]["parents"]
    assert parent["parentRef"]["name"] == gateway_controller.NAME
    assert {each["type"]: each["status"] for each in parent["conditions"]} == {
        "Accepted": "True",
        "ResolvedRefs": "True",
    }

    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await behind.stream(max_tokens=6000)) for _ in range(6)]
        for each in streams:  # its first token has come while thousands are left
            assert each.status == 200
            assert (await anext(aiter(each))).startswith(b"data: ")
        admission = {"mode": "token-capacity", "activeDecodeBlocksThreshold": 0.0}
        await edit(behind.client, NAMESPACE, {"router": {"admission": admission}})

        async def refuses():
            return await behind.status() == 503

        await until(refuses, "a rejection while streams make all decode workers busy")
        answer = await behind.post()
        assert answer.status == 503
        assert json.loads(answer.body)["type"] == "service_unavailable"
        assert b"retry-after" in answer.headers


async def test_a_new_picker_is_asked(behind):
    """The controller's Envoy finds a picker that replaces another one."""
    former = await behind.picker()
    await behind.client.delete(
        POD, former["metadata"]["name"], namespace=NAMESPACE, uid=former["metadata"]["uid"]
    )

    async def is_replaced():
        found = await behind.picker()
        return found is not None and found["metadata"]["uid"] != former["metadata"]["uid"]

    async def serves():
        return await behind.status() == 200

    await until(is_replaced, "another picker")
    await until(serves, "a request through the gateway")
