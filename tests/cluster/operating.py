"""What the tests of the operator share: a small graph, an operator in this process or one of its own, and waiting."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, contextmanager, suppress

from patience import LIMIT_S, until_asked
from reserved_ports import reserved_port

from penstock.core.errors import ClusterError
from penstock.kube.informer import Informer
from penstock.kube.kinds import DEPLOYMENT, EVENT, GRAPH_DEPLOYMENT, KINDS, POD, SCALING_ADAPTER
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.plan.drain import PodLoad
from penstock_operator.plan.pods import pod_view
from penstock_operator.queue import RateLimits
from penstock_operator.service import Operator, OperatorService
from penstock_operator.settings import OperatorSettings

CHILDREN = {
    "ConfigMap": {"g-router"},
    "Deployment": {"g-decode", "g-frontend", "g-prefill"},
    "NetworkPolicy": {"g-router", "g-worker"},
    "PodDisruptionBudget": {"g-decode", "g-frontend", "g-prefill"},
    "Role": {"g-router"},
    "RoleBinding": {"g-router"},
    "ScalingAdapter": {"g-decode", "g-prefill"},
    "Service": {"g-decode", "g-frontend", "g-prefill"},
    "ServiceAccount": {"g-router", "g-worker"},
}


def graph(namespace, name="g", **changes):
    """Return a small simulated graph with a budget of 4 GPUs."""
    worker = {"gpusPerReplica": 1, "terminationGracePeriodSeconds": 2}
    spec = {
        "model": {"name": "tiny"},
        "runtime": "simulated",
        "services": {
            "frontend": {"role": "router", "replicas": 1},
            "prefill": {"role": "prefill", "scaling": {"minReplicas": 1, "maxReplicas": 3}, **worker},
            "decode": {"role": "decode", "scaling": {"minReplicas": 1, "maxReplicas": 3}, **worker},
        },
        "planner": {"maxGpuBudget": 4},
        **changes,
    }
    return GRAPH_DEPLOYMENT.of({"name": name, "namespace": namespace}, spec=spec)


IDLE = PodLoad(0, 0, 0.0, idle_s=60.0)


class Loads:
    """Loads that a test sets by pod; others are idle for long, or unknown."""

    def __init__(self, others=IDLE):
        self.busy = {}
        self._others = others

    async def read(self, pods):
        """Return the set load, or the others'."""
        return {pod.name: self.busy.get(pod.name, self._others) for pod in pods}


class BudgetWatch:
    """Adds up the GPUs of the released, unfinished pods with a label, a graph's, at every event of the API server.

    ``among`` are the namespaces that count where ``namespace`` is None.
    """

    def __init__(self, client, namespace, label="penstock.dev/graph", among=None):
        self.most = 0
        self.seen = 0
        self._among = among
        self._pods = Informer(client, POD, namespace=namespace, on_change=self._changed, labels=label)

    @asynccontextmanager
    async def on(self):
        """Watch while the body runs."""
        task = asyncio.create_task(self._pods.run())
        await self._pods.synced.wait()
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    def held(self):
        """Return the GPUs of the released, unfinished pods."""
        pods = self._pods.objects.items()
        views = [pod_view(pod) for key, pod in pods if self._among is None or key[0] in self._among]
        return sum(each.gpus for each in views if not each.gated and not each.finished)

    def _changed(self, _change, _pod):
        self.most = max(self.most, self.held())
        self.seen += 1


def operate(kubeconfig, namespace):
    """Be an operator process until killed."""
    # Nobody else runs: without a Lease the next one need not wait for the end of this one's term.
    settings = OperatorSettings(
        namespace=namespace, kubeconfig=kubeconfig, leader_election=False, metrics_port=0
    )
    asyncio.run(OperatorService(settings).run(asyncio.Event()))


@asynccontextmanager
async def running(client, namespace, *, loads=None, limits=None, resync_s=300.0, **more):
    """Run an operator in this process; ``more`` are settings."""
    settings = OperatorSettings(
        namespace=namespace, leader_election=False, metrics_port=0, resync_interval=resync_s, **more
    )
    metrics = OperatorMetrics()
    limits = limits or RateLimits(gap_s=0.02, first_backoff_s=0.05, max_backoff_s=1.0)
    operator = Operator(client, settings, loads=loads or Loads(None), metrics=metrics, limits=limits)
    operator.task = task = asyncio.create_task(operator.run())
    operator.page = metrics.page
    try:
        yield operator
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@contextmanager
def process(kubeconfig, namespace, *options):
    """Run `penstock operator run`; give the process and its metrics port."""
    port = reserved_port()
    command = [sys.executable, "-m", "penstock.cli", "operator", "run", "--namespace", namespace]
    command += ["--kubeconfig", str(kubeconfig), "--host", "127.0.0.1", "--metrics-port", str(port), *options]
    environment = {**os.environ, "POD_NAME": f"operator-{port}"}
    # Not a pipe, which nobody reads: full, it would stop the process.
    running = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield running, port
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()


