from __future__ import annotations

import dataclasses

import pytest

from penstock.operator.resources import children

WIDE = {"gpusPerReplica": 8, "nodesPerReplica": 2, "args": ["--enforce-eager"]}
JOIN = ["--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank"]
LEADER = ["--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", "29501"]


@pytest.fixture
def wide(objects):
    """Return a function that makes the LeaderWorkerSet of a two-node decode service."""

    def make(runtime="vllm", **arguments):
        found = objects(runtime=runtime, services={"decode": WIDE}, planner={"maxGpuBudget": 64}, **arguments)
        return found["LeaderWorkerSet", "llama-decode"]

    return make


def args(template):
    """Arguments of the main container."""
    return template["spec"]["containers"][0]["args"]


def test_a_service_over_nodes_is_a_leader_worker_set(wide, objects):
    """Its size is the number of nodes; the one-node services stay Deployments."""
    spec = wide(replicas={"decode": 3}, unavailable={"decode": 1})["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert (spec["startupPolicy"], spec["leaderWorkerTemplate"]["restartPolicy"]) == (
        "LeaderCreated",
        "RecreateGroupOnPodRestart",
    )
    kinds = list(objects(services={"decode": WIDE}, planner={"maxGpuBudget": 64}))
    assert ("Deployment", "llama-decode") not in kinds
    assert ("Deployment", "llama-prefill") in kinds


@pytest.mark.parametrize("runtime", ["vllm", "dynamo"])
def test_nodes_join_at_the_leader(wide, runtime):
    """Rank 0 serves, the others run headless; the user's own arguments stay last."""
    template = wide(runtime)["spec"]["leaderWorkerTemplate"]
    assert args(template["leaderTemplate"])[-11:] == [*JOIN, "0", *LEADER, "--enforce-eager"]
    assert args(template["workerTemplate"])[-12:] == [
        *JOIN,
        "$(LWS_WORKER_INDEX)",
        *LEADER,
        "--headless",
        "--enforce-eager",
    ]


def test_followers_answer_nobody(wide):
    """No probes, no hooks and no place in a Service."""
    template = wide()["spec"]["leaderWorkerTemplate"]
    leader, follower = template["leaderTemplate"], template["workerTemplate"]
    hooks = {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert hooks <= set(leader["spec"]["containers"][0])
    assert not hooks & set(follower["spec"]["containers"][0])
    assert leader["metadata"]["labels"]["penstock.dev/serving"] == "true"
    assert "penstock.dev/serving" not in follower["metadata"]["labels"]


def test_without_the_kind_there_is_no_workload(build, context):
    """The other children stand ready; a status tells what is missing."""
    poor = dataclasses.replace(context, has_leader_worker_set=False)
    graph = build(services={"decode": WIDE}, planner={"maxGpuBudget": 64})
    kinds = {
        (each["kind"], each["metadata"]["name"])
        for each in children(graph, poor, replicas={}, unavailable={})
    }
    assert ("Service", "llama-decode") in kinds
    assert not {("LeaderWorkerSet", "llama-decode"), ("Deployment", "llama-decode")} & kinds
