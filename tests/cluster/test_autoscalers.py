"""Kubernetes' own HPA controller, and KEDA's rules, scale a role that spec says is theirs; the operator keeps its promises."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import threading
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from apiserver import own_address
from operating import BudgetWatch, Loads, graph, running, until

from penstock.kube.kinds import DEPLOYMENT, POD, SCALING_ADAPTER
from penstock_operator.plan.drain import PodLoad
from penstock_operator.plan.pods import pod_view

pytestmark = [pytest.mark.cluster]

GROUP = "external.metrics.k8s.io"
TARGET = 10
"""Requests per replica that the HPA aims at."""


class _Metrics(ThreadingHTTPServer):
    """An external-metrics server: one number, asked for by any name."""

    daemon_threads = True
    value = 0

    class _Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            """Answer discovery and metrics; health is whatever answers at all."""
            _, _, rest = self.path.partition(f"/apis/{GROUP}/v1beta1")
            version = {"apiVersion": "v1", "kind": "APIResourceList", "groupVersion": f"{GROUP}/v1beta1"}
            body = {**version, "resources": []}
            if rest:
                item = {
                    "metricName": "requests",
                    "metricLabels": {},
                    "timestamp": "2026-01-01T00:00:00Z",
                    "value": str(self.server.value),
                }
                kind = {"apiVersion": f"{GROUP}/v1beta1", "kind": "ExternalMetricValueList", "metadata": {}}
                body = {**kind, "items": [item]}
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            """Say nothing."""

    def __init__(self, address, folder):
        super().__init__((address, 0), self._Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)


@pytest.fixture
def metrics(crds, kwok, make_namespace):
    """The metrics server behind the API server's aggregation, as an APIService has it."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback, which endpoints may not have")
    server = _Metrics(address, kwok.folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    head = {"name": "metrics", "namespace": make_namespace("metrics")}
    ports = [{"name": "https", "port": server.server_address[1]}]
    service = {"name": head["name"], "namespace": head["namespace"], "port": ports[0]["port"]}
    spec = {"group": GROUP, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100}
    api = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"v1beta1.{GROUP}"},
        "spec": {**spec, "insecureSkipTLSVerify": True, "service": service},
    }
    kwok.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": head, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**head, "labels": {"kubernetes.io/service-name": "metrics"}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [address]}],
        },
        api,
    )
    kwok.kubectl("wait", "--for=condition=Available", "--timeout=30s", f"apiservice/v1beta1.{GROUP}")
    yield server
    kwok.kubectl("delete", "apiservice", f"v1beta1.{GROUP}")
    server.shutdown()
    server.server_close()


def scaled_by_others(namespace, **scaling):
    """A graph whose decode role is another's to scale."""
    made = graph(namespace, planner={"maxGpuBudget": 4, "minGpuBudget": 0})
    made["spec"]["services"]["decode"] |= {
        "terminationGracePeriodSeconds": 120,
        "scaling": {"minReplicas": 1, "maxReplicas": 6, "managedBy": "external", **scaling},
    }
    return made


def autoscaler(namespace):
    """An HPA v2 on the adapter's scale subresource, that scales down without a pause."""
    metric = {"metric": {"name": "requests"}, "target": {"type": "AverageValue", "averageValue": str(TARGET)}}
    down = {"stabilizationWindowSeconds": 0}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "decode", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "penstock.dev/v1alpha1",
                "kind": "ScalingAdapter",
                "name": "g-decode",
            },
            "minReplicas": 1,
            "maxReplicas": 6,
            "metrics": [{"type": "External", "external": metric}],
            "behavior": {"scaleDown": down},
        },
    }


class _Decode:
    """The decode role as the test sees it."""

    def __init__(self, client, namespace):
        self.client, self.namespace = client, namespace

    async def desired(self):
        """The adapter's number."""
        found = await self.client.get(SCALING_ADAPTER, "g-decode", namespace=self.namespace)
        return found["spec"]["replicas"]

    async def pods(self):
        """The pods that do not leave."""
        labels = {"penstock.dev/service": "decode"}
        found = await self.client.list(POD, namespace=self.namespace, labels=labels)
        return [each for each in map(pod_view, found.items) if each.alive]

    async def becomes(self, desired, ready):
        """Wait until the number is wanted, and this many pods are ready and no more there than wanted."""

        async def check():
            pods = await self.pods()
            return await self.desired() == desired and sum(each.ready for each in pods) == ready == len(
                [each for each in pods if not each.gated]
            )

        await until(check, f"{desired} wanted, {ready} ready")


