"""A shadow planner reads the replicas of a Deployment from ``/scale`` of a real API server, and has no right to write."""

from __future__ import annotations

import pytest

from penstock.api import Role
from penstock.assess.shadow.reader import scale_of
from penstock.assess.shadow.watched import WatchedPool
from penstock.core.errors import ConfigError
from penstock.kube.kinds import DEPLOYMENT
from penstock_planner.decide.demand.observation import PoolCounts

pytestmark = pytest.mark.cluster


async def test_scale_gives_the_replicas_that_the_hpa_asked_for_and_those_that_exist(client, namespace):
    """Replicas that are asked for and do not exist count as starting; the namespace's other Deployments are unknown."""
    labels = {"app": "vllm"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "vllm"}]}}
    spec = {"replicas": 3, "selector": {"matchLabels": labels}, "template": pod}
    metadata = {"name": "vllm", "namespace": namespace}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    await client.create(deployment, field_manager="hpa")
    pool = WatchedPool(Role.AGGREGATED, "vllm", namespace)
    assert await scale_of(client, pool) == PoolCounts(0, 3)
    await client.patch(
        DEPLOYMENT,
        "vllm",
        {"status": {"replicas": 2}},
        namespace=namespace,
        subresource="status",
        field_manager="hpa",
    )
    assert await scale_of(client, pool) == PoolCounts(2, 1)
    with pytest.raises(ConfigError, match="has no such Deployment; give --shadow NAMESPACE/DEPLOYMENT"):
        await scale_of(client, WatchedPool(Role.AGGREGATED, "vlm", namespace))
