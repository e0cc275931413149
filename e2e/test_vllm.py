"""Real vLLM in pods: ready, a chat handed from prefill to decode, scaled by the planner, drained, nothing lost.

Needs VLLM_IMAGE, an image that `make image-vllm-cpu` has built; skipped without, because building and loading it takes
many minutes.
"""

from __future__ import annotations

import base64
import json
import os

import pytest
import yaml
from images import NODES, SAMPLES, put_image
from kube import Graph, merge, wait_for
from traffic import Load, client_of

from penstock.local.random_model import RandomModel, write_model

IMAGE = os.environ.get("VLLM_IMAGE")
NODE = NODES[0]
"""The only one with GPUs on offer, and with the image."""
GPUS = 3
MODEL = "/models/tiny"
START_S = 900.0
"""Three vLLMs that start alongside each other on two cores need minutes."""

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(IMAGE is None, reason="VLLM_IMAGE names no image of `make image-vllm-cpu`"),
]


@pytest.fixture(scope="module")
def node(kube, tmp_path_factory):
    """A node that has the image and says that it has GPUs."""
    put_image(kube, IMAGE, tmp_path_factory.mktemp("vllm"), nodes=(NODE,), timeout_s=1200.0)
    patch = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(GPUS)}}})
    kube.kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", f"--patch={patch}")
    yield NODE
    patch = '[{"op":"remove","path":"/status/capacity/nvidia.com~1gpu"}]'
    kube.kubectl("patch", "node", NODE, "--subresource=status", "--type=json", f"--patch={patch}")


@pytest.fixture(scope="module")
def graph(kube, release, namespace_for_all, node, tmp_path_factory):
    """The sample for processors on the cluster, its model from a ConfigMap."""
    folder = tmp_path_factory.mktemp("model")
    files = write_model(folder, RandomModel(layers=1, hidden_size=80))
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in files}
    manifest = yaml.safe_load((SAMPLES / "vllm-cpu.yaml").read_text())
    pod = {
        "containers": [
            {
                "name": "main",
                "resources": {"requests": {"cpu": "10m", "memory": "1Gi"}},
                "volumeMounts": [{"name": "model", "mountPath": MODEL}],
            }
        ],
        "volumes": [{"name": "model", "configMap": {"name": "tiny-model"}}],
    }
    services = {name: {"podTemplate": {"spec": pod}} for name in ("prefill", "decode")}
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    merge(
        manifest["spec"],
        {
            "model": {"name": MODEL},
            "image": IMAGE,
            "services": services,
            "env": [{"name": name, "value": value} for name, value in settings.items()],
            "engine": {"pythonEnvironment": None},
            # So that what waits for a prompt's computation is late on a fast machine, too.
            "slo": {"ttft": "1s"},
        },
    )
    model = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-model"}, "binaryData": data}
    # Too large for the annotation in which `kubectl apply` keeps what it has applied.
    kube.kubectl("create", "--namespace", namespace_for_all, "--filename=-", stdin=yaml.safe_dump(model))
    kube.apply(manifest, namespace=namespace_for_all)
    graph = Graph(kube, namespace_for_all, manifest["metadata"]["name"])
    graph.wait_ready(START_S)
    return graph


def test_a_chat_is_handed_from_prefill_to_decode(kube, graph):
    """Streamed and whole the same text; decode has read the prompt's KV from prefill."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Water that waits above the dam. " * 8}],
        "max_tokens": 16,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    with (
        kube.forwarded(graph.namespace, f"service/{graph.name}-frontend", 8000) as url,
        client_of(url) as client,
    ):
        whole = client.chat.completions.create(**body)
        events = list(client.chat.completions.create(**body, stream=True))

    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert whole.choices[0].message.content == text
    (pod,) = graph.pods("decode")
    page = kube.kubectl(
        "get",
        "--raw",
        f"/api/v1/namespaces/{graph.namespace}/pods/{pod['metadata']['name']}:8000/proxy/metrics",
    )
    reads = [line for line in page.splitlines() if line.startswith("vllm:nixl_xfer_time_seconds_count")]
    assert sum(float(line.split()[-1]) for line in reads) >= 2


def test_the_planner_scales_prefill_up_and_down_without_a_loss(graph):
    """By vLLM's own metrics; the pod that leaves is drained."""
    load = Load(graph, "load", concurrency=64, max_tokens=2)
    wait_for("a second prefill worker is ready", lambda: graph.ready("prefill") == 2, START_S)
    outcome = load.stop()
    assert outcome.lost == []
    assert outcome.answered > 64
    wait_for("prefill is back at one worker", lambda: len(graph.pods("prefill")) == 1, START_S)
    told = graph.kube.kubectl("describe", "gd", graph.name, *graph.scope)
    assert "prefill 1 -> 2" in told
