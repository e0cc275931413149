"""Workers that change their role on a cluster: real ReplicaSets let them go and adopt them; an operator is killed at every step."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from operating import BudgetWatch, Loads, graph, is_ready, pods_of, running, scale, settled, until

from penstock.kube.kinds import ENDPOINT_SLICE, EVENT, POD
from penstock_operator.plan.drain import PodLoad
from penstock_operator.plan.pods import pod_view

pytestmark = [pytest.mark.cluster]


def switchable(namespace):
    """Return a graph of 2 prefill and 1 decode workers, of which 3 fit the budget."""
    made = graph(namespace, engine={"switchable": True}, planner={"maxGpuBudget": 3})
    for service in ("prefill", "decode"):
        made["spec"]["services"][service]["terminationGracePeriodSeconds"] = 60
    made["spec"]["services"]["prefill"]["replicas"] = 2
    return made


async def ready(client, namespace):
    """Return the ready worker pods' uids by service."""
    return {
        service: {each.uid for each in await pods_of(client, namespace, service) if each.ready and each.alive}
        for service in ("prefill", "decode")
    }


def has_ready(client, namespace, *, prefill, decode):
    """Return a check of who is ready and that nothing else is there; it gives the uids."""

    async def check():
        found = await ready(client, namespace)
        there = [*await pods_of(client, namespace, "prefill"), *await pods_of(client, namespace, "decode")]
        counts = (len(found["prefill"]), len(found["decode"]))
        return counts == (prefill, decode) and len(there) == prefill + decode and found

    return check


async def test_a_drained_prefill_worker_becomes_a_decode_worker(crds, kwok, make_node, client, namespace):
    """The same process: its pod has the other Service, workload and role; none is started or lost, within the budget."""
    make_node(gpus=8)
    await client.create(switchable(namespace), field_manager="test")
    loads = Loads()
    budget = BudgetWatch(client, namespace, "penstock.dev/role in (prefill, decode)")
    async with budget.on(), running(client, namespace, loads=loads) as operator:
        await until(is_ready(client, namespace), "readiness")
        before = await until(has_ready(client, namespace, prefill=2, decode=1), "the workers")
        loads.busy = {each.name: PodLoad(1, 0, 0.2) for each in await pods_of(client, namespace, "prefill")}
        await scale(client, namespace, "decode", 2)
        await scale(client, namespace, "prefill", 1)

        async def marked():
            return [each for each in await pods_of(client, namespace, "prefill") if each.draining]

        [victim] = await until(marked, "a victim")
        assert (await ready(client, namespace))["decode"] == before["decode"], (
            "it finishes its requests first"
        )
        loads.busy = {}
        after = await until(has_ready(client, namespace, prefill=1, decode=2), "the switch")
        await settled(client, namespace, operator)
    assert after["decode"] == before["decode"] | {victim.uid}
    assert after["prefill"] == before["prefill"] - {victim.uid}
    assert budget.most <= 3
    [pod] = [each for each in await pods_of(client, namespace, "decode") if each.uid == victim.uid]
    assert (pod.role, pod.serving, pod.drain_since_s, pod.deletion_cost) == ("decode", "true", None, 0)
    live = await client.get(POD, pod.name, namespace=namespace)
    assert [each["name"].rpartition("-")[0] for each in live["metadata"]["ownerReferences"]] == ["g-decode"]

    async def routed():
        found = await client.list(ENDPOINT_SLICE, namespace=namespace)
        roles = [
            each["metadata"]["labels"].get("penstock.dev/role")
            for each in found.items
            for end in each.get("endpoints") or ()
            if (end.get("targetRef") or {}).get("uid") == victim.uid
        ]
        return roles == ["decode"]

    await until(routed, "the router's view of it")
    notes = [
        each
        for each in (await client.list(EVENT, namespace=namespace)).items
        if each["reason"] == "RoleSwitched"
    ]
    assert [each["message"] for each in notes] == [
        f"{victim.name} has drained and serves decode, so that no new pod has to start"
    ]


async def _ended(mortal, switched):
    return mortal.done.is_set() or await switched()


WRITES = {"create", "patch", "apply", "replace", "delete"}


class OneWrite:
    """A client of an operator that dies with its first write: the API server has it, and nothing else is written."""

    def __init__(self, client):
        self._client = client
        self.done = asyncio.Event()

    def __getattr__(self, name):
        found = getattr(self._client, name)
        if name not in WRITES:
            return found

        async def write(*arguments, **options):
            if not self.done.is_set():
                await found(*arguments, **options)
                self.done.set()
            await asyncio.Event().wait()

        return write


class WorkerWatch(BudgetWatch):
    """Counts the workers of each role that may be sent requests, at every event of the API server."""

    def __init__(self, client, namespace):
        self.fewest = {"prefill": 9, "decode": 9}
        super().__init__(client, namespace, "penstock.dev/role in (prefill, decode)")

    def _changed(self, change, pod):
        super()._changed(change, pod)
        views = list(map(pod_view, self._pods.objects.values()))
        for role, fewest in self.fewest.items():
            serving = sum(
                each.role == role and each.ready and each.takes_requests and each.alive for each in views
            )
            self.fewest[role] = min(fewest, serving)


async def test_an_operator_that_dies_after_every_write_ends_the_switch(
    crds, kwok, make_node, client, namespace
):
    """One write a life: in the end the worker has switched, and there was a worker of each role, and no GPU too many."""
    make_node(gpus=8)
    await client.create(switchable(namespace), field_manager="test")
    async with running(client, namespace, loads=Loads()) as operator:
        await until(is_ready(client, namespace), "readiness")
        before = await until(has_ready(client, namespace, prefill=2, decode=1), "the workers")
        await settled(client, namespace, operator)
    await scale(client, namespace, "decode", 2)
    await scale(client, namespace, "prefill", 1)
    switched = has_ready(client, namespace, prefill=1, decode=2)
    watch, lives = WorkerWatch(client, namespace), 0
    async with watch.on():
        watch.fewest = {"prefill": 9, "decode": 9}
        while not (after := await switched()):
            mortal = OneWrite(client)
            lives += 1
            async with running(mortal, namespace, loads=Loads()):
                await until(partial(_ended, mortal, switched), "a write or the end")
    assert lives > 3
    assert (watch.most, watch.fewest) == (3, {"prefill": 1, "decode": 1})
    assert len(after["decode"] & before["prefill"]) == 1
    assert before["decode"] < after["decode"]
