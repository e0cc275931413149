"""CPU and memory that pods request: the runtime's rule, below what a podTemplate says."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [("vllm", {"cpu": "1", "memory": "256Mi"}), ("simulated", {"cpu": "100m", "memory": "256Mi"})],
)
def test_a_router_of_real_workers_asks_for_its_core(container, runtime, expected):
    """A starved one keeps all requests waiting; a laptop's cluster holds the samples; the podTemplate has the last word."""
    assert container("frontend", runtime=runtime)["resources"]["requests"] == expected
    asked = {"name": "main", "resources": {"requests": {"cpu": "3"}}}
    services = {"frontend": {"podTemplate": {"spec": {"containers": [asked]}}}}
    found = container("frontend", runtime=runtime, services=services)["resources"]
    assert found["requests"] == {"cpu": "3", "memory": "256Mi"}


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({"runtime": "vllm"}, 1, {"cpu": "3", "memory": "8Gi"}),
        ({"runtime": "vllm"}, 8, {"cpu": "10", "memory": "36Gi"}),
        ({"runtime": "vllm", "engine": {"kvBufferDevice": "cpu"}}, 1, {"cpu": "1", "memory": "4Gi"}),
        ({"runtime": "dynamo"}, 2, {"cpu": "4", "memory": "12Gi"}),
        ({"runtime": "dynamo", "engine": {"mocker": True}}, 2, {"cpu": "100m", "memory": "256Mi"}),
        ({"runtime": "simulated"}, 2, {"cpu": "100m", "memory": "256Mi"}),
    ],
)
def test_workers_request_what_their_runtime_needs(container, changes, gpus, expected):
    """A pod that requests nothing starves alongside others and is the first to be evicted; the podTemplate has the last word."""

    def requests(**service):
        service = {"gpusPerReplica": gpus, **service}
        found = container("decode", **changes, planner={"enabled": False}, services={"decode": service})
        return {key: found["resources"]["requests"].get(key) for key in ("cpu", "memory")}

    assert requests() == expected
    asked = {"name": "main", "resources": {"requests": {"cpu": "20"}}}
    assert requests(podTemplate={"spec": {"containers": [asked]}}) == {**expected, "cpu": "20"}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"cpu": "2500m", "memory": "64Gi"}, {"cpu": "2500m", "memory": "8Gi"}),
        ({"cpu": 3, "memory": "1G"}, {"cpu": "3", "memory": "1G"}),
        ({"cpu": "much"}, {"cpu": "3", "memory": "8Gi"}),
    ],
)
def test_own_requests_keep_below_a_podtemplates_limits(container, limits, expected):
    """The API server refuses a pod that requests more than its limit; one who writes both is told so by it."""

    def requests(**resources):
        patch = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
        found = container("decode", runtime="vllm", services={"decode": {"podTemplate": patch}})
        return {key: found["resources"]["requests"][key] for key in ("cpu", "memory")}

    assert requests(limits=limits) == expected
    assert requests(limits={"cpu": "1"}, requests={"cpu": "2"}) == {"cpu": "2", "memory": "8Gi"}


def test_dynamos_frontend_requests_a_core_before_real_workers(container):
    """As Penstock's router does, whose place it takes."""
    requests = {
        mocker: container("frontend", runtime="dynamo", engine={"mocker": mocker})["resources"]["requests"]
        for mocker in (False, True)
    }
    assert requests == {
        False: {"cpu": "1", "memory": "256Mi"},
        True: {"cpu": "100m", "memory": "256Mi"},
    }
