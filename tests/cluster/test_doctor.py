from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote

import pytest
from accounts import EVERYTHING, account
from apiserver import own_address
from operating import edit, set_status
from patience import LIMIT_S, eventually, until_asked
from reserved_ports import reserved_port

from penstock.kube.client import KubeClient
from penstock.kube.kinds import DEPLOYMENT, GRAPH_DEPLOYMENT, LEASE, NODE, POD, SERVICE
from penstock_operator.doctor.check import check
from penstock_operator.doctor.findings import Severity
from penstock_operator.doctor.gather import Scope, gather

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ME = "test"


@pytest.fixture(name="look")
def made_look(client, crds, namespace):
    """Runs the doctor on the test's namespace and returns its findings by subject."""

    async def look(*, using=None, interval_s=0.0, graph=None):
        scope = Scope(namespace, graph, interval_s, "0.1.0")
        found = {}
        for each in check(await gather(using or client, scope)):
            found.setdefault(each.subject, []).append(each)
        return found

    return look


def graph_object(namespace, **spec):
    """An aggregated graph."""
    services = {"frontend": {"role": "router"}, "worker": {"role": "aggregated"}}
    base = {"model": {"name": "m", "servedName": "m"}, "runtime": "simulated", "services": services}
    return GRAPH_DEPLOYMENT.of({"name": "llama", "namespace": namespace}, spec={**base, **spec})


