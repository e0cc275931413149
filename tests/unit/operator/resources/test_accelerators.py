"""Devices in podTemplates that no budget counts are told."""

from __future__ import annotations

import pytest

from penstock_operator.resources.accelerators import GPU_RESOURCES, uncounted_devices


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
