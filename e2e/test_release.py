"""The release's life: upgrade under running graphs, uninstall that keeps them, namespaced rights."""

from __future__ import annotations

from kube import SYSTEM, wait_for
from openai import OpenAI


def test_an_upgrade_leaves_running_graphs_alone(kube, deploy, install):
    """New values roll operator and planner; no pod of a graph is replaced or restarted."""
    graph = deploy()
    before = {pod["metadata"]["uid"] for pod in graph.pods("router,prefill,decode")}

    install(logging={"level": "debug"}, operator={"replicas": 2})

    deployment = kube.get("deployment", "penstock-operator", "--namespace", SYSTEM)
    assert deployment["status"]["readyReplicas"] == 2
    graph.patch({"services": {"frontend": {"replicas": 2}}})
    wait_for("the new operator acts", lambda: graph.ready("router") == 2, 120)
    pods = graph.pods("router,prefill,decode")
    assert before <= {pod["metadata"]["uid"] for pod in pods}
    assert sum(pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods) == 0


def test_graphs_outlive_an_uninstall_and_are_taken_up_again(kube, deploy, install):
    """Without operator and planner requests are answered; a new installation adopts what is there."""
    graph = deploy()
    before = {pod["metadata"]["uid"] for pod in graph.pods("router,prefill,decode")}

    kube.helm("uninstall", "penstock", "--namespace", SYSTEM, "--wait")

    assert "graphdeployments.penstock.dev" in kube.kubectl("get", "crds", "--output=name")
    with kube.forwarded(graph.namespace, f"service/{graph.name}-frontend", 8000) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        assert client.completions.create(model="llama", prompt="Hello", max_tokens=4).choices
    install()
    graph.patch({"services": {"frontend": {"replicas": 2}}})
    wait_for("the new operator acts", lambda: graph.ready("router") == 2, 120)
    assert before <= {pod["metadata"]["uid"] for pod in graph.pods("router,prefill,decode")}


def test_the_namespaced_release_needs_no_rights_outside(kube, deploy, install, namespace):
    """With Roles of one namespace alone, a graph there becomes ready and scales."""
    kube.helm("uninstall", "penstock", "--namespace", SYSTEM, "--wait")
    try:
        install(namespace, clusterWide=False)
        graph = deploy(wait=False)
        graph.wait_ready()
        kube.kubectl("scale", f"gsa/{graph.name}-decode", *graph.scope, "--replicas=2")
        wait_for("a second decode worker", lambda: graph.ready("decode") == 2, 120)
        kube.kubectl("delete", "gd", graph.name, *graph.scope, "--timeout=120s")
    finally:
        kube.helm("uninstall", "penstock", "--namespace", namespace, "--wait")
        install()
