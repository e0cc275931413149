"""`kubectl apply` of a changed admission section: through API server and operator to a running router, which continues."""

from __future__ import annotations

import pytest
from operating import at_rest, edit, settled, until

from penstock.api import Role
from penstock.api.manifests import load_graph
from penstock.kube.kinds import CONFIG_MAP, DEPLOYMENT
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.busy import NO_THRESHOLDS, BusyThresholds
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

pytestmark = pytest.mark.cluster


async def test_a_changed_threshold_reaches_a_running_router_and_rolls_none(crds, client, namespace, tmp_path):
    """The routers' Deployment keeps its generation; the ConfigMap's file, as a kubelet mounts it, is followed."""
    file = tmp_path / "graph.yaml"

    async def mounted():
        """Bring the ConfigMap here, as a kubelet does."""
        data = (await client.get(CONFIG_MAP, "g-router", namespace=namespace))["data"]
        fresh = tmp_path / "fresh"
        fresh.write_text(data["graph.yaml"], encoding="utf-8")
        fresh.replace(file)

    async with at_rest(client, namespace) as operator:
        before = await client.get(DEPLOYMENT, "g-frontend", namespace=namespace)
        await mounted()
        router = started(file)
        await router.start()
        try:
            admission = {"mode": "token-capacity", "activeDecodeBlocksThreshold": 0.7}
            await edit(client, namespace, {"router": {"admission": admission}})

            async def holds():
                await mounted()
                return router.core.busy[Role.DECODE].thresholds == BusyThresholds(0.7, 100_000)

            await until(holds, "the threshold in the router")
            await settled(client, namespace, operator)
        finally:
            await router.close()
        after = await client.get(DEPLOYMENT, "g-frontend", namespace=namespace)
        assert after["metadata"]["generation"] == before["metadata"]["generation"]
        assert after["spec"]["template"] == before["spec"]["template"]


def started(file):
    """Make a router of the file, before workers that nobody serves."""
    spec = load_graph(file).spec
    workers = tuple(
        WorkerSpec(role.value, role, "http://127.0.0.1:9") for role in (Role.PREFILL, Role.DECODE)
    )
    router = RouterServer(
        RouterSettings(model="tiny", disaggregated=True, config=spec.router, graph_file=file, workers=workers)
    )
    assert router.core.busy[Role.DECODE].thresholds == NO_THRESHOLDS
    return router
