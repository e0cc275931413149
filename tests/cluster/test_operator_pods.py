"""The operator with controllers, scheduler and fake nodes: readiness, drains, the GPU budget at every instant."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from operating import (
    BudgetWatch,
    Loads,
    condition,
    edit,
    events,
    graph,
    is_ready,
    no_graph,
    pods_of,
    running,
    scale,
    set_round,
    settled,
    until,
)

from penstock.core.errors import NotFoundError
from penstock.kube.kinds import DEPLOYMENT, GRAPH_DEPLOYMENT, POD, SCALING_ADAPTER
from penstock_operator.plan.drain import PodLoad

pytestmark = [pytest.mark.cluster]


def replicas_are(client, namespace, service, number):
    """Return a check of how many live ready pods there are, none leaving."""

    async def check():
        pods = await pods_of(client, namespace, service)
        return len(pods) == number and all(each.ready and each.alive for each in pods)

    return check


async def test_a_deleted_node_is_told_before_kubernetes_misses_it(crds, kwok, make_node, client, namespace):
    """Its pods are still Ready in the API: the graph is not, and Degraded names the node; once replaced all is well."""
    first = make_node(gpus=8)
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace):
        await until(is_ready(client, namespace), "readiness")
        make_node(gpus=8)
        kwok.kubectl("delete", "node", first)

        async def told():
            said = await condition(client, namespace, "Degraded")
            return said if said.get("reason") == "NodeLost" else None

        degraded = await until(told, "the loss is told")
        pods = await pods_of(client, namespace, "decode")
        assert f"node {first} was deleted" in degraded["message"]
        assert (await condition(client, namespace, "Ready"))["status"] == "False"
        assert [each.ready and each.alive for each in pods] == [True]
        # As the garbage collector does in the end.
        kwok.kubectl("delete", "pods", "--all", "--namespace", namespace, "--grace-period=0", "--force")
        await until(is_ready(client, namespace), "pods on the other node")


async def test_a_graph_becomes_ready_and_rests(crds, kwok, make_node, client, namespace):
    """Gates are lifted, pods run, Ready is true; then nothing is written, however often the graph is reconciled."""
    make_node(gpus=8)
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace, resync_s=1.0) as operator:
        await until(is_ready(client, namespace), "readiness")
        await settled(client, namespace, operator)
        mark = kwok.audit_mark()
        for _ in range(4):
            before = operator.page()

            async def looked(before=before):
                return operator.page() != before

            await until(looked, "a reconcile that nothing but time asked for")
        writes = [
            each
            for each in kwok.audit_writes(after=mark, user="admin")
            if each["objectRef"].get("namespace") == namespace
            and "penstock" in each.get("requestURI", "") + str(each.get("userAgent", ""))
        ]
    assert writes == []
    live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
    assert live["status"]["phase"] == "Ready"
    assert live["status"]["summary"] == {"prefill": "1/1", "decode": "1/1", "gpus": "2/4"}


async def test_a_scale_down_waits_for_the_victims_requests(crds, kwok, make_node, client, namespace):
    """The busy pod stays, the idle one is marked, leaves its Service, and goes; the number falls only then."""
    make_node(gpus=8)
    loads = Loads()
    wanted = graph(namespace)
    for service in ("prefill", "decode"):
        wanted["spec"]["services"][service]["terminationGracePeriodSeconds"] = 60
    await client.create(wanted, field_manager="test")
    async with running(client, namespace, loads=loads):
        await until(is_ready(client, namespace), "readiness")
        await scale(client, namespace, "decode", 2)
        await until(replicas_are(client, namespace, "decode", 2), "two decode pods")
        first, second = sorted(await pods_of(client, namespace, "decode"), key=lambda each: each.name)
        loads.busy = {first.name: PodLoad(3, 1, 0.5), second.name: PodLoad(1, 0, 0.2)}
        await scale(client, namespace, "decode", 1)

        async def marked():
            return [each for each in await pods_of(client, namespace, "decode") if each.draining]

        [victim] = await until(marked, "a victim")
        assert victim.name == second.name
        await asyncio.sleep(5)  # beyond the settle time: it still has a request
        assert len([each for each in await pods_of(client, namespace, "decode") if each.alive]) == 2
        assert (await client.get(DEPLOYMENT, "g-decode", namespace=namespace))["spec"]["replicas"] == 2
        loads.busy.pop(second.name)
        await until(replicas_are(client, namespace, "decode", 1), "one decode pod")
        [left] = await pods_of(client, namespace, "decode")
        assert left.name == first.name


async def test_the_budget_is_never_exceeded(crds, kwok, make_node, client, namespace):
    """Scaling beyond it, rolling, killing and hand-edited numbers, judged at every event of the API server."""
    make_node(gpus=64)
    wanted = graph(namespace)
    await client.create(wanted, field_manager="test")
    async with running(client, namespace, loads=Loads()), BudgetWatch(client, namespace).on() as budget:
        await until(is_ready(client, namespace), "readiness")
        await scale(client, namespace, "decode", 3)
        await scale(client, namespace, "prefill", 3)

        async def full():
            found = (await condition(client, namespace, "Schedulable")).get("reason")
            return found == "WaitingForBudget" and budget.most == 4

        await until(full, "the budget to be used up")
        await set_round(client, namespace, 1)
        await edit(client, namespace, {"replicas": 7}, name="g-decode", kind=DEPLOYMENT, manager="me")
        for _ in range(4):
            for each in (await pods_of(client, namespace, "decode"))[:2]:
                if each.alive:
                    with suppress(NotFoundError):  # a scale-down may have taken it since
                        await client.delete(POD, each.name, namespace=namespace)
            await asyncio.sleep(1)
        await scale(client, namespace, "prefill", 1)

        async def rolled():
            both = [*await pods_of(client, namespace, "prefill"), *await pods_of(client, namespace, "decode")]
            running_pods = [each for each in both if each.ready and each.alive]
            return len(both) == len(running_pods) == 4

        await until(rolled, "four ready workers and none more")
    assert budget.seen > 20
    assert budget.most == 4


async def test_deletion_drains_and_leaves_no_pod(crds, kwok, make_node, client, namespace):
    """Routers first, then workers, then the rest."""
    make_node(gpus=8)
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace, loads=Loads()):
        await until(is_ready(client, namespace), "readiness")
        await client.delete(GRAPH_DEPLOYMENT, "g", namespace=namespace)
        order = []

        async def gone():
            for role in ("frontend", "decode"):
                if role not in order and not await pods_of(client, namespace, role):
                    order.append(role)
            return await no_graph(client, namespace)()

        await until(gone, "the graph to go")
        assert order == ["frontend", "decode"]
        assert (await client.list(POD, namespace=namespace)).items == []
        assert (await client.list(DEPLOYMENT, namespace=namespace)).items == []


async def test_pods_that_a_quota_refuses_are_told_and_the_refusal_ends(
    crds, kwok, make_node, client, namespace
):
    """Degraded and Schedulable name the quota, so do the adapter and an Event; a raised quota ends it."""
    make_node(gpus=8)
    kwok.kubectl("create", "quota", "q", "--hard=pods=3", "--namespace", namespace)
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace):
        await until(is_ready(client, namespace), "readiness")
        await scale(client, namespace, "decode", 2)

        async def is_told():
            return (await condition(client, namespace, "Degraded")).get("reason") == "FailedCreate"

        await until(is_told, "the refusal")
        message = (await condition(client, namespace, "Schedulable"))["message"]
        assert "g-decode: the API server refuses its pods: exceeded quota: q, " in message
        assert message.endswith("raise ResourceQuota q of the namespace, or lower replicas")

        async def fails():
            adapter = await client.get(SCALING_ADAPTER, "g-decode", namespace=namespace)
            held = {each["type"]: each for each in adapter["status"]["conditions"]}["ReplicaFailure"]
            return (held["status"], held["reason"]) == ("True", "FailedCreate")

        async def emitted():
            found = await events(client, namespace, "FailedCreate")
            return [each["type"] for each in found if each["involvedObject"]["name"] == "g"]

        # The graph's condition is written first.
        await until(fails, "the adapter's condition", timeout_s=10)
        assert await until(emitted, "the Event", timeout_s=10) == ["Warning"]
        await scale(client, namespace, "decode", 1)

        async def is_over():
            return (await condition(client, namespace, "Degraded")).get("status") == "False"

        await until(is_over, "the end of the refusal")


async def test_a_node_pool_without_nodes_is_told_in_the_schedulers_words(
    crds, kwok, make_node, client, namespace
):
    """Schedulable is false with the scheduler's message and a remedy, until such a node comes."""
    make_node(gpus=8)
    wanted = graph(namespace, nodePools={"big": {"nodeSelector": {"example.com/pool": namespace}}})
    wanted["spec"]["services"]["decode"]["nodePool"] = "big"
    await client.create(wanted, field_manager="test")
    async with running(client, namespace):
        remedy = "label the nodes as the node pool's nodeSelector says"

        async def told():
            found = await condition(client, namespace, "Schedulable")
            words = ("g-decode-", "nodes are available", remedy)
            return found.get("reason") == "Unschedulable" and all(each in found["message"] for each in words)

        await until(told, "the condition")
        live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
        assert live["status"]["phase"] in {"Pending", "Degraded"}
        make_node(gpus=8, labels={"example.com/pool": namespace})
        await until(is_ready(client, namespace), "readiness")
        assert (await condition(client, namespace, "Schedulable"))["status"] == "True"


