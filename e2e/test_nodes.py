"""A node freezes, as one whose kernel or network hangs, and is then deleted: what was on it is served elsewhere."""

from __future__ import annotations

import pytest
from images import NODES, container_tool
from kube import SYSTEM, wait_for
from traffic import Load

SERVICES = {
    "frontend": {"replicas": 2},
    "prefill": {"replicas": 2, "scaling": {"minReplicas": 2, "maxReplicas": 2}},
    "decode": {"replicas": 2, "scaling": {"minReplicas": 2, "maxReplicas": 2}},
}
CONCURRENCY = 8
EVERY = "router,prefill,decode"
SILENCE_S = 60.0
"""Of a client: longer than a router waits for a silent worker, and than Kubernetes keeps a silent router's address."""


@pytest.fixture
def two_operators(install):
    """A release as the chart makes it, with an operator on either node; ends as it was."""
    install(operator={"replicas": 2})
    yield
    install()


@pytest.fixture
def freeze(kube):
    """Returns a function that freezes a node; in the end it runs again, and is back if it was deleted."""
    frozen = []

    def run(node):
        kube.run(container_tool(), "pause", node)
        frozen.append(node)

    yield run
    for node in frozen:
        kube.run(container_tool(), "unpause", node)
        kube.run(container_tool(), "exec", node, "systemctl", "restart", "kubelet")
        kube.kubectl("wait", "--for=create", f"node/{node}", "--timeout=120s", timeout_s=130)
        kube.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=180s", timeout_s=190)


def leading_node(kube):
    """Return the node of the operator that leads."""
    leases = kube.get("leases", "--namespace", SYSTEM)
    holders = [each["spec"].get("holderIdentity") or "" for each in leases]
    pods = kube.get("pods", "--namespace", SYSTEM, "--selector=app.kubernetes.io/component=operator")
    return next(
        (
            pod["spec"]["nodeName"]
            for pod in pods
            if any(each.startswith(pod["metadata"]["name"]) for each in holders)
        ),
        None,
    )


@pytest.mark.nightly
def test_a_node_that_freezes_and_is_deleted_costs_only_its_routers_streams(
    kube, deploy, two_operators, freeze
):
    """With it goes the leading operator: the other one says NodeLost, never Ready while replicas are missing."""
    graph = deploy(
        model={"contextTokens": 4096},
        engine={"streamIntervalTokens": 8},
        services=SERVICES,
        planner={"mode": "load", "adjustmentIntervalSeconds": 5},
    )
    victim = wait_for("an operator leads", lambda: leading_node(kube), 60)
    (left,) = (each for each in NODES if each != victim)
    routers = [each for each in graph.pods("router") if each["spec"]["nodeName"] == left]
    assert len(routers) == 1, "routers spread over nodes"
    there = [each for each in graph.pods("prefill,decode") if each["spec"]["nodeName"] == victim]
    assert there, "a worker on either node"
    where = {"node": left, "silence_s": SILENCE_S, "concurrency": CONCURRENCY, "max_tokens": 400}
    through = Load(graph, "through", host=routers[0]["status"]["podIP"], **where)
    anyhow = Load(graph, "service", **where)
    overstated = []

    def look():
        """Note a status that says that all is well while too few replicas are left."""
        alive = sum(each["spec"].get("nodeName") == left for each in graph.pods(EVERY))
        if graph.object()["status"]["phase"] == "Ready" and alive < 2 * len(SERVICES):
            overstated.append(alive)

    freeze(victim)

    wait_for(
        "the status names the lost node",
        lambda: "NodeLost" in graph.condition("Degraded").get("reason", ""),
        120,
    )
    look()
    kube.kubectl("delete", "node", victim)

    def replaced():
        look()
        pods = [each for each in graph.pods(EVERY) if each["spec"].get("nodeName") == left]
        return len(pods) == graph.ready(EVERY) == 2 * len(SERVICES)

    wait_for("two of each role are ready on the other node", replaced, 240)
    graph.wait_ready()
    fresh = Load(graph, "fresh", **where)
    assert [each.stop().lost for each in (through, fresh)] == [[], []]
    # A stream through the frozen router, and one that a client began before its address was gone.
    assert len(anyhow.stop().lost) <= 2 * CONCURRENCY
    assert overstated == []
