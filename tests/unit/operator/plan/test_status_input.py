"""What a status is made of: replicas, observed services, kinds that are missing."""

from __future__ import annotations

import pytest

from penstock.api import GraphSpec, Role
from penstock.kube.kinds import INFERENCE_POOL, LEADER_WORKER_SET
from penstock.kube.objects.names import BUDGET_GATE, DRAINING, SERVING
from penstock_dynamo.runtime import WORKER_METADATA
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.status_input import (
    ServiceReplicas,
    ServiceStatusInput,
    count_replicas,
    missing_definition,
    observed_status_input,
)


def pod(name, **more):
    """Return a ready, serving decode pod with one GPU."""
    made = {"role": "decode", "node": "n", "ready": True, "serving": SERVING, "gpus": 1, **more}
    return PodView(name, **made)


def test_each_pod_is_counted_once_for_what_it_is():
    """Ready, starting, gated, draining, stripped of its label, terminating, finished."""
    pods = [
        pod("ready"),
        pod("starting", ready=False),
        pod("gated", ready=False, node="", gates=(BUDGET_GATE,)),
        pod("draining", serving=DRAINING),
        pod("stripped", serving=""),
        pod("terminating", terminating=True),
        pod("finished", phase="Failed"),
    ]
    assert count_replicas(pods) == ServiceReplicas(
        existing=5, ready=3, serving=1, draining=2, gpus=5, unplaced=1, gated=1
    )


def test_a_group_is_one_replica():
    """Ready only as a whole; a leader's end is the group's."""

    def member(group, index, **more):
        more = {"serving": SERVING if index == 0 else "", **more}
        return pod(f"{group}-{index}", group=group, worker_index=index, group_size=2, **more)

    assert count_replicas([member("a", 0), member("a", 1)]) == ServiceReplicas(1, 1, 1, 0, 2)
    assert count_replicas([member("a", 0), member("a", 1, ready=False)]) == ServiceReplicas(1, 0, 0, 0, 2)
    assert count_replicas([member("a", 0)]) == ServiceReplicas(1, 0, 0, 0, 1, unplaced=1)
    leaving = [member("a", 0, terminating=True), member("a", 1, terminating=True)]
    assert count_replicas(leaving) == ServiceReplicas(0, 0, 0, 1, 2)


def member(name, role, service, **more):
    """Return a ready pod that serves."""
    return PodView(name, graph="g", role=role, service=service, ready=True, serving=SERVING, gpus=1, **more)


def test_services_are_found_by_their_pods():
    """Role and number from the pods; what carries no name or role is left out."""
    pods = [
        member("b", "decode", "decode"),
        member("a", "decode", "decode", terminating=True),
        member("r", "router", "frontend"),
        member("x", "", "frontend"),
        member("y", "decode", ""),
        member("z", "juggler", "circus"),
    ]
    raw = {"metadata": {"generation": 2}, "spec": {"planner": {"maxGpuBudget": 3}}}
    found = observed_status_input(raw, pods, deleting="waits")
    assert (found.generation, found.budget, found.deleting) == (2, 3, "waits")
    selects = "penstock.dev/graph=g,penstock.dev/service="
    assert found.services == {
        "decode": ServiceStatusInput(
            Role.DECODE, ServiceReplicas(1, 1, 1, 1, 2), 1, 1, 0, f"{selects}decode"
        ),
        "frontend": ServiceStatusInput(
            Role.ROUTER, ServiceReplicas(1, 1, 1, 0, 1), 1, 1, 0, f"{selects}frontend"
        ),
    }
    assert observed_status_input(raw, []).services == {}


def spec(runtime, nodes=1, **router):
    """Return a graph of one worker."""
    worker = {"role": "aggregated", "nodesPerReplica": nodes, "gpusPerReplica": nodes}
    services = {"frontend": {"role": "router"}, "worker": worker}
    return GraphSpec.model_validate(
        {"model": {"name": "m"}, "runtime": runtime, "services": services, "router": router}
    )


SEVERAL_NODES = "worker: nodesPerReplica above 1"
POOL = "InferencePool of inference.networking.k8s.io"
BEHIND_A_GATEWAY = spec("vllm", gateway={"enabled": True})


@pytest.mark.parametrize(
    ("spec", "served", "named"),
    [
        (spec("vllm"), set(), None),
        (spec("vllm", nodes=2), {LEADER_WORKER_SET}, None),
        (spec("vllm", nodes=2), {WORKER_METADATA}, SEVERAL_NODES),
        (spec("dynamo"), {WORKER_METADATA}, None),
        (spec("dynamo"), {LEADER_WORKER_SET}, "DynamoWorkerMetadata"),
        (spec("dynamo", nodes=2), {WORKER_METADATA}, SEVERAL_NODES),
        (spec("dynamo", nodes=2), {WORKER_METADATA, LEADER_WORKER_SET}, None),
        (BEHIND_A_GATEWAY, set(), POOL),
        (BEHIND_A_GATEWAY, {INFERENCE_POOL}, None),
    ],
)
def test_only_what_a_graph_needs_is_missed(spec, served, named):
    """One replica over several nodes, runtime dynamo, and a Gateway's pool; the kind is named."""
    failure = missing_definition(spec, served)
    if named is None:
        assert failure is None
    else:
        assert failure.reason == "MissingCRD"
        assert named in failure.message
