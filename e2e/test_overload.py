"""Admission thresholds change by `kubectl apply` while everything runs: no pod is restarted for them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest
from kube import Graph, wait_for
from traffic import Load

PROPAGATION_S = 150
"""A kubelet brings a changed ConfigMap within its sync period, 10 s in cluster.yaml and else 60 s, and its cache's age."""


def processes(graph: Graph) -> set[tuple[str, int]]:
    """Each pod's uid, and how often its container was restarted."""
    pods = graph.pods("router,prefill,decode")
    return {(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in pods}


def ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, str], Any]:
    """Send one request; return status, headers in lower case, and JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, json.load(answer)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, {k.lower(): v for k, v in exc.headers.items()}, json.load(exc)


def apply(graph: Graph, admission: dict[str, Any]) -> None:
    """Apply the graph with another admission section, as a user edits the manifest."""
    found = graph.object()
    manifest = {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "metadata": {"name": graph.name},
        "spec": {**found["spec"], "router": {**found["spec"].get("router", {}), "admission": admission}},
    }
    graph.kube.apply(manifest, namespace=graph.namespace)


@pytest.mark.nightly
def test_thresholds_change_by_kubectl_apply_without_a_restart(kube, deploy):
    """Off: everything is taken. With a threshold that any stream exceeds: rejected. Off again: taken again."""
    # One router: each reads a changed ConfigMap at its own time.
    one = {"frontend": {"replicas": 1}}
    graph = deploy(model={"contextTokens": 4096}, planner={"enabled": False}, services=one)
    before = processes(graph)
    load = Load(graph, "streams", concurrency=2, max_tokens=2000)
    prompt = {"model": "llama", "prompt": "Hello", "max_tokens": 1}
    with kube.forwarded(graph.namespace, f"service/{graph.name}-frontend", 8000) as url:
        assert ask(url, "/v1/completions", prompt)[0] == 200

        apply(graph, {"mode": "token-capacity", "activeDecodeBlocksThreshold": 0.0})
        wait_for(
            "the router has the threshold",
            lambda: "0.0" in json.dumps(ask(url, "/busy_threshold")[2]),
            PROPAGATION_S,
        )
        wait_for("a request is rejected", lambda: ask(url, "/v1/completions", prompt)[0] == 503, 30)
        status, headers, body = ask(url, "/v1/completions", prompt)
        if status == 503:  # no stream may have run at that moment
            assert int(headers["retry-after"]) >= 1
            assert body["type"] == "service_unavailable"

        apply(graph, {"mode": "none"})
        wait_for(
            "requests are taken again",
            lambda: all(ask(url, "/v1/completions", prompt)[0] == 200 for _ in range(5)),
            PROPAGATION_S,
        )
    load.stop()
    assert processes(graph) == before