def operator_of(namespace):
    """The operator's Deployment with the chart's labels."""
    labels = {"app.kubernetes.io/part-of": "penstock", "app.kubernetes.io/component": "operator"}
    spec = {"serviceAccountName": "penstock-operator", "containers": [{"name": "c", "image": "i"}]}
    template = {"metadata": {"labels": {**labels, "penstock.dev/scope": namespace}}, "spec": spec}
    return DEPLOYMENT.of(
        {"name": "penstock-operator", "namespace": namespace, "labels": labels},
        spec={"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
    )


def lease(namespace, renewed):
    """The operator's Lease, renewed at a time."""
    at = renewed.isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = {"holderIdentity": "operator-1", "leaseDurationSeconds": 15, "renewTime": at}
    return LEASE.of({"name": "penstock-operator", "namespace": namespace}, spec=spec)


async def test_server_clock_and_definitions(look):
    """A real server's own defaults do not count as a difference of the definitions."""
    found = await look()
    assert [each.severity for each in found["API server"]] == [Severity.OK]
    assert [each.severity for each in found["clock"]] == [Severity.OK]
    for name in ("graphdeployments", "scalingadapters"):
        ((finding),) = found[f"CRD {name}.penstock.dev"]
        assert finding.message == "is established and current"


async def test_operator_lease_and_rights(look, api_server, client, namespace):
    """A stale Lease, a Deployment that is not ready, and an account without rights are problems."""
    await client.create(operator_of(namespace), field_manager=ME)
    await client.create(lease(namespace, datetime.now(UTC) - timedelta(seconds=60)), field_manager=ME)
    found = await look()
    ((deployment),) = found[f"operator {namespace}/penstock-operator"]
    assert deployment.message == "0 of 1 replicas are ready"
    ((stale),) = found[f"operator lease {namespace}/penstock-operator"]
    age_s = re.fullmatch(r"operator-1 has not renewed it for (\d+) s; its duration is 15 s", stale.message)
    assert int(age_s[1]) >= 59
    ((rights),) = found[f"rights of operator in {namespace}"]
    assert rights.severity is Severity.PROBLEM
    assert "list pods" in rights.message

    status = {"replicas": 1, "readyReplicas": 1}
    await set_status(client, DEPLOYMENT, "penstock-operator", namespace, status)
    await client.apply(lease(namespace, datetime.now(UTC)), field_manager=ME)
    account(api_server, namespace, "penstock-operator", EVERYTHING)
    found = await look()
    for subject in (
        f"operator {namespace}/penstock-operator",
        f"operator lease {namespace}/penstock-operator",
        f"rights of operator in {namespace}",
    ):
        assert [each.severity for each in found[subject]] == [Severity.OK], found[subject]


async def test_a_user_with_few_rights_learns_what_is_unknown(look, api_server, client, namespace):
    """What may not be read is unknown, never a problem of the cluster."""
    rule = {"apiGroups": ["penstock.dev"], "resources": ["graphdeployments"], "verbs": ["get", "list"]}
    viewer = await KubeClient.connect(kubeconfig=account(api_server, namespace, "viewer", [rule]))
    await client.create(graph_object(namespace), field_manager=ME)
    try:
        found = await look(using=viewer)
    finally:
        await viewer.close()
    unknown = {
        subject for subject, each in found.items() if any(one.severity is Severity.UNKNOWN for one in each)
    }
    assert {"operator", f"graph {namespace}/llama", f"nodes for {namespace}/llama"} <= unknown
    assert "CRD graphdeployments.penstock.dev" in unknown
    ((mine),) = found[f"rights of you in {namespace}"]
    assert mine.severity is Severity.WARNING
    assert "list pods" in mine.message
    assert "list graphdeployments" not in mine.message


async def test_node_pools(look, client, namespace):
    """Labels, taints and GPUs of real Node objects, and what pods on them ask for."""
    pools = {
        "a100": {"nodeSelector": {"test/pool": namespace}},
        "h100": {"nodeSelector": {"test/pool": f"{namespace}-h100"}},
    }
    services = {"worker": {"role": "aggregated", "nodePool": "a100", "gpusPerReplica": 2}}
    await client.create(graph_object(namespace, nodePools=pools, services=services), field_manager=ME)
    name = f"{namespace}-node"
    node = NODE.of({"name": name, "labels": {"test/pool": namespace}})
    await client.create(node, field_manager=ME)
    try:
        amounts = {"cpu": "8", "nvidia.com/gpu": "4"}
        ready = {"type": "Ready", "status": "True", "reason": "r", "message": "m"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        await set_status(client, NODE, name, None, status)
        # The server taints a new node as not ready; the node controller, which may not run, takes that away.
        taints = {"spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}}
        await client.patch(NODE, name, taints, namespace=None, field_manager=ME)
        taken = pod_object(namespace, "taken", "other", 8000)
        taken["spec"] |= {"nodeName": name}
        asked = {"nvidia.com/gpu": "1"}
        taken["spec"]["containers"][0]["resources"] = {"requests": asked, "limits": asked}
        await client.create(taken, field_manager=ME)
        found = await look()
        ((tainted),) = found[f"pool a100 of {namespace}/llama"]
        assert tainted.message == "1 of 1 nodes are tainted gpu=yes:NoSchedule"
        ((empty),) = found[f"pool h100 of {namespace}/llama"]
        assert empty.message == f"no node has the labels test/pool={namespace}-h100"

        tolerating = {"a100": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}
        await edit(client, namespace, {"nodePools": tolerating}, name="llama")
        ((usable),) = (await look())[f"pool a100 of {namespace}/llama"]
        assert usable.message == "1 nodes with 4 nvidia.com/gpu: 1 in use, 3 free"
    finally:
        await client.delete(NODE, name, namespace=None)


def pod_object(namespace, name, role, port):
    """A pod of graph llama that serves on a port."""
    labels = {
        "penstock.dev/graph": "llama",
        "penstock.dev/service": role,
        "penstock.dev/role": role,
        "penstock.dev/serving": "true",
    }
    ports = [{"name": "http", "containerPort": port}]
    spec = {
        "automountServiceAccountToken": False,
        "containers": [{"name": "main", "image": "i", "ports": ports}],
    }
    return POD.of({"name": name, "namespace": namespace, "labels": labels}, spec=spec)


@pytest.fixture(name="processes")
def made_processes():
    """Starts `penstock` processes; all are ended after the test."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for each in started:
        each.kill()
        each.wait()


def workers_of(router_port):
    """The router's view of its workers, once it is up."""

    def ready():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{router_port}/workers", timeout=LIMIT_S) as answer:
                workers = json.load(answer)["workers"]
        except OSError:
            return None
        return workers if all(each["state"] == "ready" for each in workers) else None

    return eventually(ready, "router and worker serve")


async def run_pod(client, pod, address):
    """Create a pod and report it ready at an address, as a kubelet would."""
    await client.create(pod, field_manager=ME)
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "ContainersReady")]
    container = {
        "name": "main",
        "image": "i",
        "imageID": "",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    }
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "conditions": conditions,
        "containerStatuses": [container],
    }
    await set_status(client, POD, pod["metadata"]["name"], pod["metadata"]["namespace"], status)


