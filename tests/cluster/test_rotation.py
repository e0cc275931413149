"""Tokens of ServiceAccounts end: operator, planner and every watch continue with the next one, and say meanwhile what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys

import pytest
from accounts import EVERYTHING, PLANNER, account, operators_rules
from apiserver import write_certificates
from operating import all_children, edit, graph, page, process, says, until

from penstock.core.errors import NotFoundError
from penstock.kube import informer as informer_module
from penstock.kube.client import KubeClient
from penstock.kube.informer import Informer
from penstock.kube.kinds import CONFIG_MAP, GRAPH_DEPLOYMENT, LEASE
from penstock.kube.objects.names import DRAIN_FINALIZER

pytestmark = [pytest.mark.cluster]

LEASES = {
    "apiGroups": ["coordination.k8s.io"],
    "resources": ["leases"],
    "verbs": ["create", "get", "update", "patch"],
}


class Token:
    """A ServiceAccount's token in a file that a kubeconfig names, as the kubelet mounts it."""

    def __init__(self, plane, namespace, name):
        self._plane, self._namespace, self._name = plane, namespace, name
        self._valid, self._made = [], 0
        self.kubeconfig = plane.kubeconfig_for(
            f"{namespace}-{name}-rotating", self._new(), namespace=namespace, file=True
        )

    def _new(self):
        self._made += 1
        bound = f"{self._name}-{self._made}"
        self._valid.append(bound)
        self._plane.kubectl("create", "secret", "generic", bound, "--namespace", self._namespace)
        options = ("--bound-object-kind", "Secret", "--bound-object-name", bound)
        return self._plane.kubectl(
            "create", "token", self._name, "--namespace", self._namespace, *options
        ).strip()

    def renew(self):
        """Write the next one in its place."""
        self.kubeconfig.with_suffix(".token").write_text(self._new())

    def revoke(self):
        """Let the API server refuse the oldest that it takes: what it is bound to is deleted."""
        self._plane.kubectl("delete", "secret", self._valid.pop(0), "--namespace", self._namespace)


def unready(port, running, text):
    """Return a check that a process is not ready for this reason; it fails if the process ends."""

    async def check():
        assert running.poll() is None
        status, body = await asyncio.to_thread(page, port, "/readyz")
        return status == 503 and text in body

    return check


def refused(plane, mark, path):
    """Return a check that the API server has refused a call for lack of credentials."""

    async def check():
        return any(
            each.get("responseStatus", {}).get("code") == 401 and path in each["requestURI"]
            for each in plane.audit_events(after=mark)
        )

    return check


def carried_out(client, namespace, name="g"):
    """Return a check that the newest specification of a graph is carried out."""

    async def check():
        live = await client.get(GRAPH_DEPLOYMENT, name, namespace=namespace)
        return live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]

    return check


async def test_an_operator_takes_the_next_token_when_the_last_is_refused(crds, client, namespace):
    """The usual way: the kubelet has written the next one long before. Kopf logs in again for the finalizer of a new graph."""
    account(crds, namespace, "operator", [*operators_rules(), LEASES])
    token = Token(crds, namespace, "operator")
    await client.create(graph(namespace), field_manager="test")
    with process(token.kubeconfig, namespace) as (running, port):
        await until(lambda: all_children(client, namespace), "all children")
        mark = crds.audit_mark()
        token.renew()
        token.revoke()
        await until(refused(crds, mark, "/leases/"), "the old token is refused")
        await until(says(port, "/metrics", "penstock_operator_leader 1.0"), "it leads on")
        await client.create(graph(namespace, "second"), field_manager="test")
        await until(carried_out(client, namespace, "second"), "a new graph")
        made = await client.get(GRAPH_DEPLOYMENT, "second", namespace=namespace)
        assert made["metadata"]["finalizers"] == [DRAIN_FINALIZER]
        assert running.poll() is None


