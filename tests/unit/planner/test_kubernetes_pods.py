"""Replicas counted from pods: what is ready, starting, leaving or given up, and when an adjustment is over."""

from __future__ import annotations

import pytest

from penstock.api import Role
from penstock_planner.targets.base import Endpoint
from penstock_planner.targets.pods import PodFacts, count, pod_facts

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
        "was_ready": False,
        "leaving": False,
        "finished": False,
        "is_scheduled": True,
    }
    return PodFacts(**{**base, **change})


# ---------------------------------------------------------------- one pod


def test_a_ready_pod_is_an_endpoint_by_its_name_and_address():
    """The router knows the worker by the same name."""
    facts = pod_facts(_pod())
    assert (facts.role, facts.ready, facts.url) == (D, True, "http://10.0.0.7:8000")
    assert pod_facts(_pod(status={"podIP": "fd00::7"})).url == "http://[fd00::7]:8000"
    for said, scheme in (("https", "https"), ("ftp", "http"), ("", "http")):
        marked = _pod(metadata={"annotations": {"penstock.dev/scheme": said}})
        assert pod_facts(marked).url == f"{scheme}://10.0.0.7:8000"


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
    assert pod_facts(_pod(conditions=[_ready("False", at)])).was_ready is served


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
        (GATED, "gated", "waiting for GPUs within the graph's budget"),
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

A, B = _facts("a"), _facts("b")
LOST, STUCK = _facts("b", ready=False, is_scheduled=False), _facts("b", ready=False)
THREE = (A, STUCK, _facts("c", ready=False, was_ready=True))
GROUPS = (
    *(_facts("g1-0", group="g1"), _facts("g1-1", group="g1", is_leader=False, ready=False)),
    *(
        _facts("g2-0", group="g2", ready=False),
        _facts("g2-1", group="g2", is_leader=False, is_scheduled=False),
    ),
)
NO_NODE, REFUSED = {"failing": {"b": "no node"}}, {"refused": "quota"}

# Pods, replicas desired, what else is known; ready, starting and draining, what failed, and whether an adjustment is on.
POOLS = {
    "as many as desired": ((A, B), 2, {}, (2, 0, 0), (), False),
    "one more is starting from the moment it is written": ((A,), 2, {}, (1, 1, 0), (), True),
    "one fewer is draining from then on": ((A, B), 1, {}, (1, 0, 1), (), True),
    "starting leaves first": (THREE, 2, {}, (1, 1, 1), (), True),
    "restarting leaves before ready": (THREE, 1, {}, (1, 0, 2), (), True),
    "all leave": (THREE, 0, {}, (0, 0, 3), (), True),
    "a worker that restarts is not an adjustment": ((A, STUCK), 2, {"served": {"b"}}, (1, 1, 0), (), False),
    "one that never served is": ((_facts("a", ready=False),), 1, {}, (0, 1, 0), (), True),
    "a draining pod holds its GPUs": ((A, _facts("b", leaving=True)), 1, {}, (1, 0, 1), (), True),
    "an evicted pod is gone": ((A, _facts("b", finished=True, ready=False)), 1, {}, (1, 0, 0), (), False),
    "given up without a node": ((A, LOST), 2, NO_NODE, (1, 0, 0), ("no node",), False),
    "given up on a node": ((A, STUCK), 2, {"failing": {"b": "no image"}}, (1, 0, 1), ("no image",), False),
    "given up and not desired any more": ((A, LOST), 1, NO_NODE, (1, 0, 0), (), False),
    "a group is lost with any of its pods": (
        GROUPS, 2, {"failing": {"g2-1": "no node"}}, (1, 0, 1), ("no node",), False
    ),
    "as many as are missing are refused": ((A,), 3, REFUSED, (1, 0, 0), ("quota", "quota"), False),
    "refused alongside one given up": ((A, LOST), 3, {**NO_NODE, **REFUSED}, (1, 0, 0), ("no node", "quota"), False),
    "nothing is missing": ((A,), 1, REFUSED, (1, 0, 0), (), False),
}  # fmt: skip


@pytest.mark.parametrize(
    ("pods", "desired", "more", "numbers", "failed", "adjusting"), POOLS.values(), ids=POOLS
)
def test_a_pool_counts_its_replicas(pods, desired, more, numbers, failed, adjusting):  # noqa: PLR0917 - one table
    """Ready, starting and draining; what is given up is told with its reason and blocks nothing."""
    pool = count(D, pods, **{"desired": desired, "gpus": 2, "served": set(), "failing": {}, **more})
    assert (pool.counts.ready, pool.counts.starting, pool.counts.draining) == numbers
    assert (pool.failed, pool.is_adjusting) == (failed, adjusting)
    assert pool.counts.gpus == 2


@pytest.mark.parametrize(
    ("pods", "names"), [((A, B), "ab"), ((A, _facts("b", leaving=True)), "a"), (GROUPS, ["g1-0"])]
)
def test_ready_pods_that_stay_are_endpoints(pods, names):
    """A group's leader stands for it."""
    found = count(D, pods, desired=2, gpus=2, served=set(), failing={}).endpoints
    assert found == tuple(Endpoint(name, D, f"http://{name}:8000") for name in names)
