"""Two graphs that share six GPUs of a GpuPool, on a real API server."""

from __future__ import annotations

import asyncio
import time

import pytest
from operating import IDLE, BudgetWatch, Loads, edit, events, graph, running, set_status, until
from planning import INTERVAL_S
from pooling import die_at_each_step

from penstock.core.errors import InvalidObjectError
from penstock.core.stamps import stamp
from penstock.kube.informer import Informer
from penstock.kube.kinds import GPU_POOL, GRAPH_DEPLOYMENT, NODE, POD, SCALING_ADAPTER
from penstock_operator.plan.drain import PodLoad
from penstock_planner.replay import replay

pytestmark = [pytest.mark.cluster]


def pool(namespace, **changes):
    """Return a pool of six GPUs of which each graph is guaranteed two."""
    graphs = [
        {"match": {"name": "chat"}, "guaranteedGpus": 2, "priority": "high"},
        {"match": {"name": "batch"}, "guaranteedGpus": 2},
    ]
    spec = {"gpus": 6, "graphs": graphs, "holdSeconds": 0, **changes}
    return GPU_POOL.of({"name": "shared", "namespace": namespace}, spec=spec)


def rows(client, namespace, **expected):
    """Return a check of one key of the pool's graphs."""
    [(key, wanted)] = expected.items()

    async def check():
        live = await client.get(GPU_POOL, "shared", namespace=namespace)
        found = {each["name"]: each[key] for each in live.get("status", {}).get("graphs", ())}
        return live if found == wanted else None

    return check


async def ask(client, namespace, name, **replicas):
    """Write the numbers of a graph's adapters."""
    for service, number in replicas.items():
        await edit(client, namespace, {"replicas": number}, name=f"{name}-{service}", kind=SCALING_ADAPTER)


async def adapters(client, namespace):
    """Return whether both graphs have theirs."""
    return len((await client.list(SCALING_ADAPTER, namespace=namespace)).items) == 4


async def test_a_graph_borrows_and_gives_back_by_draining(kwok, crds, make_node, client, namespace):
    """A viral graph takes what the other leaves, and gives it back when that wants its own; never above six, restart or not."""
    make_node(gpus=16)
    await client.create(pool(namespace), field_manager="test")
    for name in ("chat", "batch"):
        await client.create(graph(namespace, name), field_manager="test")
    async with BudgetWatch(client, namespace).on() as watch:
        async with running(client, namespace, loads=Loads(IDLE)):
            await until(lambda: adapters(client, namespace), "adapters")
            await until(rows(client, namespace, held={"batch": 2, "chat": 2}), "two each")
            await ask(client, namespace, "chat", prefill=2, decode=2)
            await until(rows(client, namespace, held={"batch": 2, "chat": 4}), "four borrowed")
            await ask(client, namespace, "batch", prefill=2, decode=2)
        async with running(client, namespace, loads=Loads(IDLE)):
            await until(rows(client, namespace, wanted={"batch": 4, "chat": 4}), "both want four")
            await edit(
                client,
                namespace,
                {
                    "graphs": [
                        {"match": {"name": "chat"}, "guaranteedGpus": 2},
                        {"match": {"name": "batch"}, "guaranteedGpus": 4},
                    ]
                },
                name="shared",
                kind=GPU_POOL,
            )
            await until(rows(client, namespace, held={"batch": 4, "chat": 2}), "given back")
            await until(lambda: events(client, namespace, "GpusReclaimed"), "Event GpusReclaimed")
            await until(lambda: events(client, namespace, "GpusGranted"), "Event GpusGranted")
            live = await client.get(GPU_POOL, "shared", namespace=namespace)
            assert {each["type"]: each["status"] for each in live["status"]["conditions"]} == {
                "CeilingRespected": "True",
                "GuaranteesMet": "True",
                "Valid": "True",
            }
            columns, shown = crds.kubectl("get", "gpool", "--namespace", namespace).splitlines()
            assert columns.split() == ["NAME", "TOTAL", "HELD", "FREE", "BORROWED", "VALID", "MET", "AGE"]
            assert shown.split()[:-1] == ["shared", "6", "6", "0", "0", "True", "True"]
    assert watch.most == 6


