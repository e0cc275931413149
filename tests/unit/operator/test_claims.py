"""What a graph's ResourceClaimTemplates hold, read from the API server."""

from __future__ import annotations

import pytest

from penstock.api import GraphDeployment
from penstock.core.errors import ForbiddenError, NotFoundError
from penstock.kube.objects.device_claims import claimed_devices
from penstock_operator.claims import ClaimReader
from penstock_operator.resources.accelerators import GPU_RESOURCES, is_accelerator

POD = {
    "spec": {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "four"}],
        "containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}],
    }
}
GRAPH = GraphDeployment.model_validate(
    {
        "metadata": {"name": "llama"},
        "spec": {
            "model": {"name": "m"},
            "services": {"worker": {"role": "aggregated", "gpusPerReplica": 4, "podTemplate": POD}},
        },
    }
)


def template(*requests):
    """A ResourceClaimTemplate."""
    return {"spec": {"spec": {"devices": {"requests": list(requests)}}}}


FOUR = template({"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 4}})


class Client:
    """Serves one version of the API, or refuses."""

    def __init__(self, version="v1", error=None):
        self.version, self.error, self.asked = version, error, []

    async def get(self, kind, name, *, namespace):
        """Return the template where its version is served."""
        self.asked.append((kind.api_version, name, namespace))
        if self.error is not None:
            raise self.error
        if kind.api_version != f"resource.k8s.io/{self.version}":
            raise NotFoundError("404")
        return FOUR


@pytest.mark.parametrize(("version", "calls"), [("v1", 1), ("v1beta2", 2), ("v1beta1", 3)])
async def test_a_template_is_read_in_the_version_that_the_cluster_serves(version, calls):
    """From the graph's own namespace."""
    client = Client(version)
    assert await ClaimReader(client, GPU_RESOURCES).of("serving", GRAPH) == {"four": 4}
    assert client.asked[-1] == (f"resource.k8s.io/{version}", "four", "serving")
    assert len(client.asked) == calls


@pytest.mark.parametrize("client", [Client("none"), Client(error=ForbiddenError("403"))])
async def test_of_a_template_that_cannot_be_read_nothing_is_told(client):
    """Missing is not zero."""
    assert await ClaimReader(client, GPU_RESOURCES).of("serving", GRAPH) == {}


async def test_a_graph_without_claims_reads_nothing():
    """As nearly all are."""
    client = Client()
    plain = GRAPH.model_copy(
        update={
            "spec": GRAPH.spec.model_copy(
                update={
                    "services": {
                        "worker": GRAPH.spec.services["worker"].model_copy(update={"pod_template": {}})
                    }
                }
            )
        }
    )
    assert await ClaimReader(client, GPU_RESOURCES).of("serving", plain) == {}
    assert client.asked == []


GPU = "gpu.nvidia.com"


@pytest.mark.parametrize(
    ("requests", "gpus"),
    [
        ([], 0),
        ([{"exactly": {"deviceClassName": GPU}}], 1),
        ([{"deviceClassName": GPU, "count": 2}], 2),
        ([{"exactly": {"deviceClassName": GPU, "count": 2}}, {"exactly": {"deviceClassName": "dra.net"}}], 2),
        ([{"exactly": {"deviceClassName": GPU, "adminAccess": True}}], 0),
        ([{"exactly": {"deviceClassName": GPU, "allocationMode": "All"}}], None),
        ([{"exactly": {"deviceClassName": GPU, "count": "x"}}], None),
        (
            [
                {
                    "firstAvailable": [
                        {"deviceClassName": GPU, "count": 2},
                        {"deviceClassName": "mig.x", "count": 2},
                    ]
                }
            ],
            2,
        ),
        ([{"firstAvailable": [{"deviceClassName": GPU}, {"deviceClassName": GPU, "count": 2}]}], None),
    ],
)
def test_what_a_claim_holds(requests, gpus):
    """A number that depends on the node, or on the alternative that is taken, cannot be told."""
    assert claimed_devices(template(*requests), is_accelerator) == gpus


@pytest.mark.parametrize("broken", [{}, {"spec": None}, {"spec": {"spec": {"devices": {"requests": "x"}}}}])
def test_a_template_of_any_form_can_be_read(broken):
    """It asks for nothing."""
    assert claimed_devices(broken, is_accelerator) == 0