@pytest.mark.nightly
async def test_an_operator_without_a_valid_token_says_so_and_goes_on_once_it_has_one(crds, client, namespace):
    """It gives its Lease up, names the remedy in /readyz, and carries out the edit that came meanwhile."""
    account(crds, namespace, "operator", [*operators_rules(), LEASES])
    token = Token(crds, namespace, "operator")
    await client.create(graph(namespace), field_manager="test")
    with process(token.kubeconfig, namespace) as (running, port):
        await until(lambda: all_children(client, namespace), "all children")
        token.revoke()
        await until(unready(port, running, "token"), "it says why it is not ready")
        await edit(client, namespace, {"router": {"policy": "round-robin"}})
        token.renew()
        await until(carried_out(client, namespace), "the edit")
        await until(says(port, "/readyz"), "readiness")
        assert running.poll() is None


async def test_an_operator_goes_on_with_a_new_certificate_authority(own):
    """The API server comes back with another: the client reads it again, and so does kopf, for the finalizer of a new graph."""
    plane, client = own
    await client.create(graph("default"), field_manager="test")
    with process(plane.kubeconfig, "default") as (running, _):
        await until(lambda: all_children(client, "default"), "all children")
        write_certificates(plane.folder)
        plane.restart_api_server()
        plane.apply(graph("default", "second"))
        await until(carried_out(client, "default", "second"), "a new graph")
        assert running.poll() is None


@contextlib.contextmanager
def planner(kubeconfig, namespace, folder):
    """Run `penstock planner run`; give the process."""
    command = [sys.executable, "-m", "penstock.cli", "planner", "run", "--environment", "kubernetes"]
    command += ["--namespace", namespace, "--log-dir", str(folder), "--metrics-port", "0"]
    running = subprocess.Popen(
        command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stderr=subprocess.DEVNULL
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.mark.nightly
async def test_a_planner_goes_on_once_it_has_a_valid_token(crds, client, namespace, tmp_path):
    """It holds its Lease again with the next token, in the same process."""
    account(crds, namespace, "planner", PLANNER)
    token = Token(crds, namespace, "planner")

    async def renewed_after(past):
        with contextlib.suppress(NotFoundError):
            lease = await client.get(LEASE, "penstock-planner", namespace=namespace)
            return lease["spec"].get("renewTime", "") > past

    with planner(token.kubeconfig, namespace, tmp_path) as running:
        await until(lambda: renewed_after(""), "a leader")
        mark = crds.audit_mark()
        token.revoke()
        await until(refused(crds, mark, "/leases/"), "the token is refused")
        lease = await client.get(LEASE, "penstock-planner", namespace=namespace)
        token.renew()
        await until(lambda: renewed_after(lease["spec"]["renewTime"]), "a leader again")
        assert running.poll() is None


async def test_a_watch_goes_on_with_the_next_token(crds, client, namespace, monkeypatch):
    """As the router's view of its workers: its copy stays while the token is refused, names the reason, and is fresh after."""
    monkeypatch.setattr(informer_module, "STREAM_S", (5, 6))
    account(crds, namespace, "router", EVERYTHING)
    token = Token(crds, namespace, "router")
    watching = await KubeClient.connect(kubeconfig=token.kubeconfig, rng=random.Random(3))
    view = Informer(watching, CONFIG_MAP, namespace=namespace, labels="of=test")
    task = asyncio.create_task(view.run())

    async def make(name):
        labelled = {"name": name, "namespace": namespace, "labels": {"of": "test"}}
        await client.create(CONFIG_MAP.of(labelled, data={}), field_manager="test")

    async def has_problem():
        return view.problem

    async def is_fresh():
        return view.problem is None and set(view.objects) == {(namespace, "one"), (namespace, "two")}

    try:
        await make("one")
        await until(view.synced.wait, "the first list")
        token.revoke()
        problem = await until(has_problem, "the watch is refused")
        assert "token" in problem
        assert set(view.objects) == {(namespace, "one")}
        await make("two")
        token.renew()
        await until(is_fresh, "the view is fresh")
    finally:
        task.cancel()
        await asyncio.wait([task])
        await watching.close()
