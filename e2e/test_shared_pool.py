"""Two graphs that share six GPUs of a GpuPool: one goes viral, the other wants its guarantee back under running streams."""

from __future__ import annotations

from kube import wait_for
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
POOL = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GpuPool",
    "metadata": {"name": "shared"},
    "spec": {
        "gpus": GPUS,
        "holdSeconds": 5,
        "graphs": [
            {"match": {"name": "viral"}, "guaranteedGpus": 2},
            {"match": {"name": "steady"}, "guaranteedGpus": 4},
        ],
    },
}


def test_a_viral_graph_borrows_and_gives_back_without_a_lost_stream(kube, deploy):
    """It takes what the other leaves; the other's guarantee comes back by draining; never above six GPUs."""
    kube.apply(POOL, namespace=deploy.namespace)
    viral, steady = (deploy(name=name, **SMALL_AND_QUICK) for name in ("viral", "steady"))
    seen: list[int] = []

    def held() -> dict[str, int]:
        """Return each graph's GPUs by one list of all pods, and keep their sum."""
        found = dict.fromkeys(("viral", "steady"), 0)
        for pod in kube.get("pods", *viral.scope, "--selector=penstock.dev/graph"):
            gone = pod["status"].get("phase") in {"Succeeded", "Failed"}
            if not (gone or pod["spec"].get("schedulingGates")):
                gpus = pod["metadata"].get("annotations", {}).get("penstock.dev/gpus", "0")
                found[pod["metadata"]["labels"]["penstock.dev/graph"]] += int(gpus)
        seen.append(sum(found.values()))
        return found

    wait_for("both are in the pool", lambda: held() == {"viral": 2, "steady": 2}, 60)
    heavy = Load(viral, "viral", concurrency=40, max_tokens=400)
    wait_for("viral has borrowed all that is left", lambda: held()["viral"] == 4, 240)
    loud = Load(steady, "steady", concurrency=40, max_tokens=400)
    wait_for("steady has its guarantee", lambda: held() == {"viral": 2, "steady": 4}, 300)
    wait_for("and serves with it", lambda: held() and steady.ready("decode") == 3, 120)
    outcomes = [heavy.stop(), loud.stop()]
    assert [each.lost for each in outcomes] == [[], []]
    assert min(each.answered for each in outcomes) > 0
    assert max(seen) == GPUS
    events = kube.get("events", *viral.scope)
    assert {"GpusReclaimed", "GpusGranted"} <= {each["reason"] for each in events}
