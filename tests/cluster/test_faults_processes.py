"""Operator and planner as processes that are killed, frozen and cut off from the API server."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import subprocess
import sys

import pytest
from operating import (
    CHILDREN,
    BudgetWatch,
    Loads,
    all_children,
    condition,
    graph,
    has_round,
    operate,
    process,
    running,
    says,
    scale,
    set_round,
    settled,
    until,
)

from penstock.core.errors import ClusterError, NotFoundError
from penstock.kube.kinds import GRAPH_DEPLOYMENT, POD

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
]

NAMESPACE = "default"
KILLS = 20


async def try_to_scale(client, namespace, service, replicas):
    """Write an adapter's number, once there is one."""
    with contextlib.suppress(NotFoundError):
        await scale(client, namespace, service, replicas)


async def test_twenty_kills_change_nothing_but_the_time(crds, kwok, make_node, client, namespace):
    """While a graph is made, edited, scaled, deleted and made again; the budget holds at every event."""
    make_node(gpus=16)
    rng = random.Random(5)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["penstock_operator.service", "penstock_operator.handlers"])
    await client.create(graph(namespace), field_manager="test")
    async with BudgetWatch(client, namespace).on() as budget:
        for number in range(KILLS):
            operator = server.Process(target=operate, args=(str(crds.kubeconfig), namespace), daemon=True)
            operator.start()
            await try_to_scale(client, namespace, "decode", rng.randint(1, 3))
            await asyncio.sleep(rng.uniform(0.2, 2.5))
            await try_to_scale(client, namespace, "prefill", rng.randint(1, 3))
            if number == KILLS // 2:
                await client.delete(GRAPH_DEPLOYMENT, "g", namespace=namespace)
            elif number % 3 == 0:
                with contextlib.suppress(NotFoundError):
                    await set_round(client, namespace, number)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            assert operator.exitcode is None
            operator.kill()
            await asyncio.to_thread(operator.join)
        async with running(client, namespace, loads=Loads()) as last:

            async def gone():
                graphs = await client.list(GRAPH_DEPLOYMENT, namespace=namespace)
                return not any("deletionTimestamp" in each["metadata"] for each in graphs.items)

            await until(gone, "the deleted graph to go")
            await client.apply(graph(namespace), field_manager="test")
            await until(lambda: all_children(client, namespace), "all children")
            await set_round(client, namespace, KILLS)
            await scale(client, namespace, "prefill", 1)
            await scale(client, namespace, "decode", 3)

            async def right():
                live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
                services = live["status"].get("services", {})
                ready = {name: services.get(name, {}).get("ready") for name in ("prefill", "decode")}
                pods = (await client.list(POD, namespace=namespace)).items
                return ready == {"prefill": 1, "decode": 3} and len(pods) == 5

            await until(right, "one prefill and three decode workers")
            assert await has_round(client, namespace, KILLS)
            await settled(client, namespace, last, quiet_s=1)
            live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
            assert live["status"]["phase"] == "Ready"
    assert budget.most == 4
    assert budget.seen > 20


@contextlib.contextmanager
def planner(kubeconfig, folder):
    """Run `penstock planner run` for all graphs of the namespace."""
    command = [sys.executable, "-m", "penstock.cli", "planner", "run", "--environment", "kubernetes"]
    command += ["--namespace", NAMESPACE, "--log-dir", str(folder), "--metrics-port", "0"]
    running_one = subprocess.Popen(command, env={**os.environ, "KUBECONFIG": str(kubeconfig)})
    try:
        yield running_one
    finally:
        running_one.kill()
        running_one.wait()


@pytest.mark.nightly
async def test_both_processes_survive_twenty_seconds_without_an_api_server(own, tmp_path):
    """Killed and started again on the same etcd: leaders lead again, what was changed is brought about and said."""
    plane, client = own
    await client.create(graph(NAMESPACE), field_manager="test")

    async def current():
        with contextlib.suppress(ClusterError):
            live = await client.get(GRAPH_DEPLOYMENT, "g", namespace=NAMESPACE)
            generation = live["metadata"]["generation"]
            said = {each["type"]: each.get("observedGeneration") for each in live["status"]["conditions"]}
            return said.get("Ready") == said.get("PlannerActive") == generation
        return False

    config = plane.kubeconfig
    with process(config, NAMESPACE) as (operator, port), planner(config, tmp_path) as planning:
        await until(lambda: all_children(client, NAMESPACE), "all children")
        await until(current, "both statuses")
        plane.kill("kube-apiserver")
        await asyncio.sleep(20.0)
        assert (operator.poll(), planning.poll()) == (None, None)
        await asyncio.to_thread(plane.start_api_server)
        await set_round(client, NAMESPACE, 1)
        await until(lambda: has_round(client, NAMESPACE, 1), "the change")
        await until(current, "both statuses again")
        await until(says(port, "/readyz"), "readiness")
        assert await all_children(client, NAMESPACE, CHILDREN)
        assert (await condition(client, NAMESPACE, "Ready"))["reason"] == "NoReadyWorker"
