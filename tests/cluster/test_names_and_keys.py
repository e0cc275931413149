"""What a plain apply cannot do: edited keys of lists; and names that two graphs both want."""

from __future__ import annotations

import pytest
from operating import all_children, condition, graph, names, running, settled, until

from penstock.kube.kinds import DEPLOYMENT, SCALING_ADAPTER, SERVICE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    "edit",
    [
        (SERVICE, "g-decode", "/spec/ports/0/port", 9000),
        (SERVICE, "g-frontend", "/spec/ports/0/name", "other"),
        (DEPLOYMENT, "g-decode", "/spec/template/spec/containers/0/ports/0/containerPort", 9000),
    ],
    ids=["a Service's port", "its name", "a container's port"],
)
async def test_an_edited_key_of_a_list_is_repaired(crds, client, namespace, edit):
    """Applied as it is, the entry would come back beside the edited one, which the API server refuses."""
    kind, name, path, value = edit
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace) as operator:
        await until(lambda: all_children(client, namespace), "all children")
        await settled(client, namespace, operator)
        before = (await client.get(kind, name, namespace=namespace))["spec"]
        patch = [{"op": "replace", "path": path, "value": value}]
        await client.patch(kind, name, patch, namespace=namespace, field_manager="kubectl-edit")

        async def repaired():
            return (await client.get(kind, name, namespace=namespace))["spec"] == before

        await until(repaired, "the repair")
        await settled(client, namespace, operator)
        # Pods that no node takes may trouble it; what could not be written must not.
        assert (await condition(client, namespace, "Degraded"))["reason"] != "ApplyFailed"
        mark = crds.audit_mark()
        operator.queue.enqueue((namespace, "g"), urgent=True)
        await settled(client, namespace, operator)
        writes = [each["requestURI"] for each in crds.audit_writes(after=mark)]
        # A scheduler on the same server tells of pods that no node takes.
        own = [each for each in writes if f"/namespaces/{namespace}/" in each and "/events" not in each]
        assert own == []


async def test_two_graphs_that_want_the_same_names(crds, client, namespace):
    """`a` with service b-c and `a-b` with service c: the second one says so, and the first one stays as it is."""
    first = graph(namespace, "a")
    first["spec"]["services"]["b-c"] = first["spec"]["services"].pop("decode")
    second = graph(namespace, "a-b")
    second["spec"]["services"]["c"] = second["spec"]["services"].pop("decode")
    await client.create(first, field_manager="test")
    async with running(client, namespace) as operator:

        async def complete():
            return {"a-b-c", "a-frontend", "a-prefill"} <= await names(client, "Deployment", namespace)

        await until(complete, "the first one's workloads")
        await settled(client, namespace, operator, name="a")
        kinds = (DEPLOYMENT, SERVICE, SCALING_ADAPTER)
        before = [await client.get(kind, "a-b-c", namespace=namespace) for kind in kinds]
        await client.create(second, field_manager="test")

        async def told():
            found = await condition(client, namespace, "Degraded", "a-b")
            return found.get("reason") == "NameConflict" and found["message"]

        message = await until(told, "the condition")
        assert "Deployment a-b-c belongs to GraphDeployment a" in message
        await settled(client, namespace, operator, name="a-b")
        assert [await client.get(kind, "a-b-c", namespace=namespace) for kind in kinds] == before
        assert (await condition(client, namespace, "Degraded", "a"))["reason"] != "NameConflict"
        assert "a-b-frontend" in await names(client, "Deployment", namespace)
