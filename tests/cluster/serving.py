"""A small graph whose routers and workers are real processes, its operator, and clients that load it."""

from __future__ import annotations

import contextlib
import logging

from client_load import ClientLoad
from node_agent import NodeAgent, addresses
from operating import edit, events, graph, process, says, until

from penstock.kube.kinds import CONFIG_MAP, DEPLOYMENT, GRAPH_DEPLOYMENT, POD

log = logging.getLogger(__name__)

NAMESPACE = "default"
ROLLED_S = 300.0
"""A busy machine takes minutes for what a quiet one does in 13 s."""


def manifest(**changes):
    """Return a small graph."""
    return graph(
        NAMESPACE,
        model={"name": "tiny", "servedName": "s", "contextTokens": 8192},
        services={
            "frontend": {"role": "router", "replicas": 1, "terminationGracePeriodSeconds": 60},
            "prefill": worker("prefill"),
            "decode": worker("decode"),
        },
        **{"planner": {"maxGpuBudget": 8}, **changes},
    )


def worker(role):
    """Return a service of workers of one GPU."""
    return {"role": role, "scaling": {}, "gpusPerReplica": 1, "terminationGracePeriodSeconds": 60}


class Serving:
    """A graph whose pods run, the process of its operator, and clients."""

    def __init__(self, client, load, operator):
        self.load, self.operator = load, operator
        self.lost = {}
        self._client = client

    async def change(self, name, spec):
        """Carry out an edit; note what the load lost meanwhile under the edit's name."""
        before, answered = len(self.load.lost), self.load.answered
        await self.edit(spec)
        await until(self.rests, f"{name} is carried out", timeout_s=ROLLED_S)
        done = self.load.answered

        async def served():
            return self.load.answered >= done + 6

        await until(served, f"requests after {name}", timeout_s=ROLLED_S)
        if lost := self.load.lost[before:]:
            self.lost[name] = lost
        log.info("%s: %d answered, %d lost", name, self.load.answered - answered, len(lost))

    async def edit(self, spec):
        """Edit the graph."""
        await edit(self._client, NAMESPACE, spec)

    async def warnings(self):
        """Return the Events that say beforehand that requests will be refused."""
        return await events(self._client, NAMESPACE, "RequestsRefused")

    async def rests(self):
        """Return whether the newest specification serves, and nothing comes or goes."""
        live = await self._client.get(GRAPH_DEPLOYMENT, "g", namespace=NAMESPACE)
        status = live.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        if (
            status.get("observedGeneration") != live["metadata"]["generation"]
            or status.get("phase") != "Ready"
            or conditions.get("Progressing") != "False"
        ):
            return False
        workloads = (await self._client.list(DEPLOYMENT, namespace=NAMESPACE)).items
        pods = (await self._client.list(POD, namespace=NAMESPACE)).items
        return len(pods) == sum(each["spec"]["replicas"] for each in workloads) and all(
            map(_rests, workloads)
        )


def _rests(workload):
    """Whether every pod of a Deployment is ready and of its newest template."""
    spec, status = workload["spec"], workload["status"]
    numbers = {spec["replicas"], status.get("updatedReplicas"), status.get("availableReplicas")}
    return len(numbers) == 1 and status["observedGeneration"] == workload["metadata"]["generation"]


@contextlib.asynccontextmanager
async def served(plane, client, folder, *, load=None, **changes):
    """Run the graph, with changes, under load, on a control plane of its own, while the body runs."""
    plane.start_controllers()
    named = CONFIG_MAP.of({"name": "c", "namespace": NAMESPACE}, data={"B": "2"})
    await client.create(named, field_manager="test")
    clients = ClientLoad(client, NAMESPACE, "g-frontend", model="s", **(load or {}))
    async with contextlib.AsyncExitStack() as stack:
        free = stack.enter_context(addresses())
        agent = await stack.enter_async_context(NodeAgent(plane, client, free, folder).on(gpus=16))
        operator, port = stack.enter_context(process(plane.kubeconfig, NAMESPACE))
        serving = Serving(client, clients, operator)
        await until(says(port, "/readyz"), "an operator")
        await client.create(manifest(**changes), field_manager="test")
        await until(serving.rests, "a graph that serves", timeout_s=ROLLED_S)
        await stack.enter_async_context(clients.on())
        yield serving
    assert agent.crashed == []
