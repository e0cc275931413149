"""A namespace that is deleted with a graph in it: `kubectl delete namespace`, while workers still have streams."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from operating import Loads, graph, is_ready, pods_of, process, running, scale, until

from penstock.core.errors import NotFoundError
from penstock.kube.informer import Informer
from penstock.kube.kinds import GRAPH_DEPLOYMENT, NAMESPACE
from penstock_operator.plan.drain import PodLoad

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds", "kwok")]


@asynccontextmanager
async def statuses(client, namespace):
    """Collect the reasons and messages of the graph's conditions while the body runs."""
    seen = set()

    def changed(_change, live):
        for each in live.get("status", {}).get("conditions", ()):
            seen.add((each["type"], each["reason"], each["message"]))

    informer = Informer(client, GRAPH_DEPLOYMENT, namespace=namespace, on_change=changed)
    task = asyncio.create_task(informer.run())
    await informer.synced.wait()
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])


def is_gone(client, namespace):
    """Return a check that a namespace is no more."""

    async def check():
        try:
            await client.get(NAMESPACE, namespace)
        except NotFoundError:
            return True
        return False

    return check


async def test_a_namespace_goes_while_a_worker_drains_and_nothing_is_left(
    make_node, client, namespace, caplog
):
    """Streams that are open hold neither finalizer nor namespace longer than their pods; the status tells of it, the operator continues."""
    make_node(gpus=8)
    loads = Loads()
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace, loads=loads) as operator:
        await until(is_ready(client, namespace), "readiness")
        await scale(client, namespace, "decode", 2)

        async def two():
            return [each for each in await pods_of(client, namespace, "decode") if each.ready]

        workers = await until(lambda: _count(two, 2), "two decode workers")
        for each in workers:
            loads.busy[each.name] = PodLoad(3, 900, 0.5)
        await scale(client, namespace, "decode", 1)

        async def draining():
            return [
                each for each in await pods_of(client, namespace, "decode") if each.drain_since_s is not None
            ]

        await until(draining, "a worker to drain")
        async with statuses(client, namespace) as seen:
            await client.delete(NAMESPACE, namespace, namespace=None)
            await until(is_gone(client, namespace), "the namespace to go")
        assert not operator.task.done()
    told = {reason for kind, reason, _ in seen if kind in {"Ready", "Degraded"}}
    assert told & {"Deleting", "NamespaceTerminating"}, seen
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def _count(check, number):
    found = await check()
    return found if len(found) == number else None


async def test_a_namespace_goes_with_the_operator_that_lives_in_it(
    crds, make_node, client, namespace, monkeypatch
):
    """README's installation. The operator's pod ends with the others; nobody is left to finish the drain, so it is given up."""
    make_node(gpus=8)
    monkeypatch.setenv("POD_NAMESPACE", namespace)
    await client.create(graph(namespace), field_manager="test")
    with process(crds.kubeconfig, namespace) as (operator, _):
        await until(is_ready(client, namespace), "readiness")
        await client.delete(NAMESPACE, namespace, namespace=None)
        operator.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(operator.wait, 30) == 0
    await until(is_gone(client, namespace), "the namespace to go")


async def test_an_operator_that_ends_elsewise_keeps_its_finalizers(crds, client, namespace, monkeypatch):
    """A rollout or an eviction of the operator gives no drain up."""
    monkeypatch.setenv("POD_NAMESPACE", namespace)
    await client.create(graph(namespace), field_manager="test")

    async def finalizers():
        found = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
        return found["metadata"].get("finalizers")

    with process(crds.kubeconfig, namespace) as (operator, _):
        before = await until(finalizers, "the finalizer")
        operator.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(operator.wait, 30) == 0
    assert await finalizers() == before


def finish_drains(crds, namespace, limit_s):
    """Run what the chart's pre-delete hook runs; return what it printed."""
    command = [sys.executable, "-m", "penstock.cli", "operator", "finish-drains", "--namespace", namespace]
    command += ["--kubeconfig", str(crds.kubeconfig), "--timeout", str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


async def test_finish_drains_waits_for_the_operator_and_then_gives_a_drain_up(
    crds, make_node, client, namespace
):
    """A drain that the operator ends is waited for. The next one, which no operator carries out, is given up."""
    make_node(gpus=8)
    await client.create(graph(namespace), field_manager="test")
    async with running(client, namespace):
        await until(is_ready(client, namespace), "readiness")
        await client.delete(GRAPH_DEPLOYMENT, "g", namespace=namespace)
        said = await asyncio.to_thread(finish_drains, crds, namespace, 90)
    assert said.splitlines()[-1] == "all graphs are deleted"
    assert "abandoned" not in said

    await client.create(graph(namespace, "left"), field_manager="test")
    finalizer = {"metadata": {"finalizers": ["penstock.dev/drain"]}}
    await client.patch(GRAPH_DEPLOYMENT, "left", finalizer, namespace=namespace, field_manager="test")
    await client.delete(GRAPH_DEPLOYMENT, "left", namespace=namespace)
    said = await asyncio.to_thread(finish_drains, crds, namespace, 0.5)
    assert f"GraphDeployment {namespace}/left: not drained after 0.5 s; the drain was abandoned" in said
    with pytest.raises(NotFoundError):
        await client.get(GRAPH_DEPLOYMENT, "left", namespace=namespace)
