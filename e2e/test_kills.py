"""Pods of each kind die under load; everything comes back, and what was not on them never notices."""

from __future__ import annotations

import base64
import json
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


@pytest.fixture(scope="module")
def graph(deploy_for_all):
    """Two of each, and a planner that may not change it."""
    return deploy_for_all(**FIXED)


@pytest.mark.parametrize("role", ["prefill", "decode", pytest.param("router", marks=pytest.mark.nightly)])
def test_a_killed_pod_costs_at_most_its_own_requests(kube, graph, role):
    """A pod killed without grace is replaced; only streams that ran on it end early."""
    load = Load(graph, "load", concurrency=CONCURRENCY, max_tokens=200)
    victim = graph.pods(role)[0]["metadata"]["name"]

    kube.kubectl("delete", "pod", victim, *graph.scope, "--grace-period=0", "--force")

    wait_for(f"two {role} pods are ready again", lambda: graph.ready(role) == 2, 120)
    graph.wait_ready()
    fresh = Load(graph, "fresh", concurrency=2, max_tokens=50)
    outcome = load.stop()
    assert outcome.answered > 0
    assert len(outcome.lost) <= CONCURRENCY
    outcome = fresh.stop()
    assert (outcome.answered > 0, outcome.lost) == (True, [])


def secret_header(kube, graph, pod):
    """Return the header by which the routers of a graph know each other."""
    variables = {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}
    name = variables["PENSTOCK_GRAPH_SECRET"]["valueFrom"]["secretKeyRef"]["name"]
    secret = kube.get("secret", name, *graph.scope)
    return {"x-penstock-graph-secret": base64.b64decode(secret["data"]["secret"]).decode()}


def deciding_first(kube, graph):
    """Return the routers' pods, the one that decides before the others: it has run for the longest."""
    ages = []
    for pod in graph.pods("router"):
        with kube.forwarded(graph.namespace, f"pod/{pod['metadata']['name']}", 8000) as url:
            request = urllib.request.Request(f"{url}/peer_load", headers=secret_header(kube, graph, pod))
            with urllib.request.urlopen(request, timeout=30) as answer:
                ages.append((json.load(answer)["decides"]["since"], pod))
    return [pod for _, pod in sorted(ages, key=lambda each: each[0])]


def test_a_killed_decider_costs_the_streams_that_it_carried(kube, graph):
    """Asked through the other router: a stream that had begun ends by an error event, everything else is answered.

    Counted at the clients, each of which has one stream at a time: no client loses two, and none gets anything but the
    event, which comes behind a first token alone.
    """
    decider, other = deciding_first(kube, graph)
    load = Load(graph, "through", concurrency=CONCURRENCY, max_tokens=200, host=other["status"]["podIP"])

    kube.kubectl("delete", "pod", decider["metadata"]["name"], *graph.scope, "--grace-period=0", "--force")

    wait_for("two routers are ready again", lambda: graph.ready("router") == 2, 120)
    graph.wait_ready()
    outcome = load.stop()
    assert outcome.answered > 0
    assert [each for each in outcome.lost if "upstream_broken" not in each["problem"]] == []
    clients = [each["client"] for each in outcome.lost]
    assert len(clients) == len(set(clients))


def test_a_pod_that_is_asked_to_leave_loses_nothing(kube, graph):
    """`kubectl delete pod`, an eviction and a node drain give notice: each stream completes."""
    load = Load(graph, "load", concurrency=CONCURRENCY, max_tokens=400)

    for role in ("router", "prefill", "decode"):
        victim = graph.pods(role)[0]["metadata"]["name"]
        kube.kubectl("delete", "pod", victim, *graph.scope, "--wait=false")
        wait_for(
            f"{victim} is gone and two {role} pods are ready",
            lambda role=role: graph.ready(role) == 2 and len(graph.pods(role)) == 2,
            180,
        )

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
