"""The operator against a real API server: children, drift, adapters, names, deletion, rest."""

from __future__ import annotations

from contextlib import suppress

import pytest
from operating import (
    CHILDREN,
    all_children,
    at_rest,
    condition,
    edit,
    events,
    graph,
    names,
    running,
    settled,
    until,
)

from penstock.core.errors import NotFoundError
from penstock.kube.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    GRAPH_DEPLOYMENT,
    KINDS,
    SCALING_ADAPTER,
    SERVICE,
    SERVICE_ACCOUNT,
)

pytestmark = pytest.mark.cluster


async def test_a_graph_becomes_all_its_children_and_a_status(crds, client, namespace):
    """Each owned by the graph; the finalizer is there before them."""
    async with at_rest(client, namespace):
        live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
    assert live["metadata"]["finalizers"] == ["penstock.dev/drain"]
    assert live["status"]["phase"] == "Pending"
    assert (await condition(client, namespace, "Ready"))["reason"] == "NoReadyWorker"
    for kind in CHILDREN:
        for each in (await client.list(KINDS[kind], namespace=namespace)).items:
            if each["metadata"]["name"].startswith("g-"):
                [owner] = each["metadata"]["ownerReferences"]
                assert (owner["uid"], owner["controller"]) == (live["metadata"]["uid"], True)


async def test_children_follow_the_graphs_labels_without_a_rollout(crds, client, namespace):
    """One that is added arrives, one that is taken away goes, and the pod template stays as it is."""
    made = graph(namespace, inheritedAnnotations=["example.com/cost"])
    made["metadata"] |= {"labels": {"team": "a"}, "annotations": {"example.com/cost": "7"}}

    async def children_say(labels, cost):
        found = [
            each["metadata"]
            for kind in CHILDREN
            for each in (await client.list(KINDS[kind], namespace=namespace)).items
            if each["metadata"]["name"].startswith("g-")
        ]
        others = [
            each["name"]
            for each in found
            if {key: each["labels"].get(key) for key in ("team", "tier")} != labels
            or each["annotations"].get("example.com/cost") != cost
        ]
        return found and not others

    async with at_rest(client, namespace, made):
        await until(lambda: children_say({"team": "a", "tier": None}, "7"), "the graph's labels")
        before = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
        change = {"labels": {"team": None, "tier": "gold"}, "annotations": {"example.com/cost": None}}
        await client.patch(
            GRAPH_DEPLOYMENT, "g", {"metadata": change}, namespace=namespace, field_manager="t"
        )
        await until(lambda: children_say({"team": None, "tier": "gold"}, None), "the changed labels")
    after = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
    assert after["spec"] == before["spec"]


async def test_deleted_children_come_back(crds, client, namespace):
    """Every kind of them, each with an Event."""
    async with at_rest(client, namespace):
        for kind, wanted in CHILDREN.items():
            for name in wanted:
                await client.delete(KINDS[kind], name, namespace=namespace)
        await until(lambda: all_children(client, namespace), "all children again")

        async def is_said():
            notes = {each["message"] for each in await events(client, namespace, "Repaired")}
            return {"Service g-decode: was deleted", "Deployment g-frontend: was deleted"} <= notes

        await until(is_said, "Events of the deletions")


async def test_a_hand_edited_child_is_repaired_and_an_event_names_the_path(crds, client, namespace):
    """Values, labels and added list elements of ours."""
    async with at_rest(client, namespace):
        before = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
        grace = {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}
        await edit(client, namespace, grace, name="g-decode", kind=DEPLOYMENT, manager="kubectl-edit")
        label = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}}
        await client.patch(SERVICE, "g-decode", label, namespace=namespace, field_manager="kubectl-edit")

        async def repaired():
            deployment = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
            service = await client.get(SERVICE, "g-decode", namespace=namespace)
            label = service["metadata"]["labels"]["app.kubernetes.io/managed-by"]
            return deployment["spec"] == before["spec"] and label == "penstock"

        await until(repaired, "the repair")

        found = await until(lambda: events(client, namespace, "Repaired"), "an event")
    [note] = [each["message"] for each in found if "Deployment" in each["message"]]
    assert note == (
        "Deployment g-decode: spec.template.spec.terminationGracePeriodSeconds: "
        f"expected {before['spec']['template']['spec']['terminationGracePeriodSeconds']}, found 7"
    )


