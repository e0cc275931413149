"""Pods of a node that was deleted serve no more at once; a new node's pods, and those of an unknown one, do."""

from __future__ import annotations

import asyncio

from fake_api import FakeApi
from graph_harness import Loads, conditions, edit, graph, operator, pod, router, serving, to_rest, told
from patience import until_asked

from penstock.core.errors import ForbiddenError, UnavailableError
from penstock.kube.kinds import GPU_POOL
from penstock_operator.nodes import Nodes
from penstock_operator.plan.drain import PodLoad

IDLE = PodLoad(0, 0, 0.0)


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


def node(name, *, is_cordoned=False):
    """Return a node."""
    spec = {"unschedulable": True} if is_cordoned else {}
    return {"kind": "Node", "metadata": {"name": name, "resourceVersion": "1"}, "spec": spec}


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
    deleted = Nodes(api, changed.append, retry_s=0.0, forbidden_retry_s=0.0)

    def at_last():
        assert api.refusals == []
        return named

    watching = asyncio.create_task(deleted.run(at_last))
    await asyncio.sleep(0)
    named = {"late", "gone"}
    await told(api)
    assert (changed, deleted.is_deleted("early"), deleted.is_deleted("gone")) == (["gone"], False, True)
    watching.cancel()
    await asyncio.wait({watching})


async def test_only_nodes_that_come_or_go_are_told():
    """A heartbeat changes nothing; a node that comes back is told once."""
    api, changed = WithNodes("a"), []
    deleted = Nodes(api, changed.append)
    watching = asyncio.create_task(deleted.run(lambda: {"a", "b"}))
    await told(api)
    assert (changed, deleted.is_deleted("b"), deleted.is_deleted("a")) == (["b"], True, False)
    for change in ("MODIFIED", "DELETED", "ADDED", "MODIFIED"):
        api.tell(node("a"), change)
        await told(api)
    assert (changed, len(deleted)) == (["b", "a", "a"], 1)
    watching.cancel()
    await asyncio.wait({watching})


def events(api, reason):
    """Return the messages of the Events with a reason."""
    return [
        each["message"]
        for (kind, *_), each in api.objects.items()
        if kind == "Event" and each["reason"] == reason
    ]


def replicas(api):
    """Return the replicas of each Deployment."""
    return {name: api.at("Deployment", f"g-{name}")["spec"]["replicas"] for name in ("prefill", "decode")}


async def test_a_cordon_starts_a_replacement_and_the_old_worker_drains_once_it_serves():
    """The budget of 3 GPUs has room for one: of prefill and decode, decode gets it. The other gets an Event."""
    api = await with_nodes("n", "other")
    api.at("GraphDeployment", "g")["spec"]["planner"]["maxGpuBudget"] = 3
    async with operator(api, Loads({"decode-1": IDLE, "decode-2": IDLE})) as made:
        await to_rest(api, made)
        assert replicas(api) == {"prefill": 1, "decode": 1}
        api.tell(node("n", is_cordoned=True), "MODIFIED")
        await to_rest(api, made)
        assert replicas(api) == {"prefill": 1, "decode": 2}
        assert events(api, "Replacing") == [
            "decode: all of its replicas are on cordoned nodes (n); a replacement starts before they are evicted"
        ]
        [refused] = events(api, "NoRoomForReplacement")
        assert refused.startswith(
            "prefill: all of its replicas are on cordoned nodes (n), and the GPU budget"
        )

        new = pod("decode-2", "decode", gated=False, ready=True, phase="Running", nodeName="other")
        await api.create(new, field_manager="kubelet")
        await to_rest(api, made)
        labels = {
            name: api.at("Pod", name)["metadata"]["labels"]["penstock.dev/serving"]
            for name in ("decode-1", "decode-2")
        }
        assert labels == {"decode-1": "draining", "decode-2": "true"}


async def test_an_uncordoned_node_needs_no_replacement():
    """A cordon that is taken back leaves the service as it was."""
    api = await with_nodes("n")
    api.at("GraphDeployment", "g")["spec"]["planner"]["maxGpuBudget"] = 8
    async with operator(api) as made:
        await to_rest(api, made)
        api.tell(node("n", is_cordoned=True), "MODIFIED")
        await to_rest(api, made)
        assert replicas(api) == {"prefill": 2, "decode": 2}
        api.tell(node("n"), "MODIFIED")
        await to_rest(api, made)
    assert replicas(api) == {"prefill": 1, "decode": 1}


async def test_in_a_pool_whose_gpus_are_used_up_a_replacement_waits_until_the_pool_has_room():
    """The graph bids for it; nothing exceeds the grant meanwhile, and nothing is drained before a replacement serves."""
    api = await with_nodes("n", "other")
    api.at("GraphDeployment", "g")["spec"]["planner"]["maxGpuBudget"] = 8
    spec = {"gpus": 2, "holdSeconds": 0, "graphs": [{"match": {"name": "g"}, "guaranteedGpus": 2}]}
    metadata = {"name": "shared", "namespace": "ns", "creationTimestamp": "2026-01-01T00:00:00Z"}
    await api.create(GPU_POOL.of(metadata, spec=spec), field_manager="user")
    api.served[f"/apis/{GPU_POOL.api_version}"] = [GPU_POOL.plural]
    async with operator(api, Loads({"decode-1": IDLE, "prefill-1": IDLE})) as made:
        ready = asyncio.Event()
        sharing = asyncio.create_task(made.pools.run(ready))
        await ready.wait()

        async def until_it_has(number, events_of="", *, decode=1):
            """Reconcile until the pool grants this many GPUs, two such Events are there if any are named, and decode has these replicas."""

            async def has_all():
                await to_rest(api, made)
                rows = (api.at("GpuPool", "shared").get("status") or {}).get("graphs") or [{}]
                told_twice = not events_of or len(events(api, events_of)) == 2
                return rows[0].get("granted") == number and told_twice and replicas(api)["decode"] == decode

            await until_asked(has_all, f"{number} GPUs")
            assert replicas(api) == {"prefill": 1, "decode": decode}

        await until_it_has(2)
        api.tell(node("n", is_cordoned=True), "MODIFIED")
        await told(api)
        await until_it_has(2, "NoRoomForReplacement")
        edit(api, "GpuPool", "shared", gpus=3)
        await until_it_has(3, decode=2)
        sharing.cancel()
        await asyncio.wait({sharing})
