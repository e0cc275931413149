"""Installations of different classes, and replicas of one: each graph has one writer at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import defaultdict

import pytest
from accounts import EVERYTHING, account
from operating import graph, has_round, no_graph, says, set_round, until
from reserved_ports import reserved_port

from penstock.engine.profiles.performance import graph_performance
from penstock.kube.kinds import DEPLOYMENT, GRAPH_DEPLOYMENT, LEASE
from penstock_planner.cluster.service import ClusterService, run_until_stopped

pytestmark = [pytest.mark.cluster]


class Installation:
    """One operator process with an account of its own, by which the audit log tells it from others."""

    def __init__(self, plane, home, name, *, cluster_wide, operator_class):
        self._home = home
        self._scope = ["--all-namespaces"] if cluster_wide else ["--namespace", home]
        self._scope += ["--operator-class", operator_class]
        self.user = f"system:serviceaccount:{home}:{name}"
        self.port = 0
        self.process = None
        self._kubeconfig = account(plane, home, name, EVERYTHING, cluster_wide=cluster_wide)

    def start(self):
        """Start the process, again if need be."""
        self.close()
        self.port = reserved_port()
        command = [sys.executable, "-m", "penstock.cli", "operator", "run", *self._scope]
        command += ["--kubeconfig", str(self._kubeconfig), "--host", "127.0.0.1"]
        command += ["--metrics-port", str(self.port)]
        environment = {**os.environ, "POD_NAME": f"operator-{self._home}", "POD_NAMESPACE": self._home}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def says(self, path, text):
        """Return a check of a page."""
        return says(self.port, path, text)

    def close(self):
        """End the process."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def install(crds):
    """Make installations that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(home, name="operator", *, cluster_wide, operator_class="penstock"):
            made = Installation(crds, home, name, cluster_wide=cluster_wide, operator_class=operator_class)
            stack.callback(made.close)
            made.start()
            return made

        yield make


@pytest.fixture
def homes(crds, make_namespace):
    """Return a function that makes namespaces; Leases in them, which outlive a killed process, go with the test."""
    made = []

    def make(number):
        made.extend(make_namespace("peers") for _ in range(number))
        return made[-number:]

    yield make
    for each in made:
        crds.kubectl("delete", "leases", "--all", "--namespace", each)


async def has_children(client, namespace, name="g"):
    """Return whether a graph's Deployments are there."""
    found = {each["metadata"]["name"] for each in (await client.list(DEPLOYMENT, namespace=namespace)).items}
    return {f"{name}-decode", f"{name}-frontend", f"{name}-prefill"} <= found


def writers(plane, mark, *namespaces):
    """Return who wrote anything but Leases and Events, and when, by namespace and in the order of time."""
    found = defaultdict(list)
    for each in plane.audit_writes(after=mark):
        about = each.get("objectRef") or {}
        user = each["user"]["username"]
        is_ours = user.startswith("system:serviceaccount:peers-")
        if is_ours and about.get("namespace") in namespaces and about.get("resource") != "events":
            found[about["namespace"]].append((each["requestReceivedTimestamp"], user))
    return {key: sorted(value) for key, value in found.items()}


def turns(written):
    """Return the users in the order in which they took over."""
    users = [user for _, user in written]
    return [user for index, user in enumerate(users) if not index or users[index - 1] != user]


async def test_each_class_has_its_own_installation(crds, client, homes, install):
    """Two cluster-wide ones: each works on the graphs of its class alone, also when those are deleted."""
    system, research, home = homes(3)
    mark = crds.audit_mark()
    usual = install(system, cluster_wide=True)
    other = install(research, cluster_wide=True, operator_class="research")
    await client.create(graph(home), field_manager="test")
    await client.create(graph(home, name="r", operatorClass="research"), field_manager="test")
    for name in ("g", "r"):
        await until(lambda name=name: has_children(client, home, name), f"{name}'s children")
    await set_round(client, home, "1")
    await until(lambda: has_round(client, home, "1"), "the edit")
    finalizers = {
        each["metadata"]["name"]: each["metadata"]["finalizers"]
        for each in (await client.list(GRAPH_DEPLOYMENT, namespace=home)).items
    }
    assert finalizers == {"g": ["penstock.dev/drain"], "r": ["penstock.dev/drain-research"]}
    for name in ("g", "r"):
        await client.delete(GRAPH_DEPLOYMENT, name, namespace=home)
    await until(no_graph(client, home), "both graphs to go")
    by_graph = defaultdict(set)
    for each in crds.audit_writes(after=mark):
        about = each.get("objectRef") or {}
        if about.get("namespace") == home and each["user"]["username"] in {usual.user, other.user}:
            by_graph[about.get("name", "-").partition("-")[0]].add(each["user"]["username"])
    assert by_graph["g"] <= {usual.user}
    assert by_graph["r"] <= {other.user}


async def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes(crds, client, homes, install):
    """SIGSTOP in the middle of its work, SIGCONT once another one leads: not one write more."""
    (home,) = homes(1)
    first = install(home, "first", cluster_wide=False)
    await client.create(graph(home), field_manager="test")
    await until(lambda: has_children(client, home), "the children")
    second = install(home, "second", cluster_wide=False)
    await until(second.says("/readyz", "standby for"), "the other one to stand by")
    await set_round(client, home, "1")
    first.process.send_signal(signal.SIGSTOP)
    await until(second.says("/metrics", "penstock_operator_leader 1.0"), "another leader")
    await set_round(client, home, "2")
    await until(lambda: has_round(client, home, "2"), "its work")
    mark = crds.audit_mark()
    await set_round(client, home, "3")
    first.process.send_signal(signal.SIGCONT)
    await until(lambda: has_round(client, home, "3"), "its work")
    await until(first.says("/metrics", "penstock_operator_leader 0.0"), "the first one to notice")
    await set_round(client, home, "4")
    await until(lambda: has_round(client, home, "4"), "its work")
    assert turns(writers(crds, mark, home)[home]) == [second.user]


async def test_each_class_has_its_own_planner(crds, client, homes, tmp_path):
    """Each plans the graphs of its class alone."""
    (home,) = homes(1)
    await client.create(graph(home), field_manager="test")
    await client.create(graph(home, name="r", operatorClass="research"), field_manager="test")
    stops = [asyncio.Event(), asyncio.Event()]
    folders = [tmp_path / "usual", tmp_path / "research"]
    services = [
        ClusterService({}, graph_performance, namespace=home, log_dir=folders[0]),
        ClusterService({}, graph_performance, namespace=home, operator_class="research", log_dir=folders[1]),
    ]

    async def is_planned():
        return {each.parent.name for folder in folders for each in folder.rglob("ledger.jsonl")} == {"g", "r"}

    async with asyncio.TaskGroup() as group:
        for service, stop in zip(services, stops, strict=True):
            group.create_task(run_until_stopped(service, client, stop))
        await until(is_planned, "both graphs to be planned")
        for each in stops:
            each.set()
    assert [[each.parent.name for each in folder.rglob("ledger.jsonl")] for folder in folders] == [
        ["g"],
        ["r"],
    ]
    leases = {each["metadata"]["name"] for each in (await client.list(LEASE, namespace=home)).items}
    assert leases == {"penstock-planner", "penstock-planner.research"}
