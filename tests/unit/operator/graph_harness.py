"""A graph, its pods and an operator on an API server in memory; the tests of the reconciler use it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.kube.informer import Informer
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock.kube.objects.names import DRAIN_FINALIZER
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.service import Operator
from penstock_operator.settings import OperatorSettings

KEY = ("ns", "g")
GATE = {"name": "penstock.dev/gpu-budget"}


class Clock:
    """Seconds that a test moves."""

    def __init__(self):
        self.s = 100.0

    def __call__(self):
        """Return the time."""
        return self.s


class Loads:
    """Loads by pod; absent ones are unknown."""

    def __init__(self, loads=None):
        self.loads = loads or {}
        self.asked = []

    async def read(self, pods):
        """Return what is set."""
        names = [pod.name for pod in pods]
        self.asked.append(names)
        return {name: self.loads.get(name) for name in names}


def graph(**changes):
    """Return a graph of one router, one prefill and one decode worker, and 2 GPUs."""
    spec = {
        "model": {"name": "tiny"},
        "runtime": "simulated",
        "services": {
            "frontend": {"role": "router"},
            "prefill": {"role": "prefill", "scaling": {"maxReplicas": 3}},
            "decode": {"role": "decode", "scaling": {"maxReplicas": 3}},
        },
        "planner": {"maxGpuBudget": 2},
        **changes,
    }
    metadata = {"name": "g", "namespace": "ns"}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": metadata,
        "spec": spec,
    }


def pod(name, service, *, gated=True, ready=False, phase="Pending", **spec):
    """Return a worker pod of one GPU."""
    running = {"name": "main", "ready": ready, "started": ready, "state": {"running": {}} if ready else {}}
    status = {"phase": phase, "podIP": "10.0.0.1", "containerStatuses": [running]}
    status["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
    labels = {
        "penstock.dev/graph": "g",
        "penstock.dev/service": service,
        "penstock.dev/role": service,
        "app.kubernetes.io/managed-by": "penstock",
        "penstock.dev/serving": "true",
    }
    metadata = {"name": name, "namespace": "ns", "labels": labels, "annotations": {"penstock.dev/gpus": "1"}}
    containers = [{"name": "main"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "schedulingGates": [GATE] if gated else [],
            "containers": containers,
            **({} if gated else {"nodeName": "n"}),
            **spec,
        },
        "status": status,
    }


def router():
    """Return a router pod that serves."""
    made = pod("f-1", "frontend", gated=False, ready=True, phase="Running")
    made["metadata"]["labels"]["penstock.dev/role"] = "router"
    del made["metadata"]["annotations"]
    return made


async def serving(api, name, service):
    """Make a worker pod that serves."""
    made = pod(name, service, gated=False, ready=True, phase="Running")
    await api.create(made, field_manager="kubelet")


def edit(api, kind, name, **spec):
    """Change keys of an object's specification; None removes one."""
    live = api.at(kind, name)
    live["spec"] = {key: each for key, each in {**live["spec"], **spec}.items() if each is not None}
    live["metadata"]["generation"] = live["metadata"].get("generation", 0) + 1
    api.stored(live, "MODIFIED")


def conditions(api):
    """Return the graph's conditions by type."""
    return {each["type"]: each for each in api.at("GraphDeployment", "g")["status"]["conditions"]}


async def told(api):
    """Let every watch tell what it has."""
    for _ in range(60):
        await asyncio.sleep(0)


class Kopf:
    """In kopf's place: reports graphs that carry the finalizer, and holds it until their deletion is done."""

    def __init__(self, api, made):
        self._api, self._made = api, made
        self._graphs = Informer(api, GRAPH_DEPLOYMENT, namespace="ns", on_change=self._changed)
        self._deletions = {}

    async def run(self):
        """Watch until cancelled."""
        try:
            await self._graphs.run()
        finally:
            for each in self._deletions.values():
                each.cancel()

    def _changed(self, change, graph):
        metadata = graph["metadata"]
        if change == "DELETED":
            self._made.cluster.remove(graph)
        elif DRAIN_FINALIZER in metadata.get("finalizers", ()):
            self._made.cluster.report(graph)
            uid = metadata["uid"]
            if metadata.get("deletionTimestamp") and uid not in self._deletions:
                self._deletions[uid] = asyncio.create_task(self._delete(metadata["name"], uid))
        elif not metadata.get("deletionTimestamp"):
            live = self._api.at("GraphDeployment", metadata["name"])
            live["metadata"].setdefault("finalizers", []).append(DRAIN_FINALIZER)
            self._changed("MODIFIED", self._api.stored(live, "MODIFIED"))

    async def _delete(self, name, uid):
        await self._made.reconciler.wait_deleted(uid)
        live = self._api.at("GraphDeployment", name)
        live["metadata"]["finalizers"].remove(DRAIN_FINALIZER)
        if not live["metadata"]["finalizers"]:
            self._api.stored(self._api.objects.pop(("GraphDeployment", "ns", name)), "DELETED")


@asynccontextmanager
async def operator(api, loads=None, **options):
    """Give an operator whose watches run, without its queue."""
    settings = OperatorSettings(namespace="ns", leader_election=False, **options)
    made = Operator(api, settings, loads=loads or Loads(), metrics=OperatorMetrics())
    tasks = [asyncio.create_task(made.cluster.run())]
    await made.cluster.synced()
    tasks.append(asyncio.create_task(Kopf(api, made).run()))
    await told(api)
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def to_rest(api, made, *, looks=12):
    """Deliver what happened, and reconcile until a reconcile writes nothing."""
    await told(api)
    for _ in range(looks):
        before = len(api.writes)
        await made.reconciler.reconcile(KEY)
        await told(api)
        if len(api.writes) == before:
            return
    pytest.fail(f"still writing after {looks} looks: {api.writes[-5:]}")
