"""The objects of a ProfileRequest: one Job with the GPUs of the largest size, and the least rights."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.api import ProfileRequest
from penstock.core.errors import InvalidSpecError
from penstock_operator.resources.allowances import allowances_of
from penstock_operator.resources.profile import profile_objects

POOLS = {
    "a100": {
        "nodeSelector": {"pool": "a100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "gpuResourceName": "amd.com/gpu",
        "cacheMount": "/models",
        "cacheClaim": "weights",
    },
    "h100": {"gpuResourceName": "nvidia.com/gpu"},
}
POOLED = {"nodePools": POOLS, "services": {"decode": {"nodePool": "a100"}}}


def request(**spec):
    """A request for a graph by name."""
    return ProfileRequest.model_validate(
        {"metadata": {"name": "fast"}, "spec": {"graph": "llama", "isl": 3000, "osl": 150, **spec}}
    )


@pytest.fixture(name="objects")
def made_objects(build, context):
    """Return a function that makes a request's objects for the changed base graph."""

    def make(context=context, graph=None, **spec):
        graph = {"slo": {"ttft": "500ms", "itl": "50ms"}, **(graph or {})}
        return profile_objects(request(**{"image": "own:1", **spec}), build(**graph), context)

    return make


@pytest.fixture(name="pod")
def made_pod(objects):
    """Return a function that makes the specification of the Job's pod."""

    def make(**changes):
        return objects(**changes)[-1]["spec"]["template"]["spec"]

    return make


def test_every_object_belongs_to_the_request(objects):
    """So that its deletion takes all of them along; and none carries the graph's label, whose pods are counted."""
    found = objects()
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [
        ("ServiceAccount", "fast-profile"),
        ("Role", "fast-profile"),
        ("RoleBinding", "fast-profile"),
        ("ConfigMap", "fast-profile"),
        ("ConfigMap", "fast"),
        ("NetworkPolicy", "fast-profile"),
        ("Job", "fast-profile"),
    ]
    for each in found:
        [owner] = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("ProfileRequest", "uid-1", True)
        labels = each["metadata"]["labels"]
        assert labels["penstock.dev/profile"] == labels["app.kubernetes.io/instance"] == "fast"
        assert "penstock.dev/graph" not in labels
    pod_labels = found[-1]["spec"]["template"]["metadata"]["labels"]
    assert pod_labels["penstock.dev/profile"] == "fast"
    assert "penstock.dev/graph" not in pod_labels
    assert pod_labels["app.kubernetes.io/managed-by"] != "penstock", "the graphs' watches select by it"


def test_the_job_may_fill_one_config_map(objects):
    """Named, read and patched; the object itself is made by the operator and left without data."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects(configMap="kept")}
    assert found["Role", "fast-profile"]["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": ["kept"],
            "verbs": ["get", "patch"],
        }
    ]
    assert "data" not in found["ConfigMap", "kept"]


def test_the_job_ends_in_time_and_never_runs_twice_at_once(objects):
    """One pod, replaced only once it is gone; wrong options are not tried again, evictions do not count."""
    spec = objects(timeoutSeconds=600, retries=2)[-1]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["podReplacementPolicy"]) == (1, 1, "Failed")
    assert (spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (600, 2)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "In", "values": [2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


@pytest.mark.parametrize(
    ("spec", "arguments", "gpus"),
    [
        ({}, "--ttft-slo 500ms --itl-slo 50ms --gpus 1", "1"),
        ({"slo": {"ttft": "200ms", "itl": "12.5ms"}}, "--ttft-slo 200ms --itl-slo 12.5ms --gpus 1", "1"),
        ({"maxGpus": 8}, "--ttft-slo 500ms --itl-slo 50ms --gpus 8", "8"),
        ({"maxGpus": 6}, "--ttft-slo 500ms --itl-slo 50ms --gpus 4", "4"),
        (
            {"maxGpus": 8, "tensorParallel": [4, 1, 4]},
            "--ttft-slo 500ms --itl-slo 50ms --gpus 4 --tp 1,4",
            "4",
        ),
    ],
)
def test_the_pod_holds_the_gpus_of_the_largest_size(objects, spec, arguments, gpus):
    """No more than maxGpus, and what is measured is told by the same number."""
    template = objects(**spec)[-1]["spec"]["template"]
    [container] = template["spec"]["containers"]
    said = "profile --config /etc/penstock-profile/graph.yaml --output-dir /tmp/profile --isl 3000 --osl 150"
    assert container["command"] == ["penstock"]
    assert " ".join(container["args"]) == f"{said} {arguments} --config-map fast"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    assert template["metadata"]["annotations"] == {"penstock.dev/gpus": gpus}


def test_targets_come_from_the_graph_where_the_request_has_none(objects):
    """Its spec.slo; a request's own target goes before it, and an ITL that neither has is asked for."""
    graph = {"slo": {"ttft": "1.5s", "itl": "30ms"}}
    [container] = objects(graph=graph)[-1]["spec"]["template"]["spec"]["containers"]
    assert "--ttft-slo 1.5s --itl-slo 30ms" in " ".join(container["args"])
    [container] = objects(graph=graph, slo={"itl": "20ms"})[-1]["spec"]["template"]["spec"]["containers"]
    assert "--ttft-slo 1.5s --itl-slo 20ms" in " ".join(container["args"])
    with pytest.raises(InvalidSpecError, match=r"spec\.slo\.itl: null, and the graph's slo\.itl is null too"):
        objects(graph={"slo": {}})


