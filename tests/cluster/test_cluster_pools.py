"""Graphs of two namespaces that share six GPUs of a ClusterGpuPool, on a real API server."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from operating import IDLE, BudgetWatch, Loads, edit, events, graph, running, until
from pooling import die_at_each_step

from penstock.core.errors import NotFoundError
from penstock.kube.kinds import CLUSTER_GPU_POOL, GPU_POOL, GRAPH_DEPLOYMENT, NAMESPACE, SCALING_ADAPTER

pytestmark = [pytest.mark.cluster]

CLASS = "everywhere"
"""Of these tests' graphs and pools, so that their operator leaves what other tests have left in the cluster."""


def entries(ours, theirs, *, guaranteed=(2, 2)):
    """Return entries for the graphs of two namespaces, which have one name."""
    return [
        {
            "match": {"namespaces": [ours], "name": "chat"},
            "guaranteedGpus": guaranteed[0],
            "priority": "high",
        },
        {"match": {"namespaces": [theirs]}, "guaranteedGpus": guaranteed[1]},
    ]


class World:
    """Two namespaces with a graph called chat each, and a pool of six GPUs."""

    def __init__(self, client, ours, theirs):
        self.client, self.ours, self.theirs = client, ours, theirs
        self.name = f"shared-{os.getpid()}-{ours.rpartition('-')[2]}"

    def graph(self, name="chat", namespace=None):
        """Return a graph; without ``namespace`` of ours."""
        made = graph(namespace or self.ours, name)
        made["spec"]["operatorClass"] = CLASS
        return made

    async def create(self):
        """Create pool and graphs."""
        spec = {"gpus": 6, "graphs": entries(self.ours, self.theirs), "holdSeconds": 0}
        pool = CLUSTER_GPU_POOL.of({"name": self.name}, spec={**spec, "operatorClass": CLASS})
        await self.client.create(pool, field_manager="test")
        for namespace in (self.ours, self.theirs):
            await self.client.create(self.graph(namespace=namespace), field_manager="test")

    async def live(self):
        """Return the pool."""
        return await self.client.get(CLUSTER_GPU_POOL, self.name)

    def operating(self, client=None):
        """Run an operator of the complete cluster."""
        return running(
            client or self.client, None, loads=Loads(IDLE), all_namespaces=True, operator_class=CLASS
        )

    def has(self, key, ours, theirs):
        """Return a check of one key of both graphs in the pool's status."""

        async def check():
            rows = (await self.live()).get("status", {}).get("graphs", ())
            found = {each["name"]: each[key] for each in rows}
            return found == {f"{self.ours}/chat": ours, f"{self.theirs}/chat": theirs}

        return check

    async def adapters(self):
        """Return whether both graphs have theirs."""
        found = [
            len((await self.client.list(SCALING_ADAPTER, namespace=each)).items)
            for each in (self.ours, self.theirs)
        ]
        return found == [2, 2]

    async def ask(self, namespace, prefill, decode):
        """Write the numbers of a graph's adapters."""
        for service, number in {"prefill": prefill, "decode": decode}.items():
            await edit(
                self.client, namespace, {"replicas": number}, name=f"chat-{service}", kind=SCALING_ADAPTER
            )

    async def guarantee(self, ours, theirs):
        """Edit both guarantees."""
        rows = entries(self.ours, self.theirs, guaranteed=(ours, theirs))
        await edit(self.client, None, {"graphs": rows}, name=self.name, kind=CLUSTER_GPU_POOL)

    def share(self, namespace, *texts, name="chat"):
        """Return a check of what a graph's status says of its pool."""

        async def check():
            found = await self.client.get(GRAPH_DEPLOYMENT, name, namespace=namespace)
            said = found.get("status", {}).get("pool") or {}
            return said if all(each in said.get("message", "") for each in texts) else None

        return check

    def lists(self, namespace, held):
        """Return a check of which graphs, with how many GPUs, a graph's status lists of its pool."""

        async def check():
            found = await self.share(namespace)()
            return {each["name"]: each["held"] for each in (found or {}).get("graphs", ())} == held

        return check


@pytest.fixture(name="world")
async def made_world(kwok, crds, make_node, client, make_namespace):
    """Pool and graphs, and nodes with GPUs enough."""
    make_node(gpus=16)
    made = World(client, make_namespace("ours"), make_namespace("theirs"))
    await made.create()
    yield made
    with suppress(NotFoundError):  # a test may have deleted it
        await client.delete(CLUSTER_GPU_POOL, made.name, namespace=None)


