"""NVIDIA's own Dynamo in pods: registered, a chat answered, scaled by the planner, drained, nothing lost, nothing left.

Needs DYNAMO_IMAGE, an image that `make image-dynamo` has built; skipped without.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.request

import pytest
import yaml
from images import NODES, ROOT, SAMPLES, put_image
from kube import Graph, merge, wait_for
from traffic import Load, client_of

from penstock.local.random_model import RandomModel, write_model

IMAGE = os.environ.get("DYNAMO_IMAGE")
DEFINITION = ROOT / "manifests" / "dynamo-discovery.yaml"
START_S = 300.0
SCALE_S = 240.0
SMALL_AND_QUICK = {
    "services": {role: {"scaling": {"maxReplicas": 2}} for role in ("prefill", "decode")},
    "engine": {"kvBlocks": 128, "blockTokens": 64},
    "planner": {
        "mode": "load",
        "adjustmentIntervalSeconds": 5,
        "maxGpuBudget": 4,
        "newDecodeWorkerGraceIntervals": 1,
    },
}
"""8,192 tokens of KV per worker: a dozen streams fill it. Decisions every 5 s."""

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(IMAGE is None, reason="DYNAMO_IMAGE names no image of `make image-dynamo`"),
]


@pytest.fixture(scope="module")
def model(kube, namespace_for_all, tmp_path_factory):
    """The image on the nodes, and a model's tokenizer and configuration in a ConfigMap."""
    put_image(kube, IMAGE, tmp_path_factory.mktemp("dynamo"), nodes=NODES)
    files = write_model(tmp_path_factory.mktemp("model"), RandomModel(vocabulary=2048))
    # A mocker reads no weights, which would be too large for a ConfigMap.
    read = [path for path in files if path.suffix != ".safetensors"]
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in read}
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-model"}, "binaryData": data}
    kube.apply(held, namespace=namespace_for_all)


@pytest.fixture(scope="module")
def graph(kube, release, namespace_for_all, model):
    """The sample for clusters, small; it waits for the kind in which Dynamo's workers register until that is there."""
    manifest = yaml.safe_load((SAMPLES / "dynamo-kubernetes.yaml").read_text())
    merge(manifest["spec"], {"image": IMAGE, **SMALL_AND_QUICK})
    kube.apply(manifest, namespace=namespace_for_all)
    graph = Graph(kube, namespace_for_all, manifest["metadata"]["name"])
    wait_for(
        "the graph asks for Dynamo's kind", lambda: graph.condition("Degraded").get("reason") == "MissingCRD"
    )
    kube.kubectl("create", f"--filename={DEFINITION}")
    graph.wait_ready(START_S)
    yield graph
    kube.kubectl("delete", f"--filename={DEFINITION}")


@pytest.fixture
def url(kube, graph):
    """The frontends' Service."""
    with kube.forwarded(graph.namespace, f"service/{graph.name}-frontend", 8000) as address:
        yield address


def registered(url: str) -> list[str]:
    """Return the components of the workers that the frontend lists, sorted."""
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        found = json.load(answer)["instances"]
    return sorted(each["component"] for each in found if each["endpoint"] == "generate")


def test_both_roles_have_registered(kube, graph, url):
    """By an object of each pod, which the pod owns; the frontend lists the workers and the model."""
    wait_for("the frontend lists both workers", lambda: registered(url) == ["backend", "prefill"], 60)
    pods = {each["metadata"]["name"]: each["metadata"]["uid"] for each in graph.pods()}
    found = kube.get("dynamoworkermetadatas", *graph.scope)
    owners = {each["metadata"]["name"]: each["metadata"]["ownerReferences"][0]["uid"] for each in found}
    assert pods.items() <= owners.items()
    with client_of(url) as client:
        # The frontend fetches the workers' cards first.
        wait_for("the model is listed", lambda: [each.id for each in client.models.list()] == ["llama"], 60)


def test_a_chat_is_answered_through_the_frontends_service(url):
    """Streamed and whole, by the official client."""
    body = {
        "model": "llama",
        "messages": [{"role": "user", "content": "Where does the water go?"}],
        "max_tokens": 8,
    }
    with client_of(url) as client:
        whole = client.chat.completions.create(**body)
        events = list(client.chat.completions.create(**body, stream=True))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert whole.usage.completion_tokens == 8
    assert text.count(".") == 8  # the mocker's tokens are words of the vocabulary's filled part


def test_the_planner_scales_decode_up_and_down_and_loses_no_stream(graph):
    """By Dynamo's own metrics; the pod that leaves has finished its streams."""
    heavy = Load(graph, "heavy", concurrency=24, max_tokens=300)
    wait_for("a second decode worker is ready", lambda: graph.ready("decode") == 2, SCALE_S)
    light = Load(graph, "light", concurrency=2, max_tokens=300)
    outcome = heavy.stop()
    assert outcome.lost == []
    assert outcome.answered > 24
    wait_for("decode is back at one worker", lambda: len(graph.pods("decode")) == 1, SCALE_S)
    outcome = light.stop()
    assert outcome.lost == []
    assert outcome.answered > 2
    told = graph.kube.kubectl("describe", "gd", graph.name, *graph.scope)
    assert "decode 1 -> 2" in told


def test_a_pod_that_leaves_is_not_listed_any_more_while_it_lives(graph, url):
    """A prefill worker too, which reports no KV usage: it goes once its requests are done, not when its grace is over."""
    graph.patch({"services": {"prefill": {"replicas": 2, "scaling": {"minReplicas": 2}}}})
    wait_for("two prefill workers are ready", lambda: graph.ready("prefill") == 2, SCALE_S)
    both = ["backend", "prefill", "prefill"]
    wait_for("the frontend lists both prefill workers", lambda: registered(url) == both, 60)
    light = Load(graph, "light", concurrency=2, max_tokens=100)
    one = {"replicas": 1, "scaling": {"minReplicas": 1, "maxReplicas": 1}}
    graph.patch({"services": {"prefill": one}})
    wait_for(
        "the frontend lists one prefill worker",
        lambda: registered(url) == ["backend", "prefill"],
        60,
        every_s=0.2,
    )
    assert len(graph.pods("prefill")) == 2, "the pod was gone before the frontend turned away"
    wait_for("one prefill worker is left", lambda: len(graph.pods("prefill")) == 1, 90)
    assert light.stop().lost == []


def test_deleting_the_graph_leaves_nothing(kube, graph):
    """Neither objects nor registrations."""
    kube.kubectl("delete", "gd", graph.name, *graph.scope, "--wait=false")
    wait_for("the graph's objects are gone", lambda: not graph.remains(), 180)
    wait_for("registrations are gone", lambda: not kube.get("dynamoworkermetadatas", *graph.scope), 60)
