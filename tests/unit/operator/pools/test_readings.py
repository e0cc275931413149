"""Reading a pool's nodes and quotas: how often, and what an API server that says no or nothing leads to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.api import GpuPool
from penstock.core.errors import ForbiddenError, UnavailableError
from penstock.kube.kinds import NODE as NODE_KIND
from penstock.kube.kinds import RESOURCE_QUOTA
from penstock_operator.pools.readings import PoolReadings

READY = {"type": "Ready", "status": "True"}
NODE = {
    "metadata": {"name": "a"},
    "status": {"conditions": [READY], "allocatable": {"nvidia.com/gpu": "8"}},
}


class Client:
    """Answers as told, and counts."""

    def __init__(self):
        self.nodes = self.pods = None
        self.quotas = ["a quota"]
        self.calls = 0

    async def list(self, kind, *, namespace, labels=None):
        """Return the one node or quota, or fail."""
        self.calls += 1
        if kind is RESOURCE_QUOTA:
            assert (namespace, labels) == ("ns", None)
            if isinstance(self.quotas, Exception):
                raise self.quotas
            return SimpleNamespace(items=self.quotas)
        assert (kind, namespace, labels) == (NODE_KIND, None, {"gpu": "h100"})
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
def read():
    """Return a reader's read, with its client and its clock."""
    now = [0.0]
    client = Client()
    reader = PoolReadings(client, now_s=lambda: now[0])

    async def read(selector=None, generation=1):
        selector = {"gpu": "h100"} if selector is None else selector
        made = {"apiVersion": "penstock.dev/v1alpha1", "kind": "GpuPool", "metadata": {"name": "p"}}
        pool = GpuPool.model_validate({**made, "spec": {"gpus": 9, "nodeSelector": selector, "graphs": []}})
        return await reader.nodes(pool, "u", generation=generation, graphs=())

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
    assert "rbac.nodes" in found.message
    read.client.nodes, read.client.pods = None, ForbiddenError("403")
    found = await read.read(generation=2)
    assert found.gpus == 8
    assert "GPUs of other pods are unknown" in found.message


async def test_an_api_server_that_does_not_answer_changes_nothing(read):
    """What was known counts on."""
    await read.read()
    read.client.nodes, read.now[0] = UnavailableError("503"), 16.0
    found = await read.read()
    assert found.gpus == 8
    assert "could not be read" in found.message


async def test_quotas_are_read_once_a_minute(read):
    """A pool is shared out every second or so."""
    assert await read.reader.quotas("ns") == ["a quota"]
    read.client.quotas, read.now[0] = [], 59.0
    assert await read.reader.quotas("ns") == ["a quota"]
    assert read.client.calls == 1
    read.now[0] = 60.0
    assert await read.reader.quotas("ns") == []


@pytest.mark.parametrize(
    ("answer", "found"), [(ForbiddenError("403"), []), (UnavailableError("503"), ["a quota"])]
)
async def test_quotas_that_cannot_be_read_stop_nothing(read, answer, found):
    """Without the right nothing is known; without an answer what was known stands."""
    await read.reader.quotas("ns")
    read.client.quotas, read.now[0] = answer, 60.0
    assert await read.reader.quotas("ns") == found
