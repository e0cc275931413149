"""Pods of each kind die under load; everything comes back, and what was not on them never notices."""

from __future__ import annotations

import urllib.request

import pytest
from kube import SYSTEM, wait_for
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
CONCURRENCY = 8
EVERY = "router,prefill,decode"


@pytest.fixture(scope="module")
def graph(deploy_for_all):
    """Two of each, and a planner that may not change it."""
    return deploy_for_all(**FIXED)


@pytest.mark.parametrize("role", ["prefill", "decode", pytest.param("router", marks=pytest.mark.nightly)])
def test_a_killed_workers_pod_costs_no_request(kube, graph, role):
    """A pod killed without grace is replaced; a worker's streams continue elsewhere, only a router's own end early."""
    load = Load(graph, "load", concurrency=CONCURRENCY, max_tokens=200)
    victim = graph.pods(role)[0]["metadata"]["name"]

    kube.kubectl("delete", "pod", victim, *graph.scope, "--grace-period=0", "--force")

    wait_for(f"two {role} pods are ready again", lambda: graph.ready(role) == 2, 120)
    graph.wait_ready()
    fresh = Load(graph, "fresh", concurrency=2, max_tokens=50)
    outcome = load.stop()
    assert outcome.answered > 0
    assert outcome.lost == [] if role != "router" else len(outcome.lost) <= CONCURRENCY, outcome.lost
    outcome = fresh.stop()
    assert (outcome.answered > 0, outcome.lost) == (True, [])


def picker_first(kube, graph):
    """Return the routers' pods, the one that picks before the others."""

    def picks(pod):
        with (
            kube.forwarded(graph.namespace, f"pod/{pod['metadata']['name']}", 8000) as url,
            urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer,
        ):
            return b"penstock_router_is_picker 1" in answer.read()

    return sorted(graph.pods("router"), key=picks, reverse=True)


def test_a_killed_picker_costs_other_routers_clients_nothing(kube, graph):
    """Asked through the other router, every request is answered whole."""
    picker, other = picker_first(kube, graph)
    load = Load(graph, "through", concurrency=CONCURRENCY, max_tokens=200, host=other["status"]["podIP"])

    kube.kubectl("delete", "pod", picker["metadata"]["name"], *graph.scope, "--grace-period=0", "--force")

    wait_for("two routers are ready again", lambda: graph.ready("router") == 2, 120)
    graph.wait_ready()
    outcome = load.stop()
    assert (outcome.answered > 0, outcome.lost) == (True, [])


def test_a_drained_node_loses_nothing(kube, graph):
    """Each PodDisruptionBudget lets one replica go at a time, and each stream completes."""
    load = Load(graph, "load", concurrency=CONCURRENCY, max_tokens=400)
    node = graph.pods("decode")[0]["spec"]["nodeName"]
    on_it = {pod["metadata"]["uid"] for pod in graph.pods(EVERY) if pod["spec"]["nodeName"] == node}

    drain = (
        "drain",
        node,
        "--pod-selector=penstock.dev/graph",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
    )
    try:
        kube.kubectl(*drain, "--timeout=240s", timeout_s=250)
        assert on_it.isdisjoint(pod["metadata"]["uid"] for pod in graph.pods(EVERY))
        wait_for("two of each role are ready elsewhere", lambda: graph.ready(EVERY) == 6, 180)
    finally:
        kube.kubectl("uncordon", node)

    outcome = load.stop()
    assert outcome.lost == []
    assert outcome.answered > CONCURRENCY


def test_requests_do_not_notice_that_the_control_plane_died(kube, graph):
    """Operator and planner killed: no request is lost, no worker restarts, and both take over again."""
    load = Load(graph, "load", concurrency=CONCURRENCY, max_tokens=200)
    before = {pod["metadata"]["uid"] for pod in graph.pods("router,prefill,decode")}
    selector = "--selector=app.kubernetes.io/component in (operator, planner)"

    kube.kubectl("delete", "pods", "--namespace", SYSTEM, selector, "--grace-period=0", "--force")

    graph.patch({"services": {"frontend": {"replicas": 3}}})
    generation = graph.object()["metadata"]["generation"]
    wait_for("the operator acts on the change", lambda: graph.ready("router") == 3, 120)
    wait_for(
        "the planner plans the graph as it is now",
        lambda: graph.condition("PlannerActive").get("observedGeneration") == generation,
        120,
    )
    outcome = load.stop()
    assert outcome.lost == []
    assert before <= {pod["metadata"]["uid"] for pod in graph.pods("router,prefill,decode")}
