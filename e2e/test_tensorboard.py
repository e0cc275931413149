"""The chart's TensorBoard: the planner writes on a claim, a Deployment alongside it reads and shows."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from typing import NamedTuple

import pytest
from images import NODES, container_tool, load_image
from kube import SYSTEM, wait_for
from traffic import IMAGE

FOLDER = "/var/penstock-e2e-logs"
"""On each node; nobody but root may write there until the kubelet gives it to the planner's group."""

VOLUME = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "penstock-e2e-logs"},
    "spec": {
        "capacity": {"storage": "64Mi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "penstock-e2e",
        "local": {"path": FOLDER},
        "nodeAffinity": {
            "required": {
                "nodeSelectorTerms": [
                    {
                        "matchExpressions": [
                            {"key": "kubernetes.io/hostname", "operator": "In", "values": list(NODES)}
                        ]
                    }
                ]
            }
        },
    },
}


@pytest.fixture(scope="module")
def volume(kube):
    """A volume for the planner's claim, without a provisioner: each node has a folder of its own behind it.

    So who runs on another node than the planner sees nothing, as with a disk that one node mounts.
    """
    for node in NODES:
        kube.run(container_tool(), "exec", node, "mkdir", "--mode=755", "--parents", FOLDER)
    kube.apply(VOLUME, namespace=SYSTEM)
    yield
    kube.kubectl("delete", "persistentvolume", VOLUME["metadata"]["name"], "--wait=false")
    for node in NODES:
        kube.run(container_tool(), "exec", node, "rm", "--recursive", "--force", FOLDER)


@pytest.fixture(scope="module")
def tensorboard(kube, release, install, volume, tmp_path_factory):
    """A running release upgraded to keep the planner's logs and to show them; ends as it was."""
    load_image(
        kube,
        f"{IMAGE}-tensorboard",
        tmp_path_factory.mktemp("image"),
        nodes=NODES,
        variant="tensorboard",
    )
    install(
        planner={"logs": {"size": "64Mi", "storageClass": "penstock-e2e"}},
        tensorboard={"enabled": True, "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}},
    )
    with kube.forwarded(SYSTEM, "service/penstock-tensorboard", 6006) as url:
        yield url
    install()


def data(url, path, **query):
    """Ask one of TensorBoard's plugins."""
    where = f"{url}/data/plugin/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(where, timeout=10) as answer:
        return json.load(answer)


class Point(NamedTuple):
    """One point of a scalar: its time since the epoch, the planner's own simulated time, and the value."""

    wall_s: float
    step: int
    value: float


def points(url, graph, curve, chart):
    """Return a curve's points, oldest first: each curve of a graph is a run, named after its charts and itself."""
    run = f"{graph.namespace}/{graph.name}/{chart.partition('/')[0]}/{curve}"
    return [Point(*each) for each in data(url, "scalars/scalars", run=run, tag=chart)]


def has_curves(url, graph):
    """Return a check that TensorBoard shows replicas of a graph."""
    run = f"{graph.namespace}/{graph.name}/replicas/desired"
    return lambda: run in data(url, "scalars/tags")


@pytest.mark.nightly
def test_tensorboard_shows_what_the_planner_decides(kube, deploy, tensorboard):
    """A graph has runs of its own, with its replicas and its decisions in words; a new planner resumes them."""
    services = {"worker": {"replicas": 2}}
    graph = deploy("aggregated", services=services, planner={"adjustmentIntervalSeconds": 5})
    wait_for("the graph has curves", has_curves(tensorboard, graph), 60, every_s=2)

    def desired():
        return points(tensorboard, graph, "desired", "replicas/aggregated")

    # Mode adaptive holds what it found for a minute.
    wait_for("the planner wants one worker less", lambda: desired()[-1].value == 1, 150, every_s=2)
    assert desired()[0].value == 2
    assert points(tensorboard, graph, "budget", "gpus/count")[-1].value == 8
    notes = f"{graph.namespace}/{graph.name}/planner"
    texts = [each["text"] for each in data(tensorboard, "text/text", run=notes, tag="decisions/text_summary")]
    assert any("2 -&gt; 1" in each for each in texts), texts

    before = desired()
    planner = "app.kubernetes.io/component=planner"
    kube.kubectl("delete", "pods", "--namespace", SYSTEM, f"--selector={planner}")
    gone_s = time.time()
    wait_for("a new planner draws on", lambda: desired()[-1].wall_s > gone_s, 90, every_s=2)
    assert desired()[: len(before)] == before
    steps = [each.step for each in desired()]
    assert steps == sorted(steps)


@pytest.mark.nightly
def test_the_dashboard_opens_as_a_user_opens_it(kube, deploy, tensorboard):
    """`penstock dashboard --kubernetes` finds the pod, prints the page's address, and serves page and charts there."""
    graph = deploy("aggregated", planner={"adjustmentIntervalSeconds": 5})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "penstock.cli", "dashboard", "--kubernetes", "--port", str(port)]
    process = subprocess.Popen(
        command, env=kube.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = process.stdout.readline()
        assert f"http://localhost:{port}/" in printed
        assert "Forwarding from" in process.stdout.readline()
        url = f"http://localhost:{port}"
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b"TensorBoard" in page.read()
        wait_for("the graph has curves", has_curves(url, graph), 60, every_s=2)
        charts = [
            chart["title"]
            for category in data(url, "custom_scalars/layout")["category"]
            for chart in category["chart"]
        ]
        assert charts
    finally:
        process.terminate()
        process.communicate(timeout=10)
