"""What the tests of the planner share: a graph with pods made by hand, a planner in this process, and questions.

Pods are on addresses of loopback, and an operator of a few lines makes as many as are wished for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os

from operating import edit, set_status
from patience import LIMIT_S

from penstock.core.errors import ClusterError
from penstock.core.http.server import HttpServer
from penstock.engine.profiles.performance import graph_performance
from penstock.kube.kinds import EVENT, GRAPH_DEPLOYMENT, POD, SCALING_ADAPTER
from penstock.kube.objects.names import PLANNER
from penstock_planner.cluster.service import ClusterService, run_until_stopped
from penstock_planner.ledger import read_ledger

INTERVAL_S = 1
"""Adjustment interval of every graph."""


_numbers = itertools.count(2)


class World:
    """One namespace with a graph: its objects, its pods and the page of its router.

    Attributes:
        kv: KV usage of every decode worker; None leaves it out of the page.
        queue: Requests that wait for prefill.
        obeys: Whether pods follow the desired number.
    """

    def __init__(self, client, namespace, folder):
        self.client = client
        self.namespace = namespace
        self.folder = folder
        self.kv = 0.7
        self.queue = 0.3
        self.obeys = True
        # Addresses of loopback: every world's router has its own port 8000.
        self.address = f"127.{os.getpid() % 200 + 1}.{next(_numbers)}.1"
        self._server = HttpServer(self._page)
        self._names = itertools.count()

    async def _page(self, _request, responder):
        lines = [f'penstock_router_prefill_queue_requests{{model_name="m"}} {self.queue}']
        if self.kv is not None:
            for name in await self.pods("decode"):
                labels = f'{{worker="{name}",role="decode"}}'
                lines.append(f"penstock_router_worker_kv_usage_fraction{labels} {self.kv}")
                lines.append(f"penstock_router_worker_metrics_age_seconds{labels} 0.1")
        responder.send(200, "\n".join([*lines, ""]).encode(), content_type="text/plain")

    async def start(self):
        """Serve the router's page."""
        await self._server.start(self.address, 8000)

    async def close(self):
        """Stop serving it."""
        await self._server.close(grace_s=0)

    async def make_graph(self, name="llama", **planner):
        """Create a graph, and what an operator would make of it: adapters and a ready pod per service."""
        scaling = {"minReplicas": 1, "maxReplicas": 4}
        spec = {
            "model": {"name": "m"},
            "runtime": "simulated",
            "services": {
                "frontend": {"role": "router", "replicas": 1},
                "prefill": {"role": "prefill", "scaling": scaling},
                "decode": {"role": "decode", "scaling": scaling},
            },
            "planner": {
                "mode": "load",
                "adjustmentIntervalSeconds": INTERVAL_S,
                "metricPullingIntervalSeconds": 0.1,
                "newDecodeWorkerGraceIntervals": 0,
                **planner,
            },
        }
        graph = GRAPH_DEPLOYMENT.of({"name": name, "namespace": self.namespace}, spec=spec)
        await self.client.create(graph, field_manager="test")
        for service in ("prefill", "decode"):
            labels = {"app.kubernetes.io/managed-by": "penstock", "penstock.dev/graph": name}
            adapter = SCALING_ADAPTER.of(
                {"name": f"{name}-{service}", "namespace": self.namespace, "labels": labels},
                spec={"graph": name, "service": service, "replicas": 1},
            )
            await self.client.create(adapter, field_manager="penstock-operator-init")
            await self.make_pod(service, graph=name)
        await self.make_pod("frontend", role="router", graph=name, address=self.address)

    async def make_pod(self, service, *, role=None, graph="llama", address="127.0.0.1", ready=True, **status):
        """Create a pod that is ready at once, or that the scheduler said something about."""
        name = f"{graph}-{service}-{next(self._names)}"
        labels = {
            "app.kubernetes.io/managed-by": "penstock",
            "penstock.dev/graph": graph,
            "penstock.dev/service": service,
            "penstock.dev/role": role or service,
            "penstock.dev/serving": "true",
        }
        spec = {"containers": [{"name": "main", "image": "none"}], "terminationGracePeriodSeconds": 0}
        pod = POD.of({"name": name, "namespace": self.namespace, "labels": labels}, spec=spec)
        await self.client.create(pod, field_manager="test")
        if ready:
            status = {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [{"type": "Ready", "status": "True"}],
            }
        if status:
            await set_status(self.client, POD, name, self.namespace, status)
        return name

    async def pods(self, service, graph="llama"):
        """Return the names of a service's pods."""
        labels = {"penstock.dev/service": service, "penstock.dev/graph": graph}
        found = await self.client.list(POD, namespace=self.namespace, labels=labels)
        return sorted(pod["metadata"]["name"] for pod in found.items)

    async def delete_pod(self, name):
        """Delete a pod at once."""
        await self.client.delete(POD, name, namespace=self.namespace, grace_s=0)

    async def adapter(self, service, graph="llama"):
        """Return a service's ScalingAdapter."""
        return await self.client.get(SCALING_ADAPTER, f"{graph}-{service}", namespace=self.namespace)

    async def desired(self, service, graph="llama"):
        """Return the replicas that a service's adapter asks for."""
        return (await self.adapter(service, graph))["spec"]["replicas"]

    async def edit(self, service, replicas, manager="kubectl-scale"):
        """Write an adapter's number in the name of ``manager``."""
        where = {"namespace": self.namespace, "subresource": "scale", "field_manager": manager}
        patch = {"spec": {"replicas": replicas}}
        await self.client.patch(SCALING_ADAPTER, f"llama-{service}", patch, **where)

    async def change(self, **spec):
        """Merge a part of the graph's specification into it."""
        await edit(self.client, self.namespace, spec, name="llama")

    async def operate(self):
        """Make as many ready pods as are wished for, repeatedly."""
        while True:
            await asyncio.sleep(0.1)
            for service in ("prefill", "decode") if self.obeys else ():
                with contextlib.suppress(ClusterError):
                    desired, pods = await self.desired(service), await self.pods(service)
                    for _ in range(desired - len(pods)):
                        await self.make_pod(service)
                    for name in pods[: max(0, len(pods) - desired)]:
                        await self.delete_pod(name)

    async def status(self, graph="llama"):
        """Return a graph's status, {} without one."""
        return (await self.client.get(GRAPH_DEPLOYMENT, graph, namespace=self.namespace)).get("status", {})

    async def reason(self, graph="llama"):
        """Return the reason of PlannerActive."""
        conditions = (await self.status(graph)).get("conditions", [])
        return next((c["reason"] for c in conditions if c["type"] == "PlannerActive"), None)

    async def events(self):
        """Return reason, type and object's name of every Event of the planner, by its sentence."""
        found = await self.client.list(EVENT, namespace=self.namespace)
        # A scheduler on the same server has its own to say.
        own = [each for each in found.items if each.get("reportingComponent") == PLANNER]
        return {e["message"]: (e["reason"], e["type"], e["involvedObject"]["name"]) for e in own}

    @contextlib.asynccontextmanager
    async def planning(self, **settings):
        """Run a planner process's main coroutine."""
        settings = {
            "overrides": {},
            "engine_profile": graph_performance,
            "namespace": self.namespace,
            "log_dir": self.folder,
            **settings,
        }
        stop = asyncio.Event()
        task = asyncio.create_task(run_until_stopped(ClusterService(**settings), self.client, stop))
        try:
            yield task
        finally:
            stop.set()
            await asyncio.wait_for(task, LIMIT_S)

    def ledger(self, graph="llama"):
        """Return what a graph's ledger holds."""
        return read_ledger(self.folder / self.namespace / graph)


async def is_now(asked, expected):
    """Return whether what is asked is as expected; it is not while the API server does not answer."""
    try:
        return await asked == expected
    except ClusterError:
        return False
