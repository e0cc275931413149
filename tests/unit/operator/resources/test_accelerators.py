"""Devices in podTemplates that no budget counts are told."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.core.errors import InvalidSpecError
from penstock_operator.resources.accelerators import (
    GPU_RESOURCES,
    claimed_gpus,
    is_accelerator,
    uncounted_devices,
)


def patched(limits, kind="containers", **service):
    """A service whose main container requests resources."""
    pod = {"spec": {kind: [{"name": "main", "resources": {"limits": limits, "requests": limits}}]}}
    return {"services": {"decode": {"podTemplate": pod, **service}}}


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"acme.io/npu": 2}, ["acme.io/npu"]),
        ({"acme.io/npu": "1", "other.dev/tpu": 1}, ["acme.io/npu", "other.dev/tpu"]),
        ({"acme.io/npu": "0"}, []),
        ({"acme.io/npu": None}, []),
        ({"nvidia.com/gpu": 1, "habana.ai/gaudi2": 1}, []),
        ({"rdma/hca_shared_devices_a": 1, "vpc.amazonaws.com/efa": 1}, []),
        ({"cpu": 8, "memory": "1Gi", "hugepages-2Mi": "1Gi", "ephemeral-storage": "1Gi"}, []),
        ({"batch.kubernetes.io/x": 1}, []),
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_device_outside_the_list_is_told_once_with_its_place(build, limits, told, kind):
    """Whatever a device plugin offers may be an accelerator, except the network's adapters and Kubernetes' own."""
    found = list(uncounted_devices(build(**patched(limits, kind))))
    assert [each.message.partition(" ")[0] for each in found] == told
    place = f"spec.services.decode.podTemplate.spec.{kind}[main].resources"
    assert {each.path for each in found} <= {place}
    assert all("operator.gpuResources" in each.message for each in found)


def test_what_the_list_or_the_pool_names_is_counted(build):
    """The chart's list, or a node pool of such devices."""
    graph = patched({"acme.io/npu": 1})
    assert list(uncounted_devices(build(**graph), (*GPU_RESOURCES, "acme.io/*"))) == []
    pooled = patched({"acme.io/npu": 1}, nodePool="npus")
    assert (
        list(uncounted_devices(build(**pooled, nodePools={"npus": {"gpuResourceName": "acme.io/npu"}}))) == []
    )


@pytest.mark.parametrize(
    "pod",
    [
        {},
        {"spec": {"containers": None}},
        {"spec": {"containers": [{"$patch": "replace"}]}},
        {"spec": {"containers": [{"name": "main", "resources": None}]}},
    ],
)
def test_any_patch_can_be_read(build, pod):
    """A patch deletes with null and directs with $patch."""
    assert list(uncounted_devices(build(services={"decode": {"podTemplate": pod}}))) == []


@pytest.mark.parametrize(
    ("resources", "is_told"),
    [
        ({"claims": [{"name": "gpu"}]}, True),
        ({"claims": [{"name": "gpu"}], "limits": {"nvidia.com/gpu": 2}}, True),
        ({"claims": [{"name": "gpu"}], "limits": {"nvidia.com/gpu": "0"}}, False),
        ({"claims": [{"name": "gpu"}], "limits": {"nvidia.com/gpu": None}}, False),
        ({"limits": {"nvidia.com/gpu": 2}}, False),
    ],
)
def test_a_claim_beside_the_extended_resource_is_told(build, resources, is_told):
    """A pod would get both, and the budget counts gpusPerReplica alone; a claim may as well be of a network adapter."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "four-gpus"}]
    pod = {"spec": {"resourceClaims": claims, "containers": [{"name": "main", "resources": resources}]}}
    found = list(uncounted_devices(build(services={"decode": {"podTemplate": pod, "gpusPerReplica": 4}})))
    assert [each.path for each in found] == ["spec.services.decode.podTemplate.spec.resourceClaims"] * is_told
    assert all('nvidia.com/gpu: "0"' in each.message for each in found)


CLAIMS = [
    {"name": "gpu", "resourceClaimTemplateName": "four"},
    {"name": "nic", "resourceClaimTemplateName": "nic"},
]


def claiming(*names, limits=None):
    """A decode worker's pod that uses claims by name."""
    resources = {"claims": [{"name": each} for each in names], "limits": limits or {}}
    return {"spec": {"resourceClaims": CLAIMS, "containers": [{"name": "main", "resources": resources}]}}


@pytest.mark.parametrize(
    ("used", "claimed", "gpus"),
    [
        (["gpu"], {"four": 4}, 4),
        (["gpu", "nic"], {"four": 4, "nic": 0}, 4),
        (["gpu", "nic"], {"four": 4}, None),
        (["nic"], {"four": 4, "nic": 0}, 0),
        ([], {"four": 4}, None),
        (["other"], {"four": 4}, None),
    ],
)
def test_the_gpus_of_the_claims_that_containers_use_are_counted(build, used, claimed, gpus):
    """Of one that cannot be read nothing is told of the pod; a claim that no container uses holds nothing of it."""
    graph = build(services={"decode": {"podTemplate": claiming(*used), "gpusPerReplica": 4}})
    assert claimed_gpus(graph, "decode", claimed) == gpus
    is_told = bool(list(uncounted_devices(graph, claimed=claimed)))
    assert is_told is (gpus is None and bool(used))


def test_a_pod_whose_claims_hold_its_gpus_requests_none_besides(objects, context):
    """The budget counts gpusPerReplica, which must be what the claims of a pod hold."""

    def container(**service):
        services = {"decode": {"podTemplate": claiming("gpu"), **service}}
        known = dataclasses.replace(context, claimed_gpus={"four": 4})
        template = objects(context=known, services=services)["Deployment", "llama-decode"]["spec"]["template"]
        assert template["metadata"]["annotations"]["penstock.dev/gpus"] == "4"
        return template["spec"]["containers"][0]

    found = container(gpusPerReplica=4)
    assert found["resources"]["claims"] == [{"name": "gpu"}]
    assert "nvidia.com/gpu" not in {**found["resources"]["requests"], **found["resources"].get("limits", {})}
    with pytest.raises(
        InvalidSpecError, match="hold 4 GPUs in each pod, but the budget counts 1; set gpusPerReplica: 4"
    ):
        container()
    both = claiming("gpu", limits={"nvidia.com/gpu": 4})
    with pytest.raises(InvalidSpecError, match=r"nvidia\.com/gpu 4 of main, but the budget counts 0"):
        container(gpusPerReplica=4, podTemplate=both)


def test_device_classes_of_the_vendors_are_gpus():
    """And no class of network adapters."""
    classes = ("gpu.nvidia.com", "mig.nvidia.com", "gpu.amd.com", "neuron.aws.com", "tpu.google.com")
    assert all(map(is_accelerator, classes))
    assert not is_accelerator("dra.net")
