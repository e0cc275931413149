"""Kinds that the cluster forgets and learns again while the operator runs."""

from __future__ import annotations

import asyncio

import pytest
from operating import CHILDREN, all_children, at_rest, condition, graph, names, running, settled, until
from patience import LIMIT_S

from penstock.core.errors import ClusterError
from penstock.kube.kinds import SCALING_ADAPTER

pytestmark = [
    pytest.mark.cluster,
]

NAMESPACE = "default"
ADAPTERS = "scalingadapters.penstock.dev"
GRAPHS = "graphdeployments.penstock.dev"


def there(client):
    """Return a check that exactly the graph's children are there; a kind that is away has none."""

    async def check():
        try:
            return await all_children(client, NAMESPACE)
        except ClusterError:
            return False

    return check


@pytest.mark.nightly
async def test_adapters_without_their_kind_cost_no_child_and_come_back(own):
    """What runs continues, the status says it, nothing needs a hand."""
    plane, client = own
    async with at_rest(client, NAMESPACE) as operator:
        await asyncio.to_thread(plane.kubectl, "delete", "crd", ADAPTERS)

        async def told():
            found = await condition(client, NAMESPACE, "Degraded")
            words = ("ScalingAdapter g-", "is its CustomResourceDefinition installed?")
            return found.get("reason") == "ApplyFailed" and all(each in found["message"] for each in words)

        await until(told, "the condition")
        assert await names(client, "Deployment", NAMESPACE) == CHILDREN["Deployment"]
        await asyncio.to_thread(plane.install_crds)
        await until(there(client), "the adapters")
        await settled(client, NAMESPACE, operator)
        assert (await condition(client, NAMESPACE, "Degraded"))["status"] == "False"
        adapter = await client.get(SCALING_ADAPTER, "g-decode", namespace=NAMESPACE)
        assert adapter["spec"]["replicas"] == 1


async def test_an_operator_without_the_graphs_kind_ends_and_the_next_waits_for_it(own):
    """The kind takes its objects along: the graph is drained and deleted in order first."""
    plane, client = own

    async def operate():
        async with at_rest(client, NAMESPACE) as operator:
            await asyncio.to_thread(plane.kubectl, "delete", "crd", GRAPHS, "--timeout=50s")
            assert await names(client, "Deployment", NAMESPACE) == set()
            await asyncio.wait({operator.task}, timeout=LIMIT_S)

    with pytest.raises(ClusterError, match="kopf ended"):
        await operate()
    for each in asyncio.all_tasks():  # kopf leaves the other kind's to the end of the process
        if each.get_name().startswith("watcher for"):
            each.cancel()
    async with running(client, NAMESPACE) as operator:

        async def problem():
            return "graphdeployments" in (operator.problem() or "")

        await until(problem, "the operator to be unready in words")
        await asyncio.to_thread(plane.install_crds)
        await client.create(graph(NAMESPACE), field_manager="test")
        await until(there(client), "all children of the new graph")
        await settled(client, NAMESPACE, operator)
        assert operator.problem() is None
