"""What claims hold, by the ResourceClaimTemplates of a real API server."""

import pytest

from penstock.api import GraphDeployment
from penstock.core.errors import InvalidSpecError
from penstock.kube.kinds import RESOURCE_CLAIM_TEMPLATE
from penstock_operator.claims import ClaimReader
from penstock_operator.resources import BuildContext, children
from penstock_operator.resources.accelerators import GPU_RESOURCES

POD = {
    "spec": {
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "four"}],
        "containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}],
    }
}
FOUR = {"requests": [{"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 4}}]}


def graph(**service):
    """A graph of one worker whose pods claim."""
    worker = {"role": "aggregated", "podTemplate": POD, **service}
    spec = {"model": {"name": "m"}, "services": {"worker": worker}, "planner": {"enabled": False}}
    return GraphDeployment.model_validate({"metadata": {"name": "llama"}, "spec": spec})


async def test_a_template_is_counted_and_its_pods_are_accepted(client, namespace):
    """The server takes the pods, which ask for the claim alone; another number of GPUs is refused before it is asked."""
    wanted = graph(gpusPerReplica=4)
    reader = ClaimReader(client, GPU_RESOURCES)
    assert await reader.of(namespace, wanted) == {}
    template = RESOURCE_CLAIM_TEMPLATE.of(
        {"name": "four", "namespace": namespace}, spec={"spec": {"devices": FOUR}}
    )
    await client.create(template, field_manager="test")

    known = await reader.of(namespace, wanted)
    context = BuildContext(owner_uid="", namespace=namespace, claimed_gpus=known)
    (deployment,) = (
        each
        for each in children(wanted, context, replicas={}, unavailable={})
        if each["kind"] == "Deployment"
    )
    made = await client.create(deployment, field_manager="test", dry_run=True)

    assert known == {"four": 4}
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
    with pytest.raises(InvalidSpecError, match="set gpusPerReplica: 4"):
        children(graph(), context, replicas={}, unavailable={})
