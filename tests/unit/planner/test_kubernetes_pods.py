"""Replicas counted from pods: what is ready, starting, leaving or given up, and when an adjustment is over."""

from __future__ import annotations

import pytest

from penstock.api import Role
from penstock.planner.targets.base import Endpoint
from penstock.planner.targets.pods import PodFacts, count, pod_facts

D = Role.DECODE


def _pod(name="llama-decode-a", **change):
    """Return a pod object as the API server shows a ready worker; keys of ``change`` replace parts."""
    return {
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": f"uid-{name}",
            "labels": {
                "penstock.dev/role": "decode",
                "penstock.dev/serving": "true",
                **change.get("labels", {}),
            },
            **change.get("metadata", {}),
        },
        "spec": {"nodeName": "node-1", **change.get("spec", {})},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.7",
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": change.get("conditions", [_ready("True", "2026-01-01T00:02:00Z")]),
            **change.get("status", {}),
        },
    }


def _ready(status, at):
    return {"type": "Ready", "status": status, "lastTransitionTime": at}


def _facts(name, **change):
    base = {
        "name": name,
        "uid": name,
        "role": D,
        "group": name,
        "is_leader": True,
        "url": f"http://{name}:8000",
        "ready": True,
        "served": False,
        "leaving": False,
        "finished": False,
        "bound": True,
    }
    return PodFacts(**{**base, **change})


def _count(*pods, desired, served=(), failing=None):
    return count(D, pods, desired=desired, gpus=2, served=set(served), failing=failing or {})


def _numbers(pool):
    return pool.state.ready, pool.state.starting, pool.state.draining


# ---------------------------------------------------------------- one pod


def test_a_ready_pod_is_an_endpoint_by_its_name_and_address():
    """The router knows the worker by the same name."""
    facts = pod_facts(_pod())
    assert (facts.role, facts.ready, facts.url) == (D, True, "http://10.0.0.7:8000")
    assert pod_facts(_pod(status={"podIP": "fd00::7"})).url == "http://[fd00::7]:8000"


def test_a_pod_seen_right_after_its_creation_has_nothing_yet():
    """No spec, no status, no labels."""
    facts = pod_facts({"metadata": {"name": "new", "namespace": "serving"}})
    assert (facts.role, facts.ready, facts.url, facts.trouble) == (None, False, None, "")


@pytest.mark.parametrize(
    ("change", "leaving"),
    [
        ({}, False),
        ({"metadata": {"deletionTimestamp": "2026-01-01T01:00:00Z"}}, True),
        ({"labels": {"penstock.dev/serving": "draining"}}, True),
    ],
)
def test_a_pod_leaves_when_it_is_told_to_drain_or_deleted(change, leaving):
    """Either holds its GPUs until it is gone."""
    assert pod_facts(_pod(**change)).leaving is leaving


@pytest.mark.parametrize(
    ("at", "served"), [("2026-01-01T00:00:01Z", False), ("2026-01-01T00:05:00Z", True), ("garbage", False)]
)
def test_a_pod_that_lost_its_readiness_later_was_ready_once(at, served):
    """The kubelet writes the first Ready: False within a second of the start."""
    assert pod_facts(_pod(conditions=[_ready("False", at)])).served is served


GATED = {"spec": {"nodeName": "", "schedulingGates": [{"name": "penstock.dev/gpu-budget"}]}}
UNSCHEDULABLE = {
    "spec": {"nodeName": ""},
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ],
}


def _container(**change):
    return {
        "conditions": [],
        "status": {"containerStatuses": [{"name": "worker", "restartCount": 0, **change}]},
    }


@pytest.mark.parametrize(
    ("change", "trouble", "words"),
    [
        (GATED, "gated", "waits for GPUs within the graph's budget"),
        (
            UNSCHEDULABLE,
            "unschedulable",
            "unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            _container(state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
            "stuck",
            "container worker: ImagePullBackOff: no such image",
        ),
        (
            _container(state={"waiting": {"reason": "RegistryUnavailable", "message": "no route"}}),
            "stuck",
            "container worker: RegistryUnavailable: no route",
        ),
        (
            _container(
                state={"waiting": {"reason": "CrashLoopBackOff"}},
                lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                restartCount=2,
            ),
            "stuck",
            "container worker: CrashLoopBackOff: last exit 137 OOMKilled",
        ),
        (_container(state={"running": {}}, restartCount=3), "stuck", "container worker: crashed 3 times"),
        (_container(state={"waiting": {"reason": "ContainerCreating"}}), "", ""),
        (_container(state={"running": {}}, restartCount=1), "", ""),
        (_container(state={"running": {}}, restartCount=7, ready=True), "", ""),
    ],
)
def test_what_keeps_a_pod_from_starting_is_told_in_its_own_words(change, trouble, words):
    """Gate, scheduler, kubelet."""
    facts = pod_facts(_pod(**change))
    assert (facts.trouble, facts.message) == (trouble, words)