async def test_a_restart_takes_no_gpus_back(kwok, crds, make_node, client, namespace):
    """A new process knows a graph's workers before the graph itself; that is not a graph that is gone."""
    make_node(gpus=16)
    await client.create(pool(namespace), field_manager="test")
    for name in ("chat", "batch"):
        await client.create(graph(namespace, name), field_manager="test")
    granted = []

    def changed(_change, live):
        granted.append({each["name"]: each["granted"] for each in live["status"]["graphs"]})

    async with running(client, namespace, loads=Loads(IDLE)):
        await until(lambda: adapters(client, namespace), "adapters")
        await ask(client, namespace, "chat", prefill=2, decode=2)
        await until(rows(client, namespace, held={"batch": 2, "chat": 4}), "four borrowed")
    pools = Informer(client, GPU_POOL, namespace=namespace, on_change=changed)
    watching = asyncio.create_task(pools.run())
    await pools.synced.wait()
    async with running(client, namespace, loads=Loads(IDLE)):
        await edit(client, namespace, {"gpus": 7}, name="shared", kind=GPU_POOL)
        await until(lambda: counts(client, namespace, total=7), "the new process's word")
    watching.cancel()
    assert {each["chat"] for each in granted} == {4}


async def counts(client, namespace, **expected):
    """Return whether the pool's GPUs are these."""
    live = await client.get(GPU_POOL, "shared", namespace=namespace)
    found = live.get("status", {}).get("gpus", {})
    return all(found.get(key) == value for key, value in expected.items())


def favouring(batch):
    """Return the pool's entries with another guarantee of batch, and none of chat above its floor."""
    return [
        {"match": {"name": "chat"}, "guaranteedGpus": 2},
        {"match": {"name": "batch"}, "guaranteedGpus": batch},
    ]


async def test_an_operator_that_dies_at_each_step_of_a_hand_over_never_exceeds_the_pool(
    kwok, crds, make_node, client, namespace
):
    """It dies at its first, second, third or fourth write, repeatedly; the GPUs move all the same."""
    make_node(gpus=16)
    await client.create(pool(namespace), field_manager="test")
    for name in ("chat", "batch"):
        await client.create(graph(namespace, name), field_manager="test")
    moved = rows(client, namespace, held={"batch": 4, "chat": 2})
    async with BudgetWatch(client, namespace).on() as watch:
        async with running(client, namespace, loads=Loads(IDLE)):
            await until(lambda: adapters(client, namespace), "adapters")
            await ask(client, namespace, "chat", prefill=2, decode=2)
            await until(rows(client, namespace, held={"batch": 2, "chat": 4}), "four borrowed")
        await edit(client, namespace, {"graphs": favouring(4)}, name="shared", kind=GPU_POOL)
        await ask(client, namespace, "batch", prefill=2, decode=2)
        deaths = await die_at_each_step(
            client, lambda each: running(each, namespace, loads=Loads(IDLE)), moved
        )
    assert watch.most == 6
    assert deaths >= 5


async def test_what_is_wrong_with_a_pool_is_told(kwok, crds, make_node, client, namespace):
    """Two entries and two pools that match a graph, guarantees above the pool, and one below a floor; both graphs keep serving."""
    make_node(gpus=16)
    await client.create(pool(namespace), field_manager="test")
    for name in ("chat", "batch"):
        await client.create(graph(namespace, name), field_manager="test")

    async def told(name, *texts):
        live = await client.get(GPU_POOL, name, namespace=namespace)
        said = {each["type"]: each for each in live.get("status", {}).get("conditions", ())}.get("Valid", {})
        return said.get("status") == "False" and all(each in said["message"] for each in texts)

    async with BudgetWatch(client, namespace).on() as watch, running(client, namespace, loads=Loads(IDLE)):
        await until(rows(client, namespace, held={"batch": 2, "chat": 2}), "two each")
        any_of_both = {"match": {"labels": {"team": "both"}}}
        await edit(client, namespace, {"graphs": [*favouring(1), any_of_both]}, name="shared", kind=GPU_POOL)
        for name in ("chat", "batch"):
            patch = {"metadata": {"labels": {"team": "both"}}}
            await client.patch(GRAPH_DEPLOYMENT, name, patch, namespace=namespace, field_manager="test")
        texts = (
            "graph chat is matched by graphs[0] too",
            "fewer than the 2 that graph batch never goes below",
        )
        await until(lambda: told("shared", *texts), "what is wrong")
        younger = {**pool(namespace), "metadata": {"name": "younger", "namespace": namespace}}
        await client.create(younger, field_manager="test")
        text = "graph chat belongs to GpuPool shared, which is older"
        await until(lambda: told("younger", text), "two pools")
        await until(rows(client, namespace, held={"batch": 2, "chat": 2}), "still two each")
        assert watch.most == 4


