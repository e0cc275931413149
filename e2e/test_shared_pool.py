"""Two graphs that share six GPUs of a GpuPool: one goes viral, the other wants its guarantee back under running streams."""

from __future__ import annotations

import pytest
from kube import GRAPH_LABEL, wait_for
from traffic import Load

GPUS = 6
SMALL_AND_QUICK = {
    "model": {"contextTokens": 4096},
    "engine": {"kvBlocks": 512, "streamIntervalTokens": 8},
    "services": {"prefill": {"scaling": {"maxReplicas": 1}}, "decode": {"scaling": {"maxReplicas": 5}}},
    "planner": {
        "mode": "load",
        "adjustmentIntervalSeconds": 5,
        "maxGpuBudget": GPUS,
        "newDecodeWorkerGraceIntervals": 1,
    },
}
GUARANTEED = {"viral": 2, "steady": 4}


def pool(kind, name, **match):
    """Return a pool of one kind that guarantees both graphs what they start with or more; ``match`` is of each entry."""
    graphs = [
        {"match": {"name": graph, **match}, "guaranteedGpus": gpus} for graph, gpus in GUARANTEED.items()
    ]
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"gpus": GPUS, "holdSeconds": 5, "graphs": graphs},
    }


def test_a_viral_graph_borrows_and_gives_back_without_a_lost_stream(kube, deploy):
    """It takes what the other leaves; the other's guarantee comes back by draining; never above six GPUs."""
    kube.apply(pool("GpuPool", "shared"), namespace=deploy.namespace)
    borrow_and_give_back(kube, *(deploy(name=name, **SMALL_AND_QUICK) for name in GUARANTEED))


@pytest.mark.nightly
def test_graphs_of_two_namespaces_share_a_pool_of_the_cluster(kube, deploy, deploy_beside):
    """As those of one namespace do; each hears of its own moves in its own namespace."""
    places = (deploy, deploy_beside)
    shared = pool(
        "ClusterGpuPool", f"shared-{deploy.namespace}", namespaces=[each.namespace for each in places]
    )
    kube.apply(shared, namespace=deploy.namespace)
    try:
        graphs = [place(name=name, **SMALL_AND_QUICK) for place, name in zip(places, GUARANTEED, strict=True)]
        borrow_and_give_back(kube, *graphs)
    finally:
        kube.kubectl("delete", "clustergpupool", shared["metadata"]["name"], "--wait=false")


def borrow_and_give_back(kube, viral, steady):
    """Load one graph until it has borrowed, then the other one until it has its guarantee back."""
    namespaces = {viral.namespace, steady.namespace}
    seen: list[int] = []

    def held() -> dict[str, int]:
        """Return each graph's GPUs by one list of all pods, and keep their sum."""
        found = dict.fromkeys(GUARANTEED, 0)
        for pod in kube.get("pods", "--all-namespaces", f"--selector={GRAPH_LABEL}"):
            gone = pod["status"].get("phase") in {"Succeeded", "Failed"}
            is_ours = pod["metadata"]["namespace"] in namespaces
            if is_ours and not (gone or pod["spec"].get("schedulingGates")):
                gpus = pod["metadata"].get("annotations", {}).get("penstock.dev/gpus", "0")
                found[pod["metadata"]["labels"][GRAPH_LABEL]] += int(gpus)
        seen.append(sum(found.values()))
        return found

    wait_for("both are in the pool", lambda: held() == {"viral": 2, "steady": 2}, 60)
    heavy = Load(viral, "viral", concurrency=40, max_tokens=400)
    wait_for("viral has borrowed all that is left", lambda: held()["viral"] == 4, 240)
    loud = Load(steady, "steady", concurrency=40, max_tokens=400)
    wait_for("steady has its guarantee", lambda: held() == GUARANTEED, 300)
    wait_for("and serves with it", lambda: held() and steady.ready("decode") == 3, 120)
    outcomes = [heavy.stop(), loud.stop()]
    assert [each.lost for each in outcomes] == [[], []]
    assert min(each.answered for each in outcomes) > 0
    assert max(seen) == GPUS
    for graph, reason in ((viral, "GpusReclaimed"), (steady, "GpusGranted")):
        events = kube.get("events", *graph.scope)
        assert reason in {each["reason"] for each in events if each["involvedObject"]["name"] == graph.name}