def page(port, path):
    """Return status and body of one of the process's pages."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()
    except OSError:
        return 0, ""


def says(port, path, text=""):
    """Return a check of a page."""

    async def check():
        status, body = await asyncio.to_thread(page, port, path)
        return status == 200 and text in body

    return check


async def until(check, what, *, timeout_s=0.0):
    """Wait until ``check()`` returns something true, and return it.

    It fails after `LIMIT_S`, or after ``timeout_s`` where an idle machine may need longer.
    """
    return await until_asked(check, what, limit_s=max(timeout_s, LIMIT_S))


async def edit(client, namespace, spec, *, name="g", kind=GRAPH_DEPLOYMENT, manager="test"):
    """Merge a part of an object's specification into it."""
    await client.patch(kind, name, {"spec": spec}, namespace=namespace, field_manager=manager)


async def set_status(client, kind, name, namespace, status, *, manager="test"):
    """Merge a part of an object's status into it, as its controller would."""
    where = {"namespace": namespace, "subresource": "status", "field_manager": manager}
    return await client.patch(kind, name, {"status": status}, **where)


async def scale(client, namespace, service, replicas):
    """Write an adapter's number."""
    await edit(client, namespace, {"replicas": replicas}, name=f"g-{service}", kind=SCALING_ADAPTER)


async def set_round(client, namespace, value):
    """Give the workers another environment, which rolls them."""
    await edit(client, namespace, {"env": [{"name": "ROUND", "value": str(value)}]})


async def has_round(client, namespace, value):
    """Return whether the decode workers' template has an environment of `set_round`."""
    try:
        live = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
    except ClusterError:
        return False
    [container] = live["spec"]["template"]["spec"]["containers"]
    return {"name": "ROUND", "value": str(value)} in container["env"]


async def pods_of(client, namespace, service):
    """Return the views of a service's pods."""
    found = await client.list(POD, namespace=namespace, labels={"penstock.dev/service": service})
    return [pod_view(each) for each in found.items]


def is_ready(client, namespace):
    """Return a check of the graph's Ready condition."""

    async def check():
        return (await condition(client, namespace, "Ready")).get("status") == "True"

    return check


def no_graph(client, namespace):
    """Return a check that no graph is left."""

    async def check():
        return not (await client.list(GRAPH_DEPLOYMENT, namespace=namespace)).items

    return check


async def events(client, namespace, reason):
    """Return the Events with a reason."""
    found = (await client.list(EVENT, namespace=namespace)).items
    return [each for each in found if each["reason"] == reason]


@asynccontextmanager
async def at_rest(client, namespace, made=None, *, by=None, **options):
    """Create a graph and run an operator, through the client ``by``; give it once all children are there and settled."""
    await client.create(made or graph(namespace), field_manager="test")
    async with running(by or client, namespace, **options) as operator:
        await until(lambda: all_children(client, namespace), "all children")
        await settled(client, namespace, operator)
        yield operator


async def names(client, kind, namespace):
    """Return the names of a kind's objects."""
    return {each["metadata"]["name"] for each in (await client.list(KINDS[kind], namespace=namespace)).items}


async def all_children(client, namespace, children=CHILDREN):
    """Return whether exactly these children are there, and the ones of the namespace itself."""
    for kind, wanted in children.items():
        found = {each for each in await names(client, kind, namespace) if each.startswith("g-")}
        if found != wanted:
            return False
    return True


async def settled(client, namespace, operator, *, name="g", quiet_s=0.5):
    """Wait until every child is there, the status is current, and nothing is queued for a while."""

    async def check():
        live = await client.get(GRAPH_DEPLOYMENT, name, namespace=namespace)
        status = live.get("status", {})
        return status.get("observedGeneration") == live["metadata"]["generation"]

    await until(check, "a current status")
    quiet = 0.0
    async with asyncio.timeout(30):
        while quiet < quiet_s:
            await asyncio.sleep(0.05)
            quiet = 0.0 if operator.queue.depth or operator.queue.running else quiet + 0.05


async def condition(client, namespace, kind, name="g"):
    """Return one of a graph's conditions, {} without it."""
    live = await client.get(GRAPH_DEPLOYMENT, name, namespace=namespace)
    found = [each for each in live.get("status", {}).get("conditions", []) if each["type"] == kind]
    return found[0] if found else {}