@pytest.fixture
def counts_nodes_often(monkeypatch):
    """Let the operator count the nodes twice a second."""
    monkeypatch.setattr("penstock_operator.pools.readings.NODES_POLL_S", 0.5)


@pytest.mark.usefixtures("counts_nodes_often", "kwok")
async def test_a_node_that_is_lost_shrinks_the_pool_until_it_is_back(crds, make_node, client, namespace):
    """The borrower gives back; a foreign pod's GPU is left out, too, and is not fought."""
    labels = {"pool": namespace}
    make_node(gpus=4, labels=labels)
    lost = make_node(gpus=2, labels=labels)
    await client.create(pool(namespace, gpus=8, nodeSelector=labels), field_manager="test")
    for name in ("chat", "batch"):
        await client.create(graph(namespace, name), field_manager="test")

    async with running(client, namespace, loads=Loads(IDLE)):
        await until(lambda: adapters(client, namespace), "adapters")
        await until(lambda: counts(client, namespace, total=6, unavailable=2), "six of eight")
        await ask(client, namespace, "chat", prefill=2, decode=2)
        await until(rows(client, namespace, held={"batch": 2, "chat": 4}), "four borrowed")
        await client.patch(NODE, lost, {"spec": {"unschedulable": True}}, namespace=None, field_manager="t")
        await until(rows(client, namespace, held={"batch": 2, "chat": 2}), "given back")
        await until(lambda: counts(client, namespace, total=4, held=4, unavailable=4), "four left")
        live = await client.get(GPU_POOL, "shared", namespace=namespace)
        said = {each["type"]: each for each in live["status"]["conditions"]}
        assert f"{lost} is cordoned (2)" in said["NodesCounted"]["message"]
        await client.patch(NODE, lost, {"spec": {"unschedulable": False}}, namespace=None, field_manager="t")
        await until(rows(client, namespace, held={"batch": 2, "chat": 4}), "borrowed again")
        asks = {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
        spec = {"nodeName": lost, "containers": [{"name": "main", "image": "x", "resources": asks}]}
        await client.create(POD.of({"name": "foreign", "namespace": namespace}, spec=spec), field_manager="t")
        await until(lambda: counts(client, namespace, total=5, unavailable=3), "a foreign pod")
        await until(rows(client, namespace, held={"batch": 2, "chat": 3}), "room for it")


@pytest.mark.usefixtures("counts_nodes_often", "kwok")
async def test_a_pool_that_writes_no_gpus_has_those_of_its_nodes(crds, make_node, client, namespace):
    """None before there is a node; it grows with them, keeps what was counted when they vanish, and shrinks by a cordon alone."""
    labels = {"pool": namespace}
    made = pool(namespace, nodeSelector=labels)
    del made["spec"]["gpus"]
    with pytest.raises(InvalidObjectError, match="neither gpus nor nodeSelector"):
        await client.create(
            {**made, "spec": {"graphs": made["spec"]["graphs"]}}, field_manager="test", dry_run=True
        )
    with pytest.raises(InvalidObjectError, match=r"gpu.nvidia.com is not an extended resource"):
        await client.create(
            {**made, "spec": {**made["spec"], "resource": "gpu.nvidia.com"}},
            field_manager="test",
            dry_run=True,
        )
    await client.create(made, field_manager="test")

    async def told(text):
        live = await client.get(GPU_POOL, "shared", namespace=namespace)
        said = {each["type"]: each for each in live.get("status", {}).get("conditions", ())}
        return text in said.get("NodesCounted", {}).get("message", "")

    async with BudgetWatch(client, namespace).on() as watch, running(client, namespace, loads=Loads(IDLE)):
        await client.create(graph(namespace, "chat"), field_manager="test")
        await until(lambda: told("never counted"), "no nodes")
        await until(rows(client, namespace, held={"chat": 0}), "none held")
        small, large = make_node(gpus=1, labels=labels), make_node(gpus=3, labels=labels)
        await until(rows(client, namespace, held={"chat": 2}), "its floors")
        await ask(client, namespace, "chat", prefill=2, decode=2)
        await until(rows(client, namespace, held={"chat": 4}), "all of the nodes")
        await client.patch(NODE, small, {"spec": {"unschedulable": True}}, namespace=None, field_manager="t")
        await until(rows(client, namespace, held={"chat": 3}), "room for the cordoned one")
        await until(lambda: counts(client, namespace, total=3, unavailable=1), "three of four")
        for each in (small, large):
            patch = {"metadata": {"labels": {"pool": "other"}}}
            await client.patch(NODE, each, patch, namespace=None, field_manager="t")
        await until(lambda: told("using the last known count of 3 GPUs"), "no nodes again")
        await until(rows(client, namespace, held={"chat": 3}), "still three")
    assert watch.most == 4


@pytest.mark.usefixtures("kwok")
async def test_what_a_dead_planner_wanted_counts_no_more(crds, make_node, client, namespace, monkeypatch):
    """Three minutes after its last word the graph wants what its adapters ask for, and the others may borrow."""
    monkeypatch.setattr("penstock_operator.pools.grant.WANTS_VALID_S", 70.0)
    make_node(gpus=16)
    await client.create(pool(namespace), field_manager="test")
    for name in ("chat", "batch"):
        await client.create(graph(namespace, name), field_manager="test")
    async with running(client, namespace, loads=Loads(IDLE)):
        await until(rows(client, namespace, held={"batch": 2, "chat": 2}), "two each")
        status = {"planner": {"wants": {"prefill": 1, "decode": 3}, "wantsTime": stamp(time.time() - 50.0)}}
        await set_status(client, GRAPH_DEPLOYMENT, "chat", namespace, status)
        await until(rows(client, namespace, granted={"batch": 2, "chat": 4}), "its wants", timeout_s=15)
        await until(rows(client, namespace, granted={"batch": 2, "chat": 2}), "its asks alone")


async def test_a_graph_that_never_drains_gives_back_after_the_pools_grace(
    kwok, crds, make_node, client, namespace
):
    """Its workers always have requests; they end once the pool's bound is over, long before their own, and that is told."""
    make_node(gpus=16)
    await client.create(pool(namespace, reclaim={"graceSeconds": 3}), field_manager="test")
    for name in ("chat", "batch"):
        made = graph(namespace, name)
        for worker in ("prefill", "decode"):
            made["spec"]["services"][worker]["terminationGracePeriodSeconds"] = 600
        await client.create(made, field_manager="test")
    busy = Loads(PodLoad(1, 0, 0.5))
    async with BudgetWatch(client, namespace).on() as watch, running(client, namespace, loads=busy):
        await until(lambda: adapters(client, namespace), "adapters")
        await ask(client, namespace, "chat", prefill=2, decode=2)
        await until(rows(client, namespace, held={"batch": 2, "chat": 4}), "four borrowed")
        await edit(client, namespace, {"graphs": favouring(4)}, name="shared", kind=GPU_POOL)
        await ask(client, namespace, "batch", prefill=2, decode=2)
        await until(rows(client, namespace, held={"batch": 4, "chat": 2}), "given back")
        await until(lambda: events(client, namespace, "DrainCut"), "Event DrainCut")
    assert watch.most == 6


async def test_a_deleted_pool_leaves_its_graphs_what_they_may_hold(kwok, crds, make_node, client, namespace):
    """They grow no more, and say which pool is gone."""
    make_node(gpus=16)
    await client.create(pool(namespace), field_manager="test")
    await client.create(graph(namespace, "chat"), field_manager="test")
    async with running(client, namespace, loads=Loads(IDLE)):
        await until(rows(client, namespace, held={"chat": 2}), "two held")
        await client.delete(GPU_POOL, "shared", namespace=namespace)

        async def told():
            live = await client.get(GRAPH_DEPLOYMENT, "chat", namespace=namespace)
            said = live.get("status", {}).get("pool") or {}
            return said.get("grantedGpus") == 2 and "GpuPool shared was deleted" in said.get("message", "")

        await until(told, "the graph's status")


async def test_a_graph_that_writes_no_budget_is_bounded_by_its_pool_alone(
    kwok, crds, make_node, client, namespace
):
    """Eight GPUs before there is a pool; inside it all that it grants, and that much for good once the pool is deleted."""
    make_node(gpus=32)
    made = graph(namespace, "chat", planner={})
    for each in ("prefill", "decode"):
        made["spec"]["services"][each]["scaling"]["maxReplicas"] = 9
    stored = await client.create(made, field_manager="test")
    assert stored["spec"]["planner"] == {}
    entry = {"match": {"name": "chat"}, "guaranteedGpus": 2}

    async def told():
        live = await client.get(GRAPH_DEPLOYMENT, "chat", namespace=namespace)
        return "GpuPool shared was deleted" in (live["status"].get("pool") or {}).get("message", "")

    async def refused():
        live = await client.get(SCALING_ADAPTER, "chat-prefill", namespace=namespace)
        said = [each["message"] for each in live.get("status", {}).get("conditions", ())]
        return any("7 replicas are requested" in each for each in said)

    async def has_adapters():
        return len((await client.list(SCALING_ADAPTER, namespace=namespace)).items) == 2

    async with BudgetWatch(client, namespace).on() as watch:

        async def holds(gpus):
            return watch.held() == gpus

        async with running(client, namespace, loads=Loads(IDLE)):
            await until(has_adapters, "adapters")
            await ask(client, namespace, "chat", prefill=6, decode=6)
            await until(lambda: holds(8), "its own default")
            await client.create(pool(namespace, gpus=11, graphs=[entry]), field_manager="test")
            await until(rows(client, namespace, held={"chat": 11}), "all of the pool")
            narrow = [{**entry, "maxGpus": 10}]
            await edit(client, namespace, {"graphs": narrow}, name="shared", kind=GPU_POOL)
            await until(rows(client, namespace, held={"chat": 10}), "its entry's most")
            assert watch.most == 11
            watch.most = watch.held()
            await client.delete(GPU_POOL, "shared", namespace=namespace)
            await until(told, "what became of the pool")
        async with running(client, namespace, loads=Loads(IDLE)):
            await ask(client, namespace, "chat", prefill=7, decode=7)
            await until(refused, "a look at that")
            assert await holds(10)
    assert watch.most == 10


def planned(namespace):
    """Return a graph without a budget of its own, whose planner decides each second."""
    made = graph(
        namespace,
        "llama",
        planner={
            "mode": "load",
            "adjustmentIntervalSeconds": INTERVAL_S,
            "metricPullingIntervalSeconds": 0.1,
            "newDecodeWorkerGraceIntervals": 0,
        },
    )
    made["spec"]["services"]["decode"]["scaling"]["maxReplicas"] = 9
    return made


async def moved_router(world):
    """Give the graph's ready router the address of the world's page; before it is ready, kwok would give it another one."""
    for name in await world.pods("frontend"):
        pod = await world.client.get(POD, name, namespace=world.namespace)
        if any(
            each["type"] == "Ready" and each["status"] == "True"
            for each in pod["status"].get("conditions", ())
        ):
            at = {"podIP": world.address, "podIPs": [{"ip": world.address}]}
            await set_status(world.client, POD, name, world.namespace, at)
            return True
    return False


async def test_a_planner_grows_into_its_grant_and_no_further(kwok, crds, make_node, world):
    """Its decode workers are full all the time. It wants one more than it may hold, and asks the adapters for none of those."""
    make_node(gpus=16)
    client, namespace = world.client, world.namespace
    world.obeys, world.kv = False, 0.95
    entries = [{"match": {"name": each}, "guaranteedGpus": 2} for each in ("llama", "batch")]
    await client.create(pool(namespace, graphs=entries), field_manager="test")
    for each in (planned(namespace), graph(namespace, "batch")):
        await client.create(each, field_manager="test")
    async with BudgetWatch(client, namespace).on() as watch, running(client, namespace, loads=Loads(IDLE)):
        await until(rows(client, namespace, held={"batch": 2, "llama": 2}), "two each")
        await until(lambda: moved_router(world), "a router")
        async with world.planning():
            await until(rows(client, namespace, held={"batch": 2, "llama": 4}), "its grant")
            await until(rows(client, namespace, wanted={"batch": 2, "llama": 5}), "one more")
            assert (await world.status())["planner"]["wants"] == {"decode": 4, "prefill": 1}
            assert await world.desired("decode") == 3
            assert watch.most == 6
            await edit(client, namespace, {"gpus": 7}, name="shared", kind=GPU_POOL)
            await until(rows(client, namespace, held={"batch": 2, "llama": 5}), "a larger grant")
            await until(rows(client, namespace, wanted={"batch": 2, "llama": 6}), "one more")
            assert await world.desired("decode") == 4
    made = [each["decision"] for each in world.ledger().records if each["type"] == "decision"]
    assert all(each["gpus_after"] <= each["max_gpu_budget"] for each in made)
    assert {role["reason"] for each in made for role in each["roles"]}.isdisjoint(
        {"never_ready", "above_budget"}
    )
    assert replay(world.ledger()).differences == ()
    assert watch.most == 7