# ---------------------------------------------------------------- a pool


def test_ready_pods_are_endpoints_and_no_adjustment():
    """Two wished for, two there."""
    pool = _count(_facts("a"), _facts("b"), desired=2)
    assert (_numbers(pool), pool.adjusting, pool.state.gpus_per_replica) == ((2, 0, 0), False, 2)
    assert pool.endpoints == (Endpoint("a", D, "http://a:8000"), Endpoint("b", D, "http://b:8000"))


def test_a_wish_counts_before_the_operator_has_acted_on_it():
    """One more is starting, one fewer is draining, from the moment it is written."""
    up, down = _count(_facts("a"), desired=2), _count(_facts("a"), _facts("b"), desired=1)
    assert (_numbers(up), up.adjusting) == ((1, 1, 0), True)
    assert (_numbers(down), down.adjusting) == ((1, 0, 1), True)


def test_of_replicas_beyond_the_wish_those_that_do_not_serve_leave_first():
    """Starting before restarting before ready."""
    pods = [_facts("a"), _facts("b", ready=False), _facts("c", ready=False, served=True)]
    assert _numbers(_count(*pods, desired=2)) == (1, 1, 1)
    assert _numbers(_count(*pods, desired=1)) == (1, 0, 2)
    assert _numbers(_count(*pods, desired=0)) == (0, 0, 3)


def test_a_worker_that_restarts_is_no_adjustment():
    """It was ready, by its own conditions or as this process saw it."""
    pool = _count(_facts("a"), _facts("b", ready=False), desired=2, served=["b"])
    assert (_numbers(pool), pool.adjusting) == ((1, 1, 0), False)
    assert _count(_facts("a", ready=False), desired=1).adjusting


def test_draining_pods_hold_their_gpus_and_are_no_replicas():
    """The desired is met without them."""
    pool = _count(_facts("a"), _facts("b", leaving=True), desired=1)
    assert (_numbers(pool), pool.adjusting) == ((1, 0, 1), True)
    assert [e.name for e in pool.endpoints] == ["a"]


def test_finished_pods_are_gone():
    """An evicted pod's object stays for a while."""
    assert _numbers(_count(_facts("a"), _facts("b", finished=True, ready=False), desired=1)) == (1, 0, 0)


def test_a_replica_given_up_is_told_with_its_reason_and_blocks_nothing():
    """Unschedulable: it holds no GPU. On a node: it does."""
    lost = _facts("b", ready=False, bound=False)
    pool = _count(_facts("a"), lost, desired=2, failing={"b": "no node"})
    assert (_numbers(pool), pool.state.failed, pool.adjusting) == ((1, 0, 0), ("no node",), False)
    stuck = _facts("b", ready=False)
    pool = _count(_facts("a"), stuck, desired=2, failing={"b": "no image"})
    assert (_numbers(pool), pool.state.failed, pool.adjusting) == ((1, 0, 1), ("no image",), False)


def test_a_replica_given_up_beyond_the_wish_is_forgotten():
    """It was withdrawn; the operator takes it first."""
    pool = _count(_facts("a"), _facts("b", ready=False, bound=False), desired=1, failing={"b": "no node"})
    assert (_numbers(pool), pool.state.failed, pool.adjusting) == ((1, 0, 0), (), False)


def test_a_group_of_pods_is_one_replica_that_its_leader_stands_for():
    """Two nodes each: ready by the leader, leaving or lost by any of them."""
    one = [_facts("g1-0", group="g1"), _facts("g1-1", group="g1", is_leader=False, ready=False)]
    two = [_facts("g2-0", group="g2", ready=False), _facts("g2-1", group="g2", is_leader=False, bound=False)]
    pool = _count(*one, *two, desired=2, failing={"g2-1": "no node"})
    assert (_numbers(pool), pool.state.failed) == ((1, 0, 1), ("no node",))
    assert [e.name for e in pool.endpoints] == ["g1-0"]


def test_missing_replicas_whose_pods_are_refused_are_given_up():
    """As many as are missing, whether or not other pods are given up, too; none if nothing is missing."""
    pool = count(D, [_facts("a")], desired=3, gpus=2, served=set(), failing={}, refused="quota")
    assert (_numbers(pool), pool.state.failed, pool.adjusting) == ((1, 0, 0), ("quota", "quota"), False)
    lost = _facts("b", ready=False, bound=False)
    pool = count(
        D, [_facts("a"), lost], desired=3, gpus=2, served=set(), failing={"b": "no node"}, refused="q"
    )
    assert (_numbers(pool), pool.state.failed, pool.adjusting) == ((1, 0, 0), ("no node", "q"), False)
    pool = count(D, [_facts("a")], desired=1, gpus=2, served=set(), failing={}, refused="quota")
    assert (_numbers(pool), pool.state.failed, pool.adjusting) == ((1, 0, 0), (), False)
