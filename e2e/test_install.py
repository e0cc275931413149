"""The first quarter of an hour: install, apply, ask, look."""

from __future__ import annotations

import pytest
from traffic import client_of


@pytest.fixture(scope="module")
def graph(deploy_for_all):
    """The first sample, with two routers."""
    return deploy_for_all(services={"frontend": {"replicas": 2}})


def test_a_sample_serves_the_official_client(kube, graph):
    """Requests through the router's Service are answered, streamed and counted; kubectl shows the graph."""
    with (
        kube.forwarded(graph.namespace, f"service/{graph.name}-frontend", 8000) as url,
        client_of(url) as client,
    ):
        assert [model.id for model in client.models.list()] == ["llama"]
        whole = client.completions.create(model="llama", prompt="Hello", max_tokens=16)
        assert whole.usage.completion_tokens <= 16
        stream = client.chat.completions.create(
            model="llama",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=32,
            stream=True,
            extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
        )
        events = list(stream)
        assert events[-1].usage.completion_tokens == 32
        assert len([each for each in events if each.choices]) > 1

    table = kube.kubectl("get", "gd", *graph.scope)
    header, row = table.splitlines()
    assert header.split() == ["NAME", "PHASE", "PREFILL", "DECODE", "GPUS", "MODEL", "AGE"]
    assert row.split()[:5] == ["llama", "Ready", "1/1", "1/1", "2/8"]
    adapters = kube.kubectl("get", "gsa", *graph.scope)
    assert {"llama-prefill", "llama-decode"} == {line.split()[0] for line in adapters.splitlines()[1:]}
    told = kube.kubectl("describe", "gd", graph.name, *graph.scope)
    for condition in ("Ready", "Progressing", "Degraded", "PlannerActive", "BudgetRespected", "Schedulable"):
        assert condition in told


def test_every_pod_passes_restricted_pod_security(kube, deploy):
    """The namespace demands it, so that a pod that breaks it would not exist."""
    graph = deploy("aggregated")
    labels = kube.get("namespace", graph.namespace)["metadata"]["labels"]

    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert graph.ready("router") == 1
    assert graph.ready("aggregated") == 1


def test_several_routers_share_the_load(kube, graph):
    """Each router replica knows every worker."""
    assert graph.ready("router") == 2

    for pod in graph.pods("router"):
        with (
            kube.forwarded(graph.namespace, f"pod/{pod['metadata']['name']}", 8000) as url,
            client_of(url) as client,
        ):
            answer = client.completions.create(model="llama", prompt="Hello", max_tokens=4)
            assert answer.choices[0].finish_reason in {"length", "stop"}
