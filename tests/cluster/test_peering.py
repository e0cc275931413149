"""Two installations of different scopes: each graph has one writer at a time, and none is left without one."""

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
from apiserver import free_port
from operating import graph, page, says, until

from penstock.engine.profiles.performance import graph_performance
from penstock.kube.kinds import DEPLOYMENT, EVENT, GRAPH_DEPLOYMENT, LEASE
from penstock.planner.cluster.service import ClusterService, run_until_stopped
from penstock.planner.ledger import Ledger

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WIDE_LEASE, OWN_LEASE = "penstock-cluster-operator", "penstock-operator"


class Installation:
    """One operator process with an account of its own, by which the audit log tells it from others."""

    def __init__(self, plane, home, name, *, cluster_wide):
        self._home = home
        self._scope = ["--all-namespaces"] if cluster_wide else ["--namespace", home]
        self.user = f"system:serviceaccount:{home}:{name}"
        self.port = 0
        self.process = None
        self._kubeconfig = account(plane, home, name, EVERYTHING, cluster_wide=cluster_wide)

    def start(self):
        """Start the process, again if need be."""
        self.close()
        self.port = free_port()
        command = [sys.executable, "-m", "penstock.cli", "operator", "run", *self._scope]
        command += ["--kubeconfig", str(self._kubeconfig), "--host", "127.0.0.1"]
        command += ["--metrics-port", str(self.port)]
        environment = {**os.environ, "POD_NAME": f"operator-{self._home}", "POD_NAMESPACE": self._home}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def send(self, number):
        """Send a signal."""
        self.process.send_signal(number)

    def page(self, path):
        """Return one of its pages."""
        return page(self.port, path)[1]

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

        def make(home, name="operator", *, cluster_wide):
            made = Installation(crds, home, name, cluster_wide=cluster_wide)
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


async def edited(client, namespace, value):
    """Change a graph so that its operator has something to write."""
    edit = {"spec": {"env": [{"name": "EDIT", "value": value}]}}
    await client.patch(GRAPH_DEPLOYMENT, "g", edit, namespace=namespace, field_manager="test")


async def carries(client, namespace, value):
    """Return whether the edit has arrived at a worker's pods."""
    live = await client.get(DEPLOYMENT, "g-decode", namespace=namespace)
    env = live["spec"]["template"]["spec"]["containers"][0].get("env", [])
    return {"name": "EDIT", "value": value} in env


async def test_a_namespace_of_its_own_is_left_alone_until_its_operator_is_gone(crds, client, homes, install):
    """The cluster-wide one yields as soon as the other stands for election, and takes over three terms after."""
    system, own, other = homes(3)
    mark = crds.audit_mark()
    wide = install(system, cluster_wide=True)
    for each in (own, other):
        await client.create(graph(each), field_manager="test")
        await until(lambda each=each: has_children(client, each), f"{each}'s children", timeout_s=90)
    narrow = install(own, cluster_wide=False)
    await until(wide.says("/readyz", f"cedes {own}"), "the cluster-wide one to yield", timeout_s=60)
    assert "penstock_operator_namespaces_ceded 1.0" in wide.page("/metrics")
    await until(narrow.says("/metrics", "penstock_operator_leader 1.0"), "the other to act", timeout_s=60)
    for value in ("1", "2"):
        for each in (own, other):
            await edited(client, each, value)
            await until(lambda each=each, value=value: carries(client, each, value), f"{each}: {value}")
    written = writers(crds, mark, own, other)
    assert turns(written[own]) == [wide.user, narrow.user]
    assert turns(written[other]) == [wide.user]

    narrow.send(signal.SIGKILL)
    await edited(client, own, "3")
    await until(lambda: carries(client, own, "3"), "the cluster-wide one to take over", timeout_s=90)
    written = writers(crds, mark, own, other)
    assert turns(written[own]) == [wide.user, narrow.user, wide.user]
    assert turns(written[other]) == [wide.user]
    events = (await client.list(EVENT, namespace=system)).items
    assert {each["reason"] for each in events if each["regarding"]["name"] == WIDE_LEASE} == {
        "Standby",
        "LeaderActive",
    }