async def test_router_and_worker_through_the_servers_proxy(look, client, namespace, processes):
    """A real router and a real worker: served, then frozen, then gone."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback, which the API server's proxy refuses")
    worker_port, router_port = reserved_port(), reserved_port()
    worker = processes("engine", "serve", "m", "--host", "0.0.0.0", "--port", worker_port)
    processes(
        *("router", "serve", "--model", "m", "--host", "0.0.0.0", "--port", router_port),
        *("--worker", f"aggregated=http://127.0.0.1:{worker_port}"),
    )
    ((known),) = workers_of(router_port)
    name = known["name"]
    await client.create(graph_object(namespace), field_manager=ME)
    await run_pod(client, pod_object(namespace, name, "aggregated", worker_port), address)
    await run_pod(client, pod_object(namespace, "frontend-1", "router", router_port), address)

    async def is_well():  # on a busy machine the worker's metrics may be old at one look
        found = await look(interval_s=2.0)
        router = [(each.severity, each.message) for each in found[f"router {namespace}/frontend-1"]]
        return found if [severity for severity, _ in router] == [Severity.OK] * 2 else None

    found = await until_asked(is_well, "a router with fresh metrics")
    router = [each.message for each in found[f"router {namespace}/frontend-1"]]
    assert router[0] == "would serve a request now"
    assert router[1].startswith("sends to 1 workers; their metrics are at most ")
    graph = [each.message for each in found[f"graph {namespace}/llama"]]
    assert "the metrics of 1 workers can be read" in graph

    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    found = await look(interval_s=1.0)
    ((gone),) = found[f"worker {namespace}/{name}"]
    assert gone.severity is Severity.PROBLEM
    assert gone.message.startswith("/metrics: ")


async def test_what_has_gone_since_it_was_listed_is_no_problem(look, client, namespace):
    """A pod and then the graph are deleted between doctor's two looks, or before the first."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback, which the API server's proxy refuses")
    await client.create(graph_object(namespace), field_manager=ME)
    for name in ("frontend-1", "frontend-2"):
        await run_pod(client, pod_object(namespace, name, "router", reserved_port()), address)

    async def gone(kind, name):
        await asyncio.sleep(0.5)
        await client.delete(kind, name, namespace=namespace, grace_s=0)

    found, _ = await asyncio.gather(look(interval_s=2.0), gone(POD, "frontend-1"))
    assert f"router {namespace}/frontend-1" not in found
    assert {each.severity for each in found[f"router {namespace}/frontend-2"]} == {Severity.PROBLEM}
    found, _ = await asyncio.gather(look(interval_s=2.0), gone(GRAPH_DEPLOYMENT, "llama"))
    assert f"graph {namespace}/llama" not in found


class _Prometheus(BaseHTTPRequestHandler):
    """Answers an instant query as Prometheus does; what was asked is kept."""

    asked: ClassVar[list[str]] = []
    result: ClassVar[list[dict]] = []

    def do_GET(self):
        self.asked.append(unquote(self.path))
        body = json.dumps(
            {"status": "success", "data": {"resultType": "vector", "result": self.result}}
        ).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""


async def test_prometheus_through_the_servers_proxy(look, client, api_server, namespace):
    """The graph's address inside the cluster is asked by way of its Service."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback, which the API server's proxy refuses")
    server = ThreadingHTTPServer(("0.0.0.0", 0), _Prometheus)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        url = f"http://prometheus.{namespace}.svc.cluster.local:9090"
        about = {"name": "prometheus", "namespace": namespace}
        ports = [{"name": "web", "port": 9090, "targetPort": port}]
        # The server's proxy goes to addresses of pods only.
        pod = pod_object(namespace, "prometheus-0", "other", port)
        pod["metadata"]["labels"] = {}
        await run_pod(client, pod, address)
        target = {"kind": "Pod", "name": "prometheus-0", "namespace": namespace}
        addresses = [{"ip": address, "targetRef": target}]
        subsets = [{"addresses": addresses, "ports": [{"name": "web", "port": port}]}]
        endpoints = {"apiVersion": "v1", "kind": "Endpoints", "metadata": about, "subsets": subsets}
        api_server.apply(SERVICE.of(about, spec={"ports": ports}), endpoints)
        planner = {"metrics": {"prometheusUrl": url}}
        await client.create(graph_object(namespace, planner=planner), field_manager=ME)

        async def is_asked():  # the API server's proxy follows the Endpoints a moment later
            messages = [each.message for each in (await look())[f"graph {namespace}/llama"]]
            return f"Prometheus {url} holds no series of its workers" in messages

        await until_asked(is_asked, "Prometheus is asked")
        assert f'namespace="{namespace}",pod=~"(llama-frontend|llama-worker)-' in _Prometheus.asked[-1]
        _Prometheus.result = [{"metric": {}, "value": [1800000000, "3"]}]
        messages = [each.message for each in (await look())[f"graph {namespace}/llama"]]
        assert f"Prometheus {url} holds series of 3 workers" in messages
    finally:
        server.shutdown()
        server.server_close()


def test_the_command_prints_json_and_its_exit_code_is_the_verdict(api_server, crds, namespace):
    """--json holds every finding; a problem exits 1."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "penstock.cli", "doctor", "--json", "--interval", "0"),
            *("--kubeconfig", str(api_server.kubeconfig), "--namespace", namespace),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    report = json.loads(done.stdout)
    problems = [each for each in report["findings"] if each["severity"] == "problem"]
    assert report["healthy"] == (not problems)
    assert done.returncode == (1 if problems else 0)
    assert all(set(each) == {"severity", "subject", "message", "remedy"} for each in report["findings"])
    assert done.stderr == ""
