"""Pools of eight-GPU nodes that kwok feigns: a pool is filled to its last GPU, and neither it nor the budget overflows.

No container runs there: a worker is ready because kwok says so, and serves nobody. So what is looked at is where pods
are, how many GPUs they hold, and what the status tells; the planner, which goes by load, changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter

import pytest
from kube import say, wait_for

GPUS = 8
"""Of each node."""

TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
MANIFEST = {
    "services": {
        # A worker that cannot be asked whether it is idle is waited for as long as this.
        "prefill": {"scaling": {"minReplicas": 1, "maxReplicas": 8}, "terminationGracePeriodSeconds": 3},
        "decode": {"scaling": {"minReplicas": 1, "maxReplicas": 17}, "terminationGracePeriodSeconds": 3},
    },
    "nodePools": {
        "a100": {"nodeSelector": {"node.kubernetes.io/gpu": "fake-a100"}, "tolerations": [TOLERATION]},
        "h100": {"nodeSelector": {"node.kubernetes.io/gpu": "fake-h100"}, "tolerations": [TOLERATION]},
    },
}

PLANNER = {"noOperation": True, "maxGpuBudget": 20}


@pytest.fixture(scope="module")
def kwok(kube, tmp_path_factory):
    """The controller alongside the cluster: it plays the kubelet of the nodes that say so, and of no other."""
    places = (os.environ.get("PATH", ""), os.environ.get("KUBEBUILDER_ASSETS", ""))
    program = shutil.which("kwok", path=os.pathsep.join(each for each in places if each))
    if program is None:
        pytest.skip("no kwok on PATH or in KUBEBUILDER_ASSETS")
    folder = tmp_path_factory.mktemp("kwok")
    config = folder / "kwok.yaml"
    config.write_text("")  # rather than the user's own
    flags = [
        f"--kubeconfig={kube.env['KUBECONFIG']}",
        f"--config={config}",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        "--node-lease-duration-seconds=40",
    ]
    with (folder / "kwok.log").open("wb") as log:
        process = subprocess.Popen([program, *flags], stdout=log, stderr=subprocess.STDOUT)
    yield process
    assert process.poll() is None, (folder / "kwok.log").read_text()[-2000:]
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture
def add_node(kube, kwok):
    """Adds a node of a pool; all are gone after the test."""
    made = []

    def add(pool):
        name = f"{pool}-{len(made)}"
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(GPUS)}
        labels = {"kubernetes.io/hostname": name, "node.kubernetes.io/gpu": pool, "type": "kwok"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}},
            "spec": {"taints": [TAINT]},
            "status": {"capacity": amounts, "allocatable": amounts},
        }
        kube.kubectl("create", "--filename=-", stdin=json.dumps(node))
        made.append(name)
        return name

    yield add
    if made:
        kube.kubectl("delete", "node", *made)


@pytest.fixture
def pools(add_node):
    """Two nodes for decode, one for prefill."""
    return [add_node("fake-a100"), add_node("fake-a100")], [add_node("fake-h100")]


def scale(graph, **services):
    """Set ScalingAdapters, as a person or an autoscaler would."""
    for service, replicas in services.items():
        adapter = f"gsa/{graph.name}-{service}"
        graph.kube.kubectl("scale", adapter, *graph.scope, f"--replicas={replicas}")


def by_node(graph, role):
    """Workers of a role that stay, counted by node; None for those without one."""
    pods = [pod for pod in graph.pods(role) if "deletionTimestamp" not in pod["metadata"]]
    return Counter(pod["spec"].get("nodeName") for pod in pods)


def shown(graph):
    """What `kubectl get gd` shows of a graph's workers, by column."""
    header, values = graph.kube.kubectl("get", "gd", graph.name, *graph.scope).splitlines()
    columns = dict(zip(header.split(), values.split(), strict=True))
    return {name: columns[name] for name in ("PREFILL", "DECODE", "GPUS")}


def watch(what, graph, seen, probe, timeout_s=30):
    """Wait, and keep each count of the workers' GPUs on the way."""

    def look():
        seen.append(graph.gpus())
        return probe()

    wait_for(what, look, timeout_s, every_s=0.2)


@pytest.mark.nightly
def test_two_pools_fill_up_to_the_budget_and_leave_nothing(kube, pools, deploy):
    """Sixteen decode and four prefill workers on their pools' nodes; kills and wishes beyond it take no GPU more."""
    a100, h100 = pools
    graph = deploy("two-node-pools", **MANIFEST, planner=PLANNER)
    seen = []
    full = [Counter(dict.fromkeys(a100, GPUS)), Counter(dict.fromkeys(h100, 4))]

    def is_full():
        return [by_node(graph, "decode"), by_node(graph, "prefill")] == full and shown(graph) == {
            "PREFILL": "4/4",
            "DECODE": "16/16",
            "GPUS": "20/20",
        }

    scale(graph, decode=16, prefill=4)
    watch("sixteen and four workers are ready on their nodes", graph, seen, is_full)

    say("killing four workers at once")
    killed = [pod["metadata"]["name"] for pod in (graph.pods("decode")[:3] + graph.pods("prefill")[:1])]
    kube.kubectl("delete", "pods", *killed, *graph.scope, "--wait=false")
    watch(
        "they are replaced",
        graph,
        seen,
        lambda: is_full() and not {pod["metadata"]["name"] for pod in graph.pods()} & set(killed),
    )
    scale(graph, prefill=6)
    watch(
        "two more prefill workers wait, though their node has room",
        graph,
        seen,
        lambda: (
            by_node(graph, "prefill")[None] == 2
            and graph.condition("Schedulable").get("reason") == "WaitingForBudget"
            and shown(graph) == {"PREFILL": "4/6", "DECODE": "16/16", "GPUS": "20/20"}
        ),
    )

    kube.kubectl("delete", "gd", graph.name, *graph.scope, "--wait=false")
    watch("no object of the graph is left", graph, seen, lambda: not graph.remains(), 60)
    assert kube.get("pods", *graph.scope) == []
    assert max(seen) == 20


@pytest.mark.nightly
def test_one_replica_more_than_the_pool_holds_is_told_until_a_node_comes(pools, add_node, deploy):
    """The seventeenth decode worker has no GPU: the scheduler's words are in the status; a third node ends it."""
    graph = deploy("two-node-pools", **MANIFEST, planner=PLANNER)
    seen = []

    scale(graph, decode=17)
    watch(
        "the status tells it",
        graph,
        seen,
        lambda: graph.condition("Schedulable").get("reason") == "Unschedulable",
    )
    watch(
        "all others are placed",
        graph,
        seen,
        lambda: by_node(graph, "decode") == {**dict.fromkeys(pools[0], GPUS), None: 1},
    )
    condition = graph.condition("Schedulable")
    assert condition["status"] == "False"
    assert "2 Insufficient nvidia.com/gpu" in condition["message"]
    assert "node(s) didn't match Pod's node affinity/selector" in condition["message"]
    watch("sixteen serve", graph, seen, lambda: shown(graph)["DECODE"] == "16/17")

    third = add_node("fake-a100")
    watch(
        "the third node takes it",
        graph,
        seen,
        lambda: (
            by_node(graph, "decode")[third] == 1
            and graph.condition("Schedulable").get("status") == "True"
            and shown(graph) == {"PREFILL": "1/1", "DECODE": "17/17", "GPUS": "18/20"}
        ),
    )
    assert max(seen) == 18
