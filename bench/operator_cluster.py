"""Measures the operator with many graphs on a real API server.

    python bench/operator_cluster.py [--graphs 1000] [--pods 20] [--changes 100] [--rest 30] [--limit 1200] [--json]

Starts etcd and kube-apiserver from KUBEBUILDER_ASSETS and one operator process, cluster-wide. Reported: seconds
until every graph has all its children and a status; seconds from a graph's change to its changed Deployment,
one graph at a time; the process's memory; its processor time and its writes while nothing changes; then, of a second
process that follows the killed one, the seconds from its start until a change is carried out, and its writes alongside that
one. With --pods the controllers, the scheduler and kwok run too, each graph has this many pods, and a graph is done when it
is Ready. Named otherwise than the command, because a file `operator.py` would shadow the standard library's module.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / each) for each in ("cluster", "support")]

from apiserver import ControlPlane, missing_assets  # noqa: E402
from options import read_options  # noqa: E402
from reserved_ports import reserved_port  # noqa: E402

from penstock.core.http.loop import run  # noqa: E402
from penstock.kube.client import KubeClient  # noqa: E402
from penstock.kube.informer import Informer  # noqa: E402
from penstock.kube.kinds import DEPLOYMENT, GRAPH_DEPLOYMENT, POD, SCALING_ADAPTER  # noqa: E402

PER_NAMESPACE = 100
PER_NODE = 250
CHANGE_LIMIT_S = 30.0
GOALS = {"first_s": 120.0, "change_p99_s": 1.0, "rss_mb": 400.0, "cpu_fraction": 0.05, "writes": 0}
_TICKS = os.sysconf("SC_CLK_TCK")


def graph(namespace: str, name: str, pods: int) -> dict[str, Any]:
    """Return a disaggregated graph with a budget of at least two GPUs more than it uses: it may be changed twice."""
    prefill = pods // 2
    decode = max(1, pods - prefill - 1)
    bounds = {"minReplicas": 1, "maxReplicas": max(8, pods)}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": "meta-llama/Llama-3.1-8B-Instruct"},
            "runtime": "simulated",
            "services": {
                "frontend": {"role": "router", "replicas": 1},
                "prefill": {"role": "prefill", "replicas": max(1, prefill), "scaling": bounds},
                "decode": {"role": "decode", "replicas": decode, "scaling": bounds},
            },
            "planner": {"maxGpuBudget": max(8, pods + 1)},
        },
    }


@contextmanager
def operator(plane: ControlPlane) -> Iterator[int]:
    """Run the operator; give its process id."""
    command = [sys.executable, "-m", "penstock.cli", "--log-level", "warning", "operator", "run"]
    command += ["--all-namespaces", "--kubeconfig", str(plane.kubeconfig), "--no-leader-election"]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--metrics-port", str(reserved_port())])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(30)


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mb(pid: int, what: str = "VmRSS") -> float:
    """Return a process's resident memory, MB; ``VmHWM`` is its peak."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(each.split()[1]) / 1000 for each in lines if each.startswith(what))


