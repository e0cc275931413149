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


def manifest():
    """Return a small graph."""
    worker = {"gpusPerReplica": 1, "terminationGracePeriodSeconds": 60}
    return graph(
        NAMESPACE,
        model={"name": "tiny", "servedName": "s", "contextTokens": 8192},
        services={
            "frontend": {"role": "router", "terminationGracePeriodSeconds": 60},
            "prefill": {"role": "prefill", "scaling": {}, **worker},
            "decode": {"role": "decode", "scaling": {}, **worker},
        },
        planner={"maxGpuBudget": 8},
    )


class Serving:
    """A graph whose pods run, its operator, and clients."""

    def __init__(self, client, load):
        self.load = load
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
async def served(plane, client, folder):
    """Run the graph under load, on a control plane of its own, while the body runs."""
    plane.start_controllers()
    named = CONFIG_MAP.of({"name": "c", "namespace": NAMESPACE}, data={"B": "2"})
    await client.create(named, field_manager="test")
    load = ClientLoad(client, NAMESPACE, "g-frontend", model="s")
    serving = Serving(client, load)
    async with contextlib.AsyncExitStack() as stack:
        free = stack.enter_context(addresses())
        agent = await stack.enter_async_context(NodeAgent(plane, client, free, folder).on(gpus=16))
        _, port = stack.enter_context(process(plane.kubeconfig, NAMESPACE))
        await until(says(port, "/readyz"), "an operator", timeout_s=90)
        await client.create(manifest(), field_manager="test")
        await until(serving.rests, "a graph that serves", timeout_s=ROLLED_S)
        await stack.enter_async_context(load.on())
        yield serving
    assert agent.crashed == []
