"""GPU node pools: workers land where their pool is, GPUs never exceed the budget, a full pool is told in words."""

from __future__ import annotations

import json
import time

import pytest
from kube import is_ready, say, wait_for
from traffic import Load

GPUS = 2
"""Of each pool's only node."""


@pytest.fixture
def pools(kube, request):
    """The two workers as pools a100 and h100 of two GPUs each."""
    nodes = dict(zip(("a100", "h100"), ("penstock-e2e-worker", "penstock-e2e-worker2"), strict=True))
    for pool, node in nodes.items():
        _give(kube, node, pool, GPUS)
    yield nodes
    for node in nodes.values():
        kube.kubectl("label", "node", node, "node.kubernetes.io/gpu-")
        patch = '[{"op":"remove","path":"/status/capacity/nvidia.com~1gpu"}]'
        kube.kubectl("patch", "node", node, "--subresource=status", "--type=json", f"--patch={patch}")


def _give(kube, node, pool, gpus):
    kube.kubectl("label", "node", node, f"node.kubernetes.io/gpu={pool}", "--overwrite")
    patch = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(gpus)}}})
    kube.kubectl("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={patch}")
    wait_for(
        f"{node} offers {gpus} GPUs",
        lambda: kube.get("node", node)["status"]["allocatable"].get("nvidia.com/gpu") == str(gpus),
    )


POOLED = {
    "model": {"contextTokens": 4096},
    "engine": {"kvBlocks": 512, "streamIntervalTokens": 8},
    "services": {
        "prefill": {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
        "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 4}},
    },
}


@pytest.mark.nightly
def test_kills_edits_and_a_rollout_keep_the_workers_within_the_budget(kube, deploy, pools):
    """At every look the workers' GPUs stay within three."""
    planner = {
        "mode": "load",
        "adjustmentIntervalSeconds": 5,
        "maxGpuBudget": 3,
        "newDecodeWorkerGraceIntervals": 1,
    }
    graph = deploy("two-node-pools", **POOLED, planner=planner)
    load = Load(graph, "load", concurrency=24, max_tokens=500)
    seen = []

    def at_the_budget():
        seen.append(graph.gpus())
        return graph.ready("decode") == 2

    wait_for("decode has grown to two", at_the_budget, 180)
    kube.kubectl("scale", f"gsa/{graph.name}-prefill", *graph.scope, "--replicas=3")
    kube.kubectl("scale", f"deployment/{graph.name}-decode", *graph.scope, "--replicas=4")
    # Not one of the gated ones that the edit makes: the repair of the Deployment takes them away again.
    victim = next(each["metadata"]["name"] for each in graph.pods("decode") if is_ready(each))
    kube.kubectl("delete", "pod", victim, *graph.scope, "--wait=false")
    graph.patch({"services": {"decode": {"env": [{"name": "ROLLED", "value": "1"}]}}})
    say("looking at the workers' GPUs for 45 s of kills, edits and a rollout")
    until_s = time.monotonic() + 45
    while time.monotonic() < until_s:
        seen.append(graph.gpus())

    load.stop()
    assert max(seen) == 3


def test_a_replica_without_a_node_is_withdrawn_with_the_schedulers_reason(kube, deploy, pools):
    """Each role lands on its pool's node; of two GPUs there, the third decode worker goes away, and the status says why."""
    planner = {
        "mode": "load",
        "adjustmentIntervalSeconds": 5,
        "maxGpuBudget": 6,
        "newDecodeWorkerGraceIntervals": 1,
    }
    graph = deploy("two-node-pools", **POOLED, planner=planner)
    assert {pod["spec"]["nodeName"] for pod in graph.pods("decode")} == {pools["a100"]}
    assert {pod["spec"]["nodeName"] for pod in graph.pods("prefill")} == {pools["h100"]}
    load = Load(graph, "load", concurrency=40, max_tokens=500)
    reasons = set()

    def told():
        condition = graph.condition("Schedulable")
        # Pending: the scheduler has not looked at the pod yet.
        if condition.get("status") == "False" and condition["reason"] != "Pending":
            reasons.add(condition["message"])
        return reasons

    wait_for("the status tells that a pod has no node", told, 240)
    assert all("nvidia.com/gpu" in reason for reason in reasons), reasons
    wait_for(
        "the replica is withdrawn",
        lambda: (
            kube.get("gsa", f"{graph.name}-decode", *graph.scope)["spec"]["replicas"] == GPUS
            and len(graph.pods("decode")) == GPUS
        ),
        240,
    )
    events = kube.get("events", *graph.scope)
    assert any("nvidia.com/gpu" in each.get("message", each.get("note", "")) for each in events)
    outcome = load.stop(300)
    assert outcome.lost == []
