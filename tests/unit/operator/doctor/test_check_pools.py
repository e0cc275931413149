from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from doctor_facts import graph_object, node

from penstock_operator.doctor.check_pools import pool_findings
from penstock_operator.doctor.facts import Unreadable
from penstock_operator.doctor.findings import Severity

FORBIDDEN = Unreadable("403: you may not", is_forbidden=True)
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
POOL = "pool a100 of serving/llama"


def judged(nodes, *, graph=None, requested=None):
    """Severity, subject, message and remedy of every finding."""
    found = pool_findings(graph or graph_object(), nodes, requested or {})
    return [(each.severity, each.subject, each.message, each.remedy) for each in found]


def tolerating(*tolerations):
    """The graph whose pool has these tolerations."""
    graph = graph_object()
    graph["spec"]["nodePools"]["a100"]["tolerations"] = list(tolerations)
    return graph


def test_a_pool_with_room():
    """GPUs in all, taken and free."""
    requested = {"node-1": {"nvidia.com/gpu": 3}, "elsewhere": {"nvidia.com/gpu": 5}}
    assert judged((node(), node("node-2", gpus=4)), requested=requested) == [
        (Severity.OK, POOL, "2 nodes with 12 nvidia.com/gpu: 3 in use, 9 free", "")
    ]


def test_nodes_that_cannot_be_listed():
    """Unknown, never none."""
    ((severity, subject, message, _),) = judged(FORBIDDEN)
    assert (severity, subject, message) == (Severity.UNKNOWN, "nodes for serving/llama", "403: you may not")


def test_no_node_carries_the_labels():
    """The remedy labels one."""
    other = node()
    other["metadata"]["labels"] = {"gpu": "l40s"}
    assert judged((other,)) == [
        (
            Severity.PROBLEM,
            POOL,
            "no node has the labels gpu=a100",
            "kubectl label node NODE gpu=a100, or correct spec.nodePools.a100.nodeSelector",
        )
    ]


@pytest.mark.parametrize("change", [{"spec": {"unschedulable": True}}, {"status": {"conditions": []}}])
def test_nodes_that_take_nothing(change):
    """Cordoned or not ready."""
    ((severity, _, message, _),) = judged(({**node(), **change},))
    assert (severity, message) == (Severity.PROBLEM, "none of its 1 nodes is ready and schedulable")


@pytest.mark.parametrize(
    "toleration",
    [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "nvidia.com/gpu", "value": "present"},
        {"operator": "Exists"},
    ],
)
def test_tolerated_taints(toleration):
    """Exists, Equal, with and without effect or key."""
    ((severity, _, _, _),) = judged((node(taints=[TAINT]),), graph=tolerating(toleration))
    assert severity is Severity.OK


@pytest.mark.parametrize(
    "toleration",
    [
        {"key": "other", "operator": "Exists"},
        {"key": "nvidia.com/gpu", "value": "absent"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"},
    ],
)
def test_taints_that_are_not_tolerated(toleration):
    """The remedy is the toleration to add."""
    assert judged((node(taints=[TAINT]),), graph=tolerating(toleration)) == [
        (
            Severity.PROBLEM,
            POOL,
            "1 of 1 nodes are tainted nvidia.com/gpu=present:NoSchedule",
            "add to spec.nodePools.a100.tolerations: {key: nvidia.com/gpu, value: present, effect: NoSchedule}",
        )
    ]


def test_nodes_without_gpus():
    """The device plugin is the usual reason."""
    ((severity, _, message, remedy),) = judged((node(gpus=0),))
    assert (severity, message) == (Severity.PROBLEM, "none of its 1 nodes offers nvidia.com/gpu")
    assert "device plugin" in remedy


def test_a_replica_larger_than_any_node():
    """It stays pending for ever."""
    graph = graph_object()
    graph["spec"]["services"]["decode"]["gpusPerReplica"] = 4
    graph["spec"]["planner"] = {"maxGpuBudget": 8}
    found = judged((node(gpus=2), node("node-2", gpus=6)), graph=graph)
    assert [severity for severity, *_ in found] == [Severity.OK]
    found = judged(tuple(node(f"node-{number}", gpus=2) for number in range(4)), graph=graph)
    assert [(severity, message) for severity, _, message, _ in found] == [
        (Severity.PROBLEM, "decode requests 4 nvidia.com/gpu on one node; the largest node has 2"),
        (Severity.OK, "4 nodes with 8 nvidia.com/gpu: 0 in use, 8 free"),
    ]


@pytest.mark.parametrize(
    ("gpus", "severity", "message"),
    [
        (1, Severity.PROBLEM, "its services start with 2 nvidia.com/gpu, the nodes have 1"),
        (
            5,
            Severity.WARNING,
            "its services may grow to 6 nvidia.com/gpu, the nodes have 5; more replicas stay pending",
        ),
        (6, None, ""),
    ],
)
def test_too_few_gpus(gpus, severity, message):
    """Now is a problem, later a warning; no more than the budget is ever asked for."""
    graph = graph_object()
    graph["spec"]["planner"] = {"maxGpuBudget": 6}
    found = [each[:3] for each in judged((node(gpus=gpus),), graph=graph) if each[0] is not Severity.OK]
    assert found == ([] if severity is None else [(severity, POOL, message)])


def test_services_without_a_pool():
    """Any node with GPUs will do; simulated workers ask for none."""
    graph = graph_object()
    for name in ("prefill", "decode"):
        del graph["spec"]["services"][name]["nodePool"]
    del graph["spec"]["nodePools"]
    assert [each[1] for each in judged((node(),), graph=graph)] == ["any node of serving/llama"]
    graph["spec"]["runtime"] = "simulated"
    assert judged((node(),), graph=graph) == []