def test_the_pod_goes_where_the_graphs_workers_go(pod):
    """Its pool's labels, taints, GPUs and weights."""
    found = pod(graph=POOLED)
    assert found["nodeSelector"] == {"pool": "a100"}
    assert [each["key"] for each in found["tolerations"]] == ["nvidia.com/gpu"]
    [container] = found["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "3", "memory": "8Gi", "amd.com/gpu": "1"},
        "limits": {"amd.com/gpu": "1"},
    }
    assert {"name": "model-cache", "mountPath": "/models"} in container["volumeMounts"]
    assert {"name": "HF_HOME", "value": "/models"} in container["env"]
    assert "nodeSelector" not in pod(graph=POOLED, nodePool="h100")


def test_simulated_workers_ask_for_gpus_of_a_pool_alone(pod):
    """So that a profile of the sample runs on a cluster without GPUs."""
    simulated = {"runtime": "simulated"}
    [container] = pod(graph=simulated)["containers"]
    assert set(container["resources"]) == {"requests"}
    [container] = pod(graph={**simulated, **POOLED})["containers"]
    assert container["resources"]["limits"] == {"amd.com/gpu": "1"}


def test_only_kubernetes_variables_are_the_pods(pod):
    """Literals reach the workers with the graph; Secrets by the pod, which the workers inherit."""
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    keys = {"secretRef": {"name": "keys"}}
    graph = {
        "env": [token, {"name": "PLAIN", "value": "1"}],
        "services": {"prefill": {"envFrom": [keys]}, "decode": {"envFrom": [keys]}},
    }
    [container] = pod(graph=graph)["containers"]
    assert token in container["env"]
    assert "PLAIN" not in [each["name"] for each in container["env"]]
    assert container["envFrom"] == [keys]


def test_an_overlay_reaches_the_pod_and_not_its_promises(objects):
    """Requests and labels are its author's; the counted GPUs, the policy and the request's label are not."""
    overlay = {
        "metadata": {"labels": {"team": "a", "penstock.dev/profile": "other"}},
        "spec": {
            "restartPolicy": "OnFailure",
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "250m"}}}],
        },
    }
    template = objects(podTemplate=overlay)[-1]["spec"]["template"]
    assert template["metadata"]["labels"].items() >= {"team": "a", "penstock.dev/profile": "fast"}.items()
    assert template["spec"]["restartPolicy"] == "Never"
    assert template["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "250m"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"nodePool": "l4"}, "spec.nodePool: l4 is not a node pool of graph llama"),
        ({"image": None}, "spec.image: null, but the release's image holds no vllm"),
        ({"graph": {"runtime": "dynamo"}}, "spec.graph: workers of runtime dynamo"),
        (
            {"podTemplate": {"spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}}},
            "nvidia.com/gpu 8 of main, but the budget counts 1; remove it and set spec.maxGpus",
        ),
        ({"podTemplate": {"spec": {"hostPID": True}}}, "spec.podTemplate.spec.hostPID: true is not allowed"),
        (
            {"podTemplate": {"spec": {"serviceAccountName": "admin"}}},
            "spec.podTemplate.spec.serviceAccountName: admin is not allowed",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_key(objects, changes, part):
    """Before anything is made."""
    with pytest.raises(InvalidSpecError) as caught:
        objects(**changes)
    assert part in "; ".join(f"{each.path}: {each.message}" for each in caught.value.problems)


def test_privileges_are_the_operators_to_allow(objects, context):
    """As for graphs."""
    allowed = dataclasses.replace(context, allowed=allowances_of("everything"))
    template = objects(context=allowed, podTemplate={"spec": {"hostPID": True}})[-1]["spec"]["template"]
    assert template["spec"]["hostPID"] is True
