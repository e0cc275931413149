"""What the nodes of a GpuPool offer, and which quotas are below it: tables of literals."""

from __future__ import annotations

import pytest

from penstock_operator.pools.capacity import (
    PoolNodes,
    counted,
    foreign_gpus,
    quota_problems,
    usable_nodes,
)

GPU = "nvidia.com/gpu"


def node(name, gpus, *, ready="True", cordoned=False):
    """Return a node that offers GPUs; None: it knows no such resource."""
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": {} if gpus is None else {GPU: str(gpus)},
        },
    }


def pod(gpus, *, namespace="ns", graph=None, phase="Running"):
    """Return a pod that asks for GPUs."""
    labels = {} if graph is None else {"penstock.dev/graph": graph}
    containers = [{"resources": {"requests": {GPU: str(gpus)}}}, {"name": "sidecar"}]
    return {
        "metadata": {"namespace": namespace, "labels": labels},
        "spec": {"containers": containers},
        "status": {"phase": phase},
    }


def count(nodes, foreign=0):
    """Return what nodes offer."""
    return counted(nodes, *usable_nodes(nodes, GPU), foreign)


def test_nodes_that_take_no_pods_are_left_out_and_named():
    """NotReady, of unknown state, and cordoned ones; one without GPUs is of no interest."""
    nodes = [
        node("a", 8),
        node("b", 4, ready="Unknown"),
        node("c", 2, cordoned=True),
        node("d", None),
    ]
    assert count(nodes) == PoolNodes(8, "1 nodes offer 8 GPUs; b is NotReady (4); c is cordoned (2)", 6)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "no node has the labels of nodeSelector"),
        ([node("a", None)], "none of the 1 nodes offers the resource"),
        (
            [node("a", 8, ready="False"), node("b", 8, ready="Unknown")],
            "all 2 nodes are NotReady, which suggests a network failure",
        ),
    ],
)
def test_what_looks_like_a_mistake_shrinks_nothing(nodes, message):
    """A wrong selector or resource, or all kubelets cut off at once."""
    assert count(nodes) == PoolNodes(None, message)


def test_a_pool_whose_nodes_are_all_cordoned_has_none():
    """Somebody wants them empty."""
    assert count([node("a", 8, cordoned=True)]).gpus == 0


def test_foreign_pods_are_left_out_where_they_are_seen():
    """Neither the pool's own, nor finished ones; of another namespace a graph of that name is foreign."""
    pods = [
        pod(1),
        pod(2, graph="chat"),
        pod(4, graph="chat", namespace="other"),
        pod(8, phase="Succeeded"),
        pod(16, graph="batch"),
    ]
    assert foreign_gpus(pods, GPU, {("ns", "chat")}) == 21
    assert count([node("a", 8)], 3) == PoolNodes(
        5, "1 nodes offer 8 GPUs; pods outside the pool's graphs hold 3", 3
    )
    assert count([node("a", 8)], 30).gpus == 0
    unseen = count([node("a", 8)], None)
    assert unseen.gpus == 8
    assert "GPUs of other pods are unknown" in unseen.message


def quota(most, name="team", resource=GPU, **more):
    """A ResourceQuota on what pods request of a resource."""
    return {"metadata": {"name": name}, "spec": {"hard": {f"requests.{resource}": most}, **more}}


@pytest.mark.parametrize(
    ("quotas", "said"),
    [
        ([quota("4")], ["team"]),
        ([quota("4", "b"), quota("0", "a")], ["a", "b"]),
        ([quota("8")], []),
        ([quota("4", resource="amd.com/gpu")], []),
        ([quota("4", scopes=["BestEffort"])], []),
        ([quota("4", scopeSelector={"matchExpressions": []})], []),
        ([{"metadata": {"name": "empty"}}], []),
    ],
)
def test_a_quota_below_the_pool_is_named(quotas, said):
    """Of the pool's resource, for all pods; one as large as the pool is none."""
    assert [each.split()[1] for each in quota_problems(quotas, GPU, 8)] == said


def test_the_sentence_names_both_numbers_and_what_to_do():
    """A condition's text."""
    assert quota_problems([quota("4")], GPU, 8) == [
        (
            "ResourceQuota team allows 4 nvidia.com/gpu, fewer than the pool's 8, so workers within the grant are rejected; raise it or lower "
            "spec.gpus"
        )
    ]


def test_a_clusters_pool_is_compared_with_what_it_guarantees_in_each_namespace():
    """A quota of one tenant is below the whole pool as a rule, and no problem."""
    assert quota_problems([quota("4")], GPU, 3, namespace="b") == []
    assert quota_problems([quota("4")], GPU, 6, namespace="a") == [
        (
            "ResourceQuota a/team allows 4 nvidia.com/gpu, fewer than the 6 guaranteed to graphs there, so workers within the grant are "
            "rejected; raise it or lower guaranteedGpus"
        )
    ]