async def test_what_is_no_longer_wanted_goes_from_a_child(crds, client, namespace):
    """Also fields that the creation set: an environment variable taken out of the graph."""
    wanted = graph(namespace, env=[{"name": "EXTRA", "value": "1"}, {"name": "KEPT", "value": "1"}])

    async def env():
        live = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
        [container] = live["spec"]["template"]["spec"]["containers"]
        return {each["name"] for each in container["env"]}

    async with at_rest(client, namespace, wanted):
        assert {"EXTRA", "KEPT"} <= await env()
        await edit(client, namespace, {"env": [{"name": "KEPT", "value": "1"}]})

        async def gone():
            return "EXTRA" not in await env()

        await until(gone, "the variable to go")
        assert "KEPT" in await env()
        live = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
        ours = [each for each in live["metadata"]["managedFields"] if each["manager"] == "penstock-operator"]
        assert [each["operation"] for each in ours] == ["Apply"]


async def test_the_adapters_number_is_its_owners_within_the_bounds(crds, client, namespace):
    """`kubectl scale` sets it; a deleted adapter comes back with the number that runs."""

    async def number():
        live = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
        return live["spec"]["replicas"]

    async def is_number(wanted):
        return await number() == wanted

    async with at_rest(client, namespace) as operator:
        crds.kubectl("scale", "gsa/g-decode", "--replicas=3", "-n", namespace)
        await until(lambda: is_number(3), "3 replicas")
        crds.kubectl("scale", "gsa/g-decode", "--replicas=9", "-n", namespace)
        await settled(client, namespace, operator)
        assert await number() == 3
        adapter = await client.get(SCALING_ADAPTER, "g-decode", namespace=namespace)
        told = {each["type"]: each for each in adapter["status"]["conditions"]}
        limited = told["ScalingLimited"]
        assert (limited["status"], limited["reason"]) == ("True", "TooManyReplicas")
        assert told["ReplicaFailure"]["status"] == "False"
        await client.delete(SCALING_ADAPTER, "g-decode", namespace=namespace)

        async def back():
            with suppress(NotFoundError):
                live = await client.get(SCALING_ADAPTER, "g-decode", namespace=namespace)
                return live["metadata"]["uid"] != adapter["metadata"]["uid"] and live

        live = await until(back, "the adapter")
        assert live["spec"]["replicas"] == 3
        await settled(client, namespace, operator)
        assert await number() == 3


async def test_somebody_elses_object_of_that_name_is_never_touched(crds, client, namespace):
    """The graph says so, makes everything else, and continues when the name is free."""
    foreign = CONFIG_MAP.of({"name": "g-router", "namespace": namespace}, data={"mine": "yes"})
    made = await client.create(foreign, field_manager="somebody")
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace) as operator:

        async def told():
            return (await condition(client, namespace, "Degraded")).get("reason") == "NameConflict"

        await until(told, "the condition")
        message = (await condition(client, namespace, "Degraded"))["message"]
        assert "ConfigMap g-router exists and is not owned by a GraphDeployment" in message
        assert await client.get(CONFIG_MAP, "g-router", namespace=namespace) == made
        assert await names(client, "Deployment", namespace) == CHILDREN["Deployment"]
        await client.delete(CONFIG_MAP, "g-router", namespace=namespace)
        operator.queue.enqueue((namespace, "g"), urgent=True)
        await until(lambda: all_children(client, namespace), "all children")


async def test_an_orphaned_service_account_is_taken_back(crds, client, namespace):
    """Children whose owner reference was lost are still the graph's."""
    async with at_rest(client, namespace):
        lost = {"metadata": {"ownerReferences": []}}
        await client.patch(SERVICE_ACCOUNT, "g-worker", lost, namespace=namespace, field_manager="me")

        async def owned():
            live = await client.get(SERVICE_ACCOUNT, "g-worker", namespace=namespace)
            return live["metadata"].get("ownerReferences")

        await until(owned, "the owner reference")


@pytest.mark.parametrize(
    "changed",
    [
        (SERVICE, "g-decode", "/spec/ports/0/port", 9000),
        (SERVICE, "g-frontend", "/spec/ports/0/name", "other"),
        (DEPLOYMENT, "g-decode", "/spec/template/spec/containers/0/ports/0/containerPort", 9000),
    ],
    ids=["a Service's port", "its name", "a container's port"],
)
async def test_an_edited_key_of_a_list_is_repaired(crds, client, namespace, changed):
    """Applied as it is, the entry would come back alongside the edited one, which the API server refuses."""
    kind, name, path, value = changed
    async with at_rest(client, namespace) as operator:
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
