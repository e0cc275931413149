"""Reading a pool's nodes: how often, and what an API server that says no or nothing leads to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.api import GpuPool
from penstock.core.errors import ForbiddenError, UnavailableError
from penstock_operator.pool_nodes import PoolNodeReader

READY = {"type": "Ready", "status": "True"}
NODE = {
    "metadata": {"name": "a"},
    "status": {"conditions": [READY], "allocatable": {"nvidia.com/gpu": "8"}},
}


class Client:
    """Answers as told, and counts."""

    def __init__(self):
        self.nodes = self.pods = None
        self.calls = 0

    async def list(self, _kind, *, namespace, labels):
        """Return the one node, or fail."""
        self.calls += 1
        assert (namespace, labels) == (None, {"gpu": "h100"})
        if self.nodes:
            raise self.nodes
        return SimpleNamespace(items=[NODE])

    async def raw_get(self, path):
        """Return no pods, or fail."""
        assert path == "/api/v1/pods?fieldSelector=spec.nodeName%3Da"
        if self.pods:
            raise self.pods
        return {"items": []}


@pytest.fixture
def read(monkeypatch):
    """Return a reader's read, with its client and its clock."""
    now = [0.0]
    monkeypatch.setattr("penstock_operator.polled.time.monotonic", lambda: now[0])
    client = Client()
    reader = PoolNodeReader(client)

    async def read(selector=None, generation=1):
        selector = {"gpu": "h100"} if selector is None else selector
        made = {"apiVersion": "penstock.dev/v1alpha1", "kind": "GpuPool", "metadata": {"name": "p"}}
        pool = GpuPool.model_validate({**made, "spec": {"gpus": 9, "nodeSelector": selector, "graphs": []}})
        return await reader.read(pool, "u", generation=generation, graphs=())

    return SimpleNamespace(read=read, client=client, now=now, reader=reader)


async def test_nodes_are_read_now_and_then_and_after_an_edit(read):
    """A pool that selects none has nothing to read."""
    assert await read.read({}) is None
    assert (await read.read()).gpus == 8
    await read.read()
    assert read.client.calls == 1
    await read.read(generation=2)
    read.now[0] = 16.0
    await read.read(generation=2)
    assert read.client.calls == 3
    read.reader.forget("u")
    await read.read(generation=2)
    assert read.client.calls == 4


async def test_without_the_right_the_pool_counts_as_written_and_says_so(read):
    """Of nodes; where only others' pods are hidden, nodes count."""
    read.client.nodes = ForbiddenError("403")
    found = await read.read()
    assert found.gpus is None
    assert "rbac.nodes" in found.words
    read.client.nodes, read.client.pods = None, ForbiddenError("403")
    found = await read.read(generation=2)
    assert found.gpus == 8
    assert "foreign pods are not known" in found.words


async def test_an_api_server_that_does_not_answer_changes_nothing(read):
    """What was known counts on."""
    await read.read()
    read.client.nodes, read.now[0] = UnavailableError("503"), 16.0
    found = await read.read()
    assert found.gpus == 8
    assert "could not be read" in found.words
