"""Two graphs that share six GPUs of a GpuPool, on a real API server."""

from __future__ import annotations

import pytest
from operating import IDLE, BudgetWatch, Loads, edit, events, graph, running, until

from penstock.kube.kinds import GPU_POOL, GRAPH_DEPLOYMENT, SCALING_ADAPTER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def pool(namespace, **changes):
    """Return a pool of six GPUs of which each graph is guaranteed two."""
    graphs = [
        {"match": {"name": "chat"}, "guaranteedGpus": 2, "priority": "high"},
        {"match": {"name": "batch"}, "guaranteedGpus": 2},
    ]
    spec = {"gpus": 6, "graphs": graphs, "holdSeconds": 0.0, **changes}
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
            await until(lambda: adapters(client, namespace), "adapters", timeout_s=60)
            await until(rows(client, namespace, held={"batch": 2, "chat": 2}), "two each", timeout_s=60)
            await ask(client, namespace, "chat", prefill=2, decode=2)
            await until(rows(client, namespace, held={"batch": 2, "chat": 4}), "four borrowed", timeout_s=60)
            await ask(client, namespace, "batch", prefill=2, decode=2)
        async with running(client, namespace, loads=Loads(IDLE)):
            await until(
                rows(client, namespace, wanted={"batch": 4, "chat": 4}), "both want four", timeout_s=60
            )
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
            await until(rows(client, namespace, held={"batch": 4, "chat": 2}), "given back", timeout_s=90)
            assert await events(client, namespace, "GpusReclaimed")
            assert await events(client, namespace, "GpusGranted")
            live = await client.get(GPU_POOL, "shared", namespace=namespace)
            assert {each["type"]: each["status"] for each in live["status"]["conditions"]} == {
                "CeilingRespected": "True",
                "GuaranteesMet": "True",
                "Valid": "True",
            }
    assert watch.most == 6


async def test_a_deleted_pool_leaves_its_graphs_what_they_may_hold(kwok, crds, make_node, client, namespace):
    """They grow no more, and say which pool is gone."""
    make_node(gpus=16)
    await client.create(pool(namespace), field_manager="test")
    await client.create(graph(namespace, "chat"), field_manager="test")
    async with running(client, namespace, loads=Loads(IDLE)):
        await until(rows(client, namespace, held={"chat": 2}), "two held", timeout_s=60)
        await client.delete(GPU_POOL, "shared", namespace=namespace)

        async def told():
            live = await client.get(GRAPH_DEPLOYMENT, "chat", namespace=namespace)
            said = live.get("status", {}).get("pool") or {}
            return said.get("grantedGpus") == 2 and "GpuPool shared is gone" in said.get("message", "")

        await until(told, "the graph's status", timeout_s=60)