async def test_graphs_of_two_namespaces_lend_and_give_back(world, crds, make_namespace):
    """Same-named graphs are told apart, never above six; a namespace that no entry names draws nothing by name or label."""
    stranger = make_namespace("stranger")
    await world.client.create(world.graph(namespace=stranger), field_manager="test")
    among = {world.ours, world.theirs}
    async with BudgetWatch(world.client, None, among=among).on() as watch, world.operating():
        await until(world.adapters, "adapters")
        await until(world.has("held", 2, 2), "two each")
        await world.ask(world.ours, 2, 2)
        await until(world.has("held", 4, 2), "four borrowed")
        await world.ask(world.theirs, 2, 2)
        holds = f"{world.ours}/chat holds 4 (guaranteed 2)"
        await until(world.share(world.theirs, holds), "who holds what it lacks")
        await world.guarantee(2, 4)
        await until(world.has("held", 2, 4), "given back")
        for namespace, reason in ((world.ours, "GpusReclaimed"), (world.theirs, "GpusGranted")):
            told = await until(lambda at=namespace, why=reason: events(world.client, at, why), reason)
            assert f"ClusterGpuPool {world.name} grants" in told[0]["message"]
        live = await world.live()
        assert {each["type"]: each["status"] for each in live["status"]["conditions"]} == {
            "CeilingRespected": "True",
            "GuaranteesMet": "True",
            "Valid": "True",
        }
        said = await world.share(world.theirs)()
        assert (said["kind"], said["name"]) == ("ClusterGpuPool", world.name)
        assert (said["grantedGpus"], said["guaranteedGpus"]) == (4, 4)
        both = {f"{world.theirs}/chat": 4, f"{world.ours}/chat": 2}
        await until(world.lists(world.theirs, both), "the pool's graphs in the graph's status")
        columns, shown = crds.kubectl("get", "cgpool", world.name).splitlines()
        assert columns.split() == ["NAME", "TOTAL", "HELD", "FREE", "BORROWED", "VALID", "MET", "AGE"]
        assert shown.split()[:-1] == [world.name, "6", "6", "0", "0", "True", "True"]
        alone = await world.client.get(GRAPH_DEPLOYMENT, "chat", namespace=stranger)
        assert alone["status"].get("pool") is None
    assert watch.most == 6


async def test_an_operator_that_dies_at_each_step_never_exceeds_a_clusters_pool(world):
    """At its first to fourth write, repeatedly, with the answer lost or not; GPUs move between namespaces all the same."""
    moved, among = world.has("held", 2, 4), {world.ours, world.theirs}
    async with BudgetWatch(world.client, None, among=among).on() as watch:
        async with world.operating():
            await until(world.adapters, "adapters")
            await world.ask(world.ours, 2, 2)
            await until(world.has("held", 4, 2), "four borrowed")
        await world.guarantee(2, 4)
        await world.ask(world.theirs, 2, 2)
        deaths = await die_at_each_step(world.client, world.operating, moved)
    assert watch.most == 6
    assert deaths >= 5


async def test_of_two_pools_the_older_one_counts_and_a_deleted_one_leaves_its_graphs_theirs(world):
    """Both pools and the graph say so; once the ClusterGpuPool is gone the GpuPool takes the graph over."""
    entry = {"match": {"name": "chat"}, "guaranteedGpus": 2}
    own = GPU_POOL.of(
        {"name": "own", "namespace": world.ours},
        spec={"gpus": 3, "graphs": [entry], "operatorClass": CLASS, "holdSeconds": 0},
    )
    async with world.operating():
        await until(world.has("held", 2, 2), "two each")
        await world.client.create(own, field_manager="test")
        await until(world.share(world.ours, "GpuPool own also matches this graph"), "on the graph")

        async def told():
            live = await world.client.get(GPU_POOL, "own", namespace=world.ours)
            conditions = live.get("status", {}).get("conditions", ())
            return any(f"belongs to ClusterGpuPool {world.name}" in each["message"] for each in conditions)

        await until(told, "on the younger pool")
        await world.client.delete(CLUSTER_GPU_POOL, world.name, namespace=None)
        gone = f"ClusterGpuPool {world.name} was deleted"
        kept = await until(world.share(world.theirs, gone), "an orphan")
        assert kept["grantedGpus"] == 2

        async def moved():
            said = await world.share(world.ours)()
            keys = ("kind", "name", "grantedGpus", "guaranteedGpus")
            return [said[key] for key in keys] == ["GpuPool", "own", 2, 2]

        await until(moved, "its own pool")


async def test_a_pool_of_another_class_is_another_operators(world):
    """It is not touched: two operators that shared one pool out would each give what the other's graph holds."""
    async with world.operating():
        await until(world.has("held", 2, 2), "two each")
    spec = {"gpus": 6, "graphs": entries(world.ours, world.theirs), "operatorClass": "another"}
    other = f"{world.name}-another"
    await world.client.create(CLUSTER_GPU_POOL.of({"name": other}, spec=spec), field_manager="test")
    try:
        async with world.operating():
            await world.guarantee(3, 2)
            await until(world.has("guaranteed", 3, 2), "its own pool's edit")
            untouched = await world.client.get(CLUSTER_GPU_POOL, other)
            assert untouched["status"] == {"observedGeneration": -1}
    finally:
        await world.client.delete(CLUSTER_GPU_POOL, other, namespace=None)


async def test_an_entry_selects_namespaces_by_labels(world):
    """A graph draws once its namespace carries the label, also after a restart, and no more once that is gone."""

    async def label(value):
        patch = {"metadata": {"labels": {"penstock-test-pool": value}}}
        await world.client.patch(NAMESPACE, world.theirs, patch, namespace=None, field_manager="test")

    def draws(*namespaces):
        async def check():
            rows = (await world.live()).get("status", {}).get("graphs", ())
            return {each["name"] for each in rows} == {f"{each}/chat" for each in namespaces}

        return check

    ours, theirs = entries(world.ours, world.theirs)
    theirs["match"] = {"namespaceLabels": {"penstock-test-pool": world.name}}
    await edit(world.client, None, {"graphs": [ours, theirs]}, name=world.name, kind=CLUSTER_GPU_POOL)
    async with BudgetWatch(world.client, None, among={world.ours, world.theirs}).on() as watch:
        async with world.operating():
            await until(draws(world.ours), "one graph")
            await until(world.adapters, "adapters")
            await label(world.name)
            await until(world.has("held", 2, 2), "two each")
        async with world.operating():
            await world.ask(world.theirs, 2, 2)
            await until(world.has("held", 2, 4), "what nobody else wants")
            await label(None)
            await until(draws(world.ours), "one graph again")
    assert watch.most == 6