def create_nodes(plane: ControlPlane, pods: int) -> None:
    """Create nodes for this many pods, which kwok keeps ready."""
    amounts = {"cpu": "512", "memory": "2Ti", "pods": str(PER_NODE), "nvidia.com/gpu": str(PER_NODE)}
    status = {"capacity": amounts, "allocatable": amounts}
    for number in range(pods // (PER_NODE // 2) + 1):
        head = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{number}"}}
        plane.kubectl("create", "-f", "-", stdin=json.dumps({**head, "status": status}))


async def create_graphs(
    plane: ControlPlane, client: KubeClient, number: int, pods: int
) -> list[tuple[str, str]]:
    """Create the graphs; return their namespaces and names."""
    spaces = [f"bench-{index}" for index in range((number + PER_NAMESPACE - 1) // PER_NAMESPACE)]
    for name in spaces:
        plane.kubectl("create", "namespace", name)
    keys = [(spaces[index // PER_NAMESPACE], f"g{index}") for index in range(number)]
    slots = asyncio.Semaphore(16)

    async def create(key: tuple[str, str]) -> None:
        async with slots:
            await client.create(graph(*key, pods), field_manager="bench")

    await asyncio.gather(*map(create, keys))
    return keys


async def all_reconciled(client: KubeClient, number: int, timeout_s: float, *, have_pods: bool) -> None:
    """Wait until every graph has a status, which is written after its children; with pods, until it is Ready.

    By a watch, because listing a thousand graphs repeatedly would take the server's time from the operator.
    """
    done: set[str] = set()
    all_done = asyncio.Event()

    def changed(_what: str, obj: dict[str, Any]) -> None:
        status = obj.get("status", {})
        if status.get("phase") == "Ready" if have_pods else "observedGeneration" in status:
            done.add(obj["metadata"]["uid"])
            if len(done) == number:
                all_done.set()

    informer = Informer(client, GRAPH_DEPLOYMENT, namespace=None, on_change=changed)
    task = asyncio.create_task(informer.run())
    async with asyncio.timeout(timeout_s):
        await all_done.wait()
    task.cancel()
    found = await client.list(DEPLOYMENT, namespace=None)
    assert len(found.items) == 3 * number, f"{len(found.items)} Deployments for {number} graphs"


async def change_latencies(
    client: KubeClient, keys: list[tuple[str, str]], changes: int, *, have_pods: bool, limit_s: float
) -> list[float]:
    """Change one graph after the other; return the seconds until its Deployment follows, at most ``limit_s``, sorted.

    Changed is its environment, or, where that would roll pods, decode's replicas: one more, as a planner asks.
    """
    waiting: dict[tuple[str, str], tuple[str, asyncio.Future[float]]] = {}

    def changed(_what: str, obj: dict[str, Any]) -> None:
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        value, future = waiting.get(key, ("", None))
        env = obj["spec"]["template"]["spec"]["containers"][0].get("env", [])
        is_new = (
            str(obj["spec"]["replicas"]) == value if have_pods else {"name": "CHANGE", "value": value} in env
        )
        if future is not None and not future.done() and is_new:
            future.set_result(time.monotonic())

    informer = Informer(client, DEPLOYMENT, namespace=None, on_change=changed)
    task = asyncio.create_task(informer.run())
    await informer.synced.wait()
    took = []
    for number, (namespace, name) in enumerate(random.Random(7).sample(keys, k=min(changes, len(keys)))):
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        value, target, child = f"{number}-{time.monotonic_ns()}", name, f"{name}-decode"
        kind, patch = GRAPH_DEPLOYMENT, {"spec": {"env": [{"name": "CHANGE", "value": value}]}}
        if have_pods:
            kind, replicas = SCALING_ADAPTER, informer.objects[namespace, child]["spec"]["replicas"] + 1
            patch, value, target = {"spec": {"replicas": replicas}}, str(replicas), child
        waiting[namespace, child] = (value, future)
        started_s = time.monotonic()
        await client.patch(kind, target, patch, namespace=namespace, field_manager="bench")
        async with asyncio.timeout(limit_s):
            took.append(await future - started_s)
    task.cancel()
    return sorted(took)


class Figures(dict[str, float]):
    """Figures by name; each is also a line on standard error when it is measured."""

    def __setitem__(self, name: str, value: float) -> None:
        """Keep a figure and tell it."""
        super().__setitem__(name, value)
        print(f"{name} {value:.3f}", file=sys.stderr, flush=True)


async def measure(plane: ControlPlane, arguments: argparse.Namespace, figures: Figures) -> None:
    """Add the figures as they are measured.

    Raises:
        TimeoutError: The operator did not do something within its time.
    """
    client = await KubeClient.connect(kubeconfig=plane.kubeconfig)
    plane.install_crds()
    have_pods = arguments.pods > 0
    if have_pods:
        plane.start_controllers()
        plane.start_kwok()
        create_nodes(plane, arguments.graphs * arguments.pods)
    keys = await create_graphs(plane, client, arguments.graphs, arguments.pods)
    figures["graphs"], started_s = arguments.graphs, time.monotonic()
    with operator(plane) as pid:
        await all_reconciled(client, arguments.graphs, timeout_s=arguments.limit, have_pods=have_pods)
        figures["first_s"] = time.monotonic() - started_s
        if have_pods:
            figures["pods"] = len((await client.list(POD, namespace=None)).items)
        figures["first_cpu_s"] = cpu_s(pid)
        took = await change_latencies(
            client, keys, arguments.changes, have_pods=have_pods, limit_s=CHANGE_LIMIT_S
        )
        figures["change_p50_s"] = took[len(took) // 2]
        figures["change_p99_s"] = took[min(len(took) - 1, int(len(took) * 0.99))]
        await asyncio.sleep(15)  # what the changes set off has ended
        mark, before_s = plane.audit_mark(), cpu_s(pid)
        await asyncio.sleep(arguments.rest)
        figures["cpu_fraction"] = (cpu_s(pid) - before_s) / arguments.rest
        figures["writes"] = own_writes(plane, mark)
        figures["rss_mb"] = memory_mb(pid)
        figures["peak_mb"] = memory_mb(pid, "VmHWM")
    await restart(plane, client, keys, arguments, figures)
    await client.close()


def own_writes(plane: ControlPlane, mark: int) -> int:
    """Return the operator's writes since a mark; kwok, the controllers and this bench write too."""
    found = plane.audit_writes(after=mark)
    return sum(
        "penstock" in str(each.get("userAgent", "")) and "fieldManager=bench" not in each["requestURI"]
        for each in found
    )


async def restart(
    plane: ControlPlane,
    client: KubeClient,
    keys: list[tuple[str, str]],
    arguments: argparse.Namespace,
    figures: Figures,
) -> None:
    """Add what a second process costs that finds everything as it should be, except for one change."""
    mark, started_s = plane.audit_mark(), time.monotonic()
    with operator(plane) as pid:
        # It lists everything first.
        await change_latencies(client, keys, 1, have_pods=arguments.pods > 0, limit_s=arguments.limit)
        took_s = time.monotonic() - started_s
        figures["restart_s"], figures["restart_cpu_s"] = took_s, cpu_s(pid)
        await asyncio.sleep(max(0.0, arguments.rest - took_s))
        # Of the change: the Deployment or its three, status of graph and adapter, and a rollout's steps.
        figures["restart_writes"] = own_writes(plane, mark)
        figures["restart_peak_mb"] = memory_mb(pid, "VmHWM")


def main() -> int:
    """Measure and print; return 1 where the operator did not do something within its time."""
    arguments = read_options(__doc__, graphs=1000, pods=0, changes=100, rest=30.0, limit=1200.0)
    reason = missing_assets()
    if reason is not None:
        sys.exit(reason)
    figures, problem = Figures(), None
    with ControlPlane() as plane:
        try:
            run(lambda _: measure(plane, arguments, figures))
        except TimeoutError as exc:
            problem = exc
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            goal = GOALS.get(name)
            verdict = "" if goal is None else f"   goal {goal:g}: {'met' if value <= goal else 'missed'}"
            print(f"{name:14} {value:10.3f}{verdict}")
    if problem is not None:
        print(
            "the operator took too long for what follows these figures; --limit gives it longer",
            file=sys.stderr,
        )
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