async def test_an_hpa_scales_its_role_up_and_down_within_the_budget(
    kwok, make_node, client, namespace, metrics
):
    """It wants six, the budget has room for three; going down, a busy worker is waited for."""
    make_node(gpus=8)
    decode, loads = _Decode(client, namespace), Loads()
    await client.create(scaled_by_others(namespace), field_manager="test")
    async with running(client, namespace, loads=loads), BudgetWatch(client, namespace).on() as budget:
        await until(lambda: _exists(client, namespace), "the adapter")
        await decode.becomes(1, 1)
        metrics.value = 6 * TARGET
        await asyncio.to_thread(kwok.apply, autoscaler(namespace))
        await decode.becomes(6, 3)
        assert budget.most == 4
        loads.busy = {each.name: PodLoad(1, 0, 0.2) for each in await decode.pods()}
        metrics.value = TARGET
        await until(lambda: _is(decode.desired(), 1), "the HPA lowers the number")
        await asyncio.sleep(5)
        deployment = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
        assert (deployment["spec"]["replicas"], len(await decode.pods())) == (3, 3)
        loads.busy = {}
        await decode.becomes(1, 1)
        hpa = json.loads(kwok.kubectl("get", "hpa", "decode", "--namespace", namespace, "--output", "json"))
    assert {each["type"]: each["status"] for each in hpa["status"]["conditions"]}["ScalingActive"] == "True"
    assert budget.most == 4


async def _is(asked, expected):
    return await asked == expected


@asynccontextmanager
async def keda(client, namespace, metrics, *, polling_s=0.5, cooldown_s=3.0):
    """KEDA's rules for a ScaledObject with minReplicaCount 0, https://keda.sh/docs/latest/concepts/scaling-deployments/.

    Every polling interval the trigger is active if its value is above the activation's threshold, 0. Active: from 0 to
    1, and the HPA does the rest. Inactive for a cooldown period: to 0, where the HPA rests.
    """

    async def scale(number):
        patch = {"spec": {"replicas": number}}
        where = {"namespace": namespace, "subresource": "scale", "field_manager": "keda-operator"}
        await client.patch(SCALING_ADAPTER, "g-decode", patch, **where)

    async def poll():
        active_s = -math.inf
        decode, clock = _Decode(client, namespace), asyncio.get_running_loop().time
        while True:
            number = await decode.desired()
            if metrics.value > 0:
                active_s = clock()
            if metrics.value > 0 and not number:
                await scale(1)
            elif number and clock() - active_s > cooldown_s:
                await scale(0)
            await asyncio.sleep(polling_s)

    task = asyncio.create_task(poll())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled(), task.exception()


async def test_kedas_rules_take_a_role_from_zero_and_back(kwok, make_node, client, namespace, metrics):
    """Zero while nothing waits, activated by the first request, scaled by the HPA, and to zero after the cooldown."""
    make_node(gpus=8)
    decode = _Decode(client, namespace)
    made = scaled_by_others(namespace, minReplicas=0)
    made["spec"]["services"]["decode"]["replicas"] = 0
    await client.create(made, field_manager="test")
    async with running(client, namespace, loads=Loads()), BudgetWatch(client, namespace).on() as budget:
        await until(lambda: _exists(client, namespace), "the adapter")
        await asyncio.to_thread(kwok.apply, autoscaler(namespace))  # KEDA makes one of its own
        async with keda(client, namespace, metrics):
            await decode.becomes(0, 0)
            metrics.value = 2 * TARGET
            await decode.becomes(2, 2)
            metrics.value = 0
            await decode.becomes(0, 0)
    assert budget.most <= 4


async def _exists(client, namespace):
    return (await client.list(SCALING_ADAPTER, namespace=namespace)).items