@pytest.mark.nightly
async def test_of_two_cluster_wide_ones_the_older_works(crds, client, homes, install):
    """The younger says so and takes over when the older is gone; the older takes its work back."""
    first_home, second_home, home = homes(3)
    mark = crds.audit_mark()
    older = install(first_home, cluster_wide=True)
    await client.create(graph(home), field_manager="test")
    await until(lambda: has_children(client, home), "the children", timeout_s=90)
    younger = install(second_home, cluster_wide=True)
    words = f"standby: the installation of Lease {first_home}/{WIDE_LEASE}"
    await until(younger.says("/readyz", words), "the younger to stand by", timeout_s=60)
    assert "penstock_operator_standby 1.0" in younger.page("/metrics")
    await edited(client, home, "1")
    await until(lambda: carries(client, home, "1"), "the edit")
    older.send(signal.SIGTERM)
    assert await asyncio.to_thread(older.process.wait, 30) == 0
    await edited(client, home, "2")
    await until(lambda: carries(client, home, "2"), "the younger to take over", timeout_s=90)
    older.start()
    await until(younger.says("/readyz", words), "the younger to stand by again", timeout_s=60)
    await until(older.says("/metrics", "penstock_operator_leader 1.0"), "the older", timeout_s=60)
    await edited(client, home, "3")
    await until(lambda: carries(client, home, "3"), "the edit")
    assert turns(writers(crds, mark, home)[home]) == [older.user, younger.user, older.user]
    assert (await client.get(LEASE, WIDE_LEASE, namespace=second_home))["spec"]["holderIdentity"]


@pytest.mark.nightly
async def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes(crds, client, homes, install):
    """SIGSTOP in the middle of its work, SIGCONT once another one leads: not one write more."""
    (home,) = homes(1)
    first = install(home, "first", cluster_wide=False)
    await client.create(graph(home), field_manager="test")
    await until(lambda: has_children(client, home), "the children", timeout_s=90)
    second = install(home, "second", cluster_wide=False)
    await until(second.says("/readyz", "standby for"), "the other one to stand by", timeout_s=60)
    await edited(client, home, "1")
    first.send(signal.SIGSTOP)
    await until(second.says("/metrics", "penstock_operator_leader 1.0"), "another leader", timeout_s=60)
    await edited(client, home, "2")
    await until(lambda: carries(client, home, "2"), "its work")
    mark = crds.audit_mark()
    await edited(client, home, "3")
    first.send(signal.SIGCONT)
    await until(lambda: carries(client, home, "3"), "its work")
    await until(first.says("/metrics", "penstock_operator_leader 0.0"), "the first one to notice")
    await edited(client, home, "4")
    await until(lambda: carries(client, home, "4"), "its work")
    assert turns(writers(crds, mark, home)[home]) == [second.user]


async def test_a_process_that_does_not_act_ends_at_once(crds, client, homes, install):
    """SIGTERM while it stands by leaves the Lease alone; while it waits for its turn, gives it back."""
    home, fresh = homes(2)
    first = install(home, "first", cluster_wide=False)
    await until(first.says("/metrics", "penstock_operator_leader 1.0"), "a leader", timeout_s=90)
    second = install(home, "second", cluster_wide=False)
    waiting = install(fresh, cluster_wide=False)
    await until(second.says("/readyz", "standby for"), "the other one to stand by", timeout_s=60)

    async def is_held():
        leases = (await client.list(LEASE, namespace=fresh)).items
        return any(each["spec"].get("holderIdentity") for each in leases)

    await until(is_held, "the third to win its Lease", timeout_s=60)
    assert "penstock_operator_leader 0.0" in await asyncio.to_thread(waiting.page, "/metrics")
    for each in (second, waiting):
        each.send(signal.SIGTERM)
    for each in (second, waiting):
        assert await asyncio.to_thread(each.process.wait, 8) == 0
    assert not await is_held()
    live = await client.get(LEASE, OWN_LEASE, namespace=home)
    assert live["spec"]["holderIdentity"]


async def test_a_namespaces_own_planner_takes_its_graphs_from_a_cluster_wide_one(
    crds, client, homes, tmp_path
):
    """The ledger of the one is free before the other begins its own."""
    (home,) = homes(1)
    await client.create(graph(home), field_manager="test")
    stops = [asyncio.Event(), asyncio.Event()]
    folders = [tmp_path / "wide", tmp_path / "own"]
    services = [
        ClusterService({}, graph_performance, all_namespaces=True, log_dir=folders[0]),
        ClusterService({}, graph_performance, namespace=home, log_dir=folders[1]),
    ]
    ledgers = [each / home / "g" / "ledger.jsonl" for each in folders]

    async def is_there(path):
        return path.exists()

    async with asyncio.TaskGroup() as group:
        group.create_task(run_until_stopped(services[0], client, stops[0]))
        await until(lambda: is_there(ledgers[0]), "the cluster-wide one to plan", timeout_s=60)
        group.create_task(run_until_stopped(services[1], client, stops[1]))
        await until(lambda: is_there(ledgers[1]), "the namespace's own to plan", timeout_s=60)
        ledger = Ledger(ledgers[0])
        ledger.tail(frozenset({"header"}))
        ledger.close()
        for each in stops:
            each.set()
    leases = {each["metadata"]["name"] for each in (await client.list(LEASE, namespace=home)).items}
    assert leases == {"penstock-planner"}
    await client.delete(LEASE, "penstock-cluster-planner", namespace=client.namespace)