async def test_a_rollout_beyond_the_budget_ends_and_keeps_the_ratio(crds, kwok, make_node, client, namespace):
    """Decode 5 and prefill 2 with a budget of 6: a changed lease reaches every worker; six GPUs at most."""
    make_node(gpus=8)
    wanted = graph(namespace)
    wanted["spec"]["planner"]["maxGpuBudget"] = 6
    for service in ("prefill", "decode"):
        wanted["spec"]["services"][service]["scaling"] = {"minReplicas": 1, "maxReplicas": 5}
    await client.create(wanted, field_manager="test")

    async def workers():
        return [each for name in ("decode", "prefill") for each in await pods_of(client, namespace, name)]

    async def running_by_service():
        return Counter(each.service for each in await workers() if each.ready and each.alive)

    async def is_full():
        return (await running_by_service()).total() == 6

    async with running(client, namespace), BudgetWatch(client, namespace).on() as watch:
        await until(is_ready(client, namespace), "readiness")
        await scale(client, namespace, "decode", 5)
        await scale(client, namespace, "prefill", 2)
        await until(is_full, "six workers")
        before, old = await running_by_service(), {each.uid for each in await workers()}
        await edit(client, namespace, {"lease": {"durationSeconds": 45}})

        async def is_replaced():
            return not old & {each.uid for each in await workers()} and await is_full()

        await until(is_replaced, "new workers")
        assert await running_by_service() == before
    assert watch.most == 6


async def test_routers_spread_over_nodes_without_zones(crds, make_node, client, namespace):
    """Six routers, six nodes that carry no zone's label: one each, where chance alone would give that once in 65 runs."""
    for _ in range(6):
        make_node(gpus=1)
    made = graph(namespace)
    made["spec"]["services"]["frontend"]["replicas"] = 6
    await client.create(made, field_manager="test")
    async with running(client, namespace):

        async def nodes():
            pods = (await client.list(POD, namespace=namespace, labels={"penstock.dev/role": "router"})).items
            return len({each["spec"]["nodeName"] for each in pods if each["spec"].get("nodeName")}) == 6

        await until(nodes, "a router on each node")
