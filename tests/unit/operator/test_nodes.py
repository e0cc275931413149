"""Pods of a node that was deleted serve no more at once; a new node's pods, and those of an unknown one, do."""

from __future__ import annotations

import asyncio

from fake_api import FakeApi
from graph_harness import conditions, edit, graph, operator, pod, router, serving, to_rest, told

from penstock.core.errors import ForbiddenError, UnavailableError
from penstock_operator.nodes import DeletedNodes


class WithNodes(FakeApi):
    """An API server whose nodes may be listed."""

    def __init__(self, *names):
        super().__init__()
        self.refusals = []
        for name in names:
            self.objects["Node", "", name] = node(name)

    async def raw_get(self, path):
        """Answer what asks for the right to list nodes."""
        if not path.startswith("/api/v1/nodes"):
            return await super().raw_get(path)
        if self.refusals:
            raise self.refusals.pop(0)
        return {"items": []}


def node(name):
    """Return a node."""
    return {"kind": "Node", "metadata": {"name": name, "resourceVersion": "1"}}


async def with_nodes(*names):
    """Return an API server with these nodes, and the graph's pods, which serve on node n."""
    api = WithNodes(*names)
    await api.create(graph(), field_manager="user")
    for each in ("prefill", "decode"):
        await serving(api, f"{each}-1", each)
    await api.create(router(), field_manager="kubelet")
    return api


async def test_a_deleted_node_is_told_before_its_pods_are():
    """Its pod is still Ready in the API: Degraded names node and pod, and the graph is not ready; the node comes back, and it is."""
    api = await with_nodes("n")
    async with operator(api) as made:
        await to_rest(api, made)
        assert conditions(api)["Ready"]["status"] == "True"
        api.tell(node("n"), "DELETED")
        await to_rest(api, made)
        rows = conditions(api)
        assert (rows["Degraded"]["status"], rows["Degraded"]["reason"]) == ("True", "NodeLost")
        assert "node n was deleted" in rows["Degraded"]["message"]
        assert rows["Ready"]["status"] == "False"
        api.tell(node("n"), "ADDED")
        await to_rest(api, made)
        assert conditions(api)["Ready"]["status"] == "True"


async def test_a_node_that_is_missing_at_the_start_is_deleted():
    """The operator was restarted meanwhile."""
    api = await with_nodes("other")
    async with operator(api) as made:
        await to_rest(api, made)
        assert conditions(api)["Degraded"]["reason"] == "NodeLost"


async def test_a_node_that_was_never_seen_is_none_that_was_deleted():
    """The watch of nodes may lag behind that of pods."""
    api = await with_nodes("n")
    async with operator(api) as made:
        await to_rest(api, made)
        late = pod("decode-2", "decode", gated=False, ready=True, phase="Running", nodeName="new")
        await api.create(late, field_manager="kubelet")
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await to_rest(api, made)
        assert conditions(api)["Ready"]["status"] == "True"


async def test_without_the_right_nothing_is_known_to_be_deleted_until_it_is_given():
    """Asked again while the API server does not answer, and while it forbids; missed are then the nodes of the pods there are."""
    api, changed, named = WithNodes("late"), [], {"early"}
    api.refusals = [
        UnavailableError("away"),
        ForbiddenError("401"),
        ForbiddenError("403: nodes is forbidden"),
    ]
    deleted = DeletedNodes(api, changed.append, retry_s=0.0, forbidden_retry_s=0.0)

    def at_last():
        assert api.refusals == []
        return named

    watching = asyncio.create_task(deleted.run(at_last))
    await asyncio.sleep(0)
    named = {"late", "gone"}
    await told(api)
    assert (changed, "early" in deleted, "gone" in deleted) == (["gone"], False, True)
    watching.cancel()
    await asyncio.wait({watching})


async def test_only_nodes_that_come_or_go_are_told():
    """A heartbeat changes nothing; a node that comes back is told once."""
    api, changed = WithNodes("a"), []
    deleted = DeletedNodes(api, changed.append)
    watching = asyncio.create_task(deleted.run(lambda: {"a", "b"}))
    await told(api)
    assert (changed, "b" in deleted, "a" in deleted) == (["b"], True, False)
    for change in ("MODIFIED", "DELETED", "ADDED", "MODIFIED"):
        api.tell(node("a"), change)
        await told(api)
    assert (changed, len(deleted)) == (["b", "a", "a"], 1)
    watching.cancel()
    await asyncio.wait({watching})
