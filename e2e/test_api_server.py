"""The API server hangs under load, then is gone: requests do not notice, and what was asked for meanwhile comes about."""

from __future__ import annotations

import subprocess
import time

import pytest
from images import CLUSTER, container_tool
from kube import SYSTEM, say, wait_for
from traffic import Load

FIXED = {
    "model": {"contextTokens": 4096},
    "engine": {"streamIntervalTokens": 8},
    "services": {
        "frontend": {"replicas": 2},
        "prefill": {"replicas": 2, "scaling": {"minReplicas": 2, "maxReplicas": 2}},
        "decode": {"replicas": 2, "scaling": {"minReplicas": 2, "maxReplicas": 2}},
    },
    "planner": {"mode": "load", "adjustmentIntervalSeconds": 5},
}
AWAY_S = 30
"""Longer than the Leases of operator and planner, and shorter than Kubernetes keeps a node that it hears nothing of."""


def signal(kube, name):
    """Send a signal to the API server."""
    kube.run(
        container_tool(), "exec", f"{CLUSTER}-control-plane", "pkill", f"-{name}", "--exact", "kube-apiserver"
    )


@pytest.fixture
def hang(kube):
    """Returns a function that stops the API server for a while, and lets it continue."""
    yield lambda: signal(kube, "STOP")
    signal(kube, "CONT")


def answers(kube):
    """Whether the API server does."""
    try:
        return kube.kubectl("get", "--raw=/readyz", "--request-timeout=2s") == "ok"
    except subprocess.CalledProcessError:
        return False


@pytest.mark.nightly
def test_requests_do_not_notice_an_api_server_that_hangs_and_dies(kube, deploy, hang):
    """Stopped for longer than a Lease, then killed: no stream is lost, no worker restarts, an edit is carried out."""
    graph = deploy(**FIXED)
    load = Load(graph, "load", concurrency=8, max_tokens=400)
    before = {pod["metadata"]["uid"] for pod in graph.pods("router,prefill,decode")}

    hang()
    until_s = time.monotonic() + AWAY_S
    assert not answers(kube)
    time.sleep(max(0.0, until_s - time.monotonic()))
    signal(kube, "CONT")
    wait_for("the API server answers", lambda: answers(kube), 120)
    signal(kube, "KILL")
    wait_for("a new API server answers", lambda: answers(kube), 180)

    graph.patch({"services": {"frontend": {"replicas": 3}}})
    wait_for("the edit is carried out", lambda: graph.ready("router") == 3, 180)
    generation = graph.object()["metadata"]["generation"]
    wait_for(
        "the planner plans the graph as it is now",
        lambda: graph.condition("PlannerActive").get("observedGeneration") == generation,
        120,
    )
    outcome = load.stop()
    assert outcome.lost == []
    assert outcome.answered > 8
    pods = graph.pods("router,prefill,decode")
    assert before <= {pod["metadata"]["uid"] for pod in pods}
    for pod in (*pods, *kube.get("pods", "--namespace", SYSTEM)):
        restarts = pod["status"]["containerStatuses"][0]["restartCount"]
        say(f"{pod['metadata']['name']}: {restarts} restarts")
        assert restarts == 0 or "penstock.dev/graph" not in pod["metadata"]["labels"]
