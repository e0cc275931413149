"""NVIDIA's own Dynamo with its Kubernetes discovery, against a real API server and under the rights that a graph grants.

The processes are those of the pods, started here; what kubelet and its like do (pods, EndpointSlices) the tests write.
Skipped without an environment that has Dynamo (`make dynamo`) or without KUBEBUILDER_ASSETS.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from penstock.api import Environment, GraphDeployment
from penstock.local.ports import choose_port
from penstock.local.random_model import RandomModel, write_model
from penstock.operator.resources import BuildContext, children
from penstock.runtimes import PORT, RuntimeContext, filled_argv, filled_env, process_specs
from penstock.runtimes.process import SIDE_CHANNEL_PORT

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from apiserver import ControlPlane, missing_assets  # noqa: E402 - lies with the cluster's tests

NAMESPACE = "serving"
START_S = 90
GRANTED = {"ServiceAccount", "Role", "RoleBinding"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Pods:
    """The processes of a graph's pods, and the EndpointSlices that name the ready ones."""

    def __init__(self, plane, folder, python, graph):
        self._plane = plane
        self._folder = folder
        context = RuntimeContext(
            python=str(python),
            graph_file="",
            discovery="kubernetes",
            namespace=f"{NAMESPACE}-{graph.name}",
            environment=Environment.KUBERNETES,
        )
        self._specs = {each.service: each for each in process_specs(graph, context)}
        self._processes = []
        self._ready = {}
        self._taken = set()
        self.url = ""

    def start(self, service, name):
        """Start a pod's process; its endpoint is ready from the beginning."""
        spec = self._specs[service]
        ports = {}
        for placeholder in (PORT, SIDE_CHANNEL_PORT):
            ports[placeholder] = choose_port(self._taken)
            self._taken.add(ports[placeholder])
        account = "g-router" if service == "frontend" else "g-worker"
        environment = {
            **os.environ,
            **filled_env(spec, ports),
            "KUBECONFIG": str(self._plane.service_account_kubeconfig(NAMESPACE, account)),
            "POD_NAME": name,
            "POD_NAMESPACE": NAMESPACE,
            "POD_UID": f"uid-{name}",
            "HOME": str(self._folder),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
        with (self._folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                filled_argv(spec, ports),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )
        self._processes.append(process)
        if service == "frontend":
            self.url = f"http://127.0.0.1:{ports[PORT]}"
        self.endpoint(service, name, ready=True)

    def endpoint(self, service, name, *, ready):
        """Write the slice of a service, as its pods' readiness or labels change it."""
        self._ready.setdefault(service, {})[name] = ready
        endpoints = [
            {
                "addresses": [f"10.0.0.{number}"],
                "conditions": {"ready": is_ready},
                "targetRef": {"kind": "Pod", "name": pod, "namespace": NAMESPACE, "uid": f"uid-{pod}"},
            }
            for number, (pod, is_ready) in enumerate(self._ready[service].items(), start=1)
        ]
        labels = {
            "nvidia.com/dynamo-discovery-backend": "kubernetes",
            "nvidia.com/dynamo-discovery-enabled": "true",
        }
        self._plane.apply(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": f"g-{service}-1", "namespace": NAMESPACE, "labels": labels},
                "addressType": "IPv4",
                "endpoints": endpoints,
                "ports": [],
            }
        )

    def registered(self):
        """Return the components of the workers that the frontend lists, sorted; empty while it serves no model."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                models = json.load(answer)["data"]
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                found = json.load(answer)["instances"]
        except OSError:
            return []
        if not models:  # it has the workers' cards to fetch first
            return []
        return sorted(each["component"] for each in found if each["endpoint"] == "generate")

    def until(self, *components):
        """Wait until the frontend lists exactly these workers."""
        deadline_s = time.monotonic() + START_S
        while self.registered() != list(components):
            assert time.monotonic() < deadline_s, (self.registered(), self.logs())
            time.sleep(0.1)

    def ask(self, tokens):
        """Ask for a chat of so many tokens; return how many came, or what the frontend said instead."""
        body = {"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["usage"]["completion_tokens"]
        except urllib.error.HTTPError as exc:
            return f"{exc.code}: {exc.read().decode()}"

    def logs(self):
        """Return the ends of all logs."""
        return {path.name: path.read_text()[-500:] for path in self._folder.glob("*.log")}

    def stop(self):
        """End all, as SIGTERM does, or else by force."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def python():
    """The interpreter that has Dynamo."""
    folder = Path(os.environ.get("PENSTOCK_DYNAMO") or ROOT / ".venv-dynamo").absolute()
    if not (folder / "bin" / "python").exists():
        pytest.skip(f"{folder} is no environment with NVIDIA's Dynamo; make dynamo, see docs/dynamo.md")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def pods(python, tmp_path_factory):
    """A frontend, a prefill and two decode workers, and the graph's own accounts and rights."""
    reason = missing_assets()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("dynamo")
    write_model(folder / "tiny-model", RandomModel(vocabulary=2048))
    spec = {
        "model": {"name": str(folder / "tiny-model"), "servedName": "llama"},
        "runtime": "dynamo",
        "services": {
            "frontend": {"role": "router"},
            "prefill": {"role": "prefill"},
            "decode": {"role": "decode", "replicas": 2},
        },
        "router": {"policy": "kv-cost"},
        "engine": {"mocker": True},
    }
    graph = GraphDeployment.model_validate({"metadata": {"name": "g"}, "spec": spec})
    with ControlPlane() as plane:
        definition = f"--filename={ROOT / 'manifests' / 'dynamo-discovery.yaml'}"
        plane.kubectl("create", definition)
        plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", definition)
        plane.kubectl("create", "namespace", NAMESPACE)
        objects = children(
            graph, BuildContext(owner_uid="", namespace=NAMESPACE), replicas={}, unavailable={}
        )
        plane.apply(*(each for each in objects if each["kind"] in GRANTED))
        made = Pods(plane, folder, python, graph)
        try:
            made.start("frontend", "g-frontend-a")
            made.start("prefill", "g-prefill-a")
            made.start("decode", "g-decode-a")
            made.start("decode", "g-decode-b")
            yield made
        finally:
            made.stop()


def test_workers_register_by_objects_and_a_chat_is_answered(pods):
    """With the rights of the graph's Role, and a model that the frontend has from the workers."""
    pods.until("backend", "backend", "prefill")
    assert pods.ask(tokens=8) == 8, pods.logs()


def test_a_pod_out_of_its_service_is_sent_nothing_new_and_finishes(pods):
    """As a drain begins: the frontend lists it no more, and what it was streaming comes to its end."""
    pods.until("backend", "backend", "prefill")
    answers = []
    streams = [threading.Thread(target=lambda: answers.append(pods.ask(tokens=1200))) for _ in range(6)]
    for each in streams:
        each.start()
    time.sleep(1.5)  # both decode workers have some by then; 1,200 tokens take 7 s and more
    pods.endpoint("decode", "g-decode-b", ready=False)
    pods.until("backend", "prefill")
    assert answers == []
    for each in streams:
        each.join(60)
    assert answers == [1200] * 6
    assert pods.ask(tokens=8) == 8, pods.logs()
    pods.endpoint("decode", "g-decode-b", ready=True)
    pods.until("backend", "backend", "prefill")
