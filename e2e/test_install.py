"""The first quarter of an hour: install, apply, ask, look; edits by hand are repaired; a deletion leaves nothing."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import pytest
from kube import SYSTEM, wait_for
from traffic import Load, client_of


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
    assert header.split() == ["NAME", "PHASE", "SINCE", "PREFILL", "DECODE", "GPUS", "MODEL", "AGE"]
    assert [*row.split()[:2], *row.split()[3:6]] == ["llama", "Ready", "1/1", "1/1", "2/8"]
    adapters = kube.kubectl("get", "gsa", *graph.scope)
    assert {"llama-prefill", "llama-decode"} == {line.split()[0] for line in adapters.splitlines()[1:]}
    told = kube.kubectl("describe", "gd", graph.name, *graph.scope)
    for condition in ("Ready", "Progressing", "Degraded", "PlannerActive", "BudgetRespected", "Schedulable"):
        assert condition in told


def test_helm_test_reaches_operator_and_planner(kube, graph):
    """Its pod, of another name and address, finds both ready."""
    assert "Phase:          Succeeded" in kube.helm("test", "penstock", "--namespace", SYSTEM)


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


def test_a_router_setting_restarts_no_worker(graph):
    """Only the router rolls; requests are answered throughout."""
    load = Load(graph, "load", concurrency=4, max_tokens=100)
    workers = {pod["metadata"]["uid"] for pod in graph.pods()}
    routers = {pod["metadata"]["uid"] for pod in graph.pods("router")}

    graph.patch({"router": {"policy": "round-robin"}})

    wait_for(
        "both routers are new",
        lambda: (
            len(graph.pods("router")) == 2
            and routers.isdisjoint(pod["metadata"]["uid"] for pod in graph.pods("router"))
        ),
        180,
    )
    graph.wait_ready()
    assert {pod["metadata"]["uid"] for pod in graph.pods()} == workers
    outcome = load.stop()
    assert outcome.lost == []
    assert outcome.answered > 0


@contextmanager
def _held_service(graph):
    """Keep the routers' Service until the clients have stopped; its deletion is only requested meanwhile.

    An address of a Service that is gone belongs to nobody: packets leave the cluster, and whatever is out there answers.
    A proxy beyond the nodes has answered 404.
    """

    def hold(finalizers):
        patch = json.dumps({"metadata": {"finalizers": finalizers}})
        name = f"{graph.name}-frontend"
        graph.kube.kubectl("patch", "service", name, *graph.scope, "--type=merge", f"--patch={patch}")

    hold(["penstock.dev/e2e"])
    try:
        yield
    finally:
        hold(None)


def test_a_deleted_graph_drains_and_leaves_nothing(kube, deploy):
    """Requests complete or are refused, whenever they come; afterwards no object carries the graph's label."""
    graph = deploy(model={"contextTokens": 4096}, engine={"streamIntervalTokens": 8})
    loads = [Load(graph, f"load-{number}", concurrency=2, max_tokens=number) for number in (20, 1000)]
    with _held_service(graph):
        kube.kubectl("delete", "gd", graph.name, *graph.scope, "--wait=false")
        wait_for("the routers are gone", lambda: not graph.pods("router"), 120, every_s=0.2)
        for load in loads:
            load.finish()
        outcomes = [load.stop() for load in loads]

    assert all(each.answered >= 2 for each in outcomes)
    problems = [each["problem"] for outcome in outcomes for each in outcome.lost]
    assert [each for each in problems if not each.startswith(("status 503", "ConnectionRefused"))] == []
    wait_for("no object of the graph is left", lambda: not graph.remains(), 180)


def test_an_idle_graph_is_gone_within_15_seconds(kube, deploy):
    """Routers get their pause for late requests; nothing else is waited for. 7 to 11 s were measured."""
    graph = deploy()
    began_s = time.monotonic()
    kube.kubectl("delete", "gd", graph.name, *graph.scope)
    assert time.monotonic() - began_s <= 15
