"""The operator behind an API server that fails: calls, watches, tokens, kinds and other writers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest
from faulty import EVERY_FAULT, Fault
from operating import (
    CHILDREN,
    all_children,
    at_rest,
    graph,
    has_round,
    running,
    scale,
    set_round,
    set_status,
    settled,
    until,
)

from penstock.core.errors import NotFoundError
from penstock.kube.kinds import GRAPH_DEPLOYMENT, KINDS, SCALING_ADAPTER

pytestmark = [
    pytest.mark.cluster,
]


async def uids(client, namespace):
    """Return the uids of a graph's children, by kind and name."""
    return {
        (kind, each["metadata"]["name"]): each["metadata"]["uid"]
        for kind in CHILDREN
        for each in (await client.list(KINDS[kind], namespace=namespace)).items
        if each["metadata"]["name"].startswith("g-")
    }


def there(client, namespace):
    """Return a check that exactly the graph's children are there."""
    return lambda: all_children(client, namespace)


async def pause(seconds):
    """Let something continue for a while."""
    await asyncio.sleep(seconds)


async def test_random_faults_delay_and_break_nothing(kwok, make_node, client, shaky, proxy, namespace):  # noqa: PLR0917 - fixtures
    """A fifth of all calls for twenty seconds, while the graph is made, edited and scaled; then rest."""
    make_node(gpus=8)
    proxy.play(*EVERY_FAULT, rate=0.2, seconds=3.0)
    await client.create(graph(namespace), field_manager="test")
    async with running(shaky, namespace) as operator:
        await until(there(client, namespace), "all children")
        before = await uids(client, namespace)
        rng = random.Random(3)
        for number in range(30):
            if number >= 10 and len(proxy.done) >= 8:
                break
            last = number
            await set_round(client, namespace, last)
            for service in ("prefill", "decode"):
                await scale(client, namespace, service, rng.randint(1, 3))
            await pause(2.0)
        for service, desired in (("prefill", 1), ("decode", 3)):
            await scale(client, namespace, service, desired)
        proxy.heal()

        async def right():
            live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
            services = live["status"]["services"]
            ready = {name: services[name]["ready"] for name in ("prefill", "decode")}
            return ready == {"prefill": 1, "decode": 3} and live["status"]["phase"] == "Ready"

        await until(right, "one prefill and three decode workers")
        await settled(client, namespace, operator, quiet_s=2)
        assert await has_round(client, namespace, last)
        mark = len(proxy.carried)
        await pause(3.0)
        assert proxy.carried[mark:] == []
    assert await uids(client, namespace) == before
    assert len(proxy.done) >= 8, proxy.done
    assert [each for each in proxy.carried if each[0] == "DELETE"] == []
    made = Counter(
        (path, name) for method, path, name, status in proxy.carried if method == "POST" and status == 201
    )
    assert set(made.values()) == {1}


@pytest.mark.parametrize(
    "fault",
    [
        Fault.HANG,
        pytest.param(Fault.UNAVAILABLE, marks=pytest.mark.nightly),
        pytest.param(Fault.BUSY, marks=pytest.mark.nightly),
        pytest.param(Fault.RESET, marks=pytest.mark.nightly),
    ],
)
async def test_a_server_that_answers_nobody_changes_nothing(crds, client, shaky, proxy, namespace, fault):  # noqa: PLR0917 - fixtures
    """For eight seconds every call fails alike; a change made meanwhile is brought about afterwards."""
    async with at_rest(client, namespace, by=shaky) as operator:
        before = await uids(client, namespace)
        proxy.play(fault)
        await set_round(client, namespace, "late")
        await pause(8.0)
        assert await uids(client, namespace) == before
        proxy.heal()
        await until(lambda: has_round(client, namespace, "late"), "the change")
        await settled(client, namespace, operator)
        assert operator.cluster.problem() is None
    assert await uids(client, namespace) == before


async def test_other_writers_storm_and_the_graph_converges(crds, client, namespace):
    """Labels of the graph, its status and its adapters change fifty times a second while it is made and edited."""
    await client.create(graph(namespace), field_manager="test")
    stop = asyncio.Event()
    count = 0

    async def storm():
        nonlocal count
        while not stop.is_set():
            count += 1
            label = {"metadata": {"labels": {"storm": str(count)}}}
            with contextlib.suppress(NotFoundError):
                what, name = ((GRAPH_DEPLOYMENT, "g"), (SCALING_ADAPTER, "g-decode"))[count % 2]
                await client.patch(what, name, label, namespace=namespace, field_manager="storm")
            if count % 5 == 0:
                await set_status(client, GRAPH_DEPLOYMENT, "g", namespace, {"phase": "Failed"})
            await pause(0.02)

    tasks = [asyncio.create_task(storm()) for _ in range(3)]
    async with running(client, namespace) as operator:
        try:
            await until(there(client, namespace), "all children")
            await set_round(client, namespace, "storm")
            await until(lambda: has_round(client, namespace, "storm"), "the change")
            await pause(2.0)
        finally:
            stop.set()
            await asyncio.gather(*tasks)
        await settled(client, namespace, operator)

        async def right():
            live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
            return live["status"]["phase"] != "Failed"

        await until(right, "the right phase")
    assert count > 30
