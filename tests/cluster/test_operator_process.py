"""The command itself: two processes, one leader, a Lease given back, rights exactly as the table says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from apiserver import free_port
from operating import CHILDREN, all_children, graph, until

from penstock_core.errors import NotFoundError
from penstock_kube.kinds import GRAPH_DEPLOYMENT, LEASE
from penstock_operator.rbac import RULES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@contextlib.contextmanager
def process(kubeconfig, namespace, *options):
    """Run `penstock operator run`; give the process and its metrics port."""
    port = free_port()
    command = [sys.executable, "-m", "penstock_cli", "operator", "run", "--namespace", namespace]
    command += ["--kubeconfig", str(kubeconfig), "--host", "127.0.0.1", "--metrics-port", str(port), *options]
    environment = {**os.environ, "POD_NAME": f"operator-{port}"}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield running, port
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


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


async def test_one_of_two_processes_acts_and_gives_its_lease_back(crds, client, namespace):
    """SIGTERM ends the leader with 0; the other one takes over well before the Lease would have run out."""
    await client.create(graph(namespace), field_manager="test")
    with process(crds.kubeconfig, namespace) as (first, first_port):
        await until(says(first_port, "/metrics", "penstock_operator_leader 1.0"), "a leader", timeout_s=90)
        await until(lambda: all_children(client, namespace), "all children", timeout_s=60)
        await until(says(first_port, "/readyz"), "readiness")
        with process(crds.kubeconfig, namespace) as (second, second_port):
            await until(says(second_port, "/readyz"), "the second to stand by", timeout_s=90)
            assert "penstock_operator_leader 0.0" in page(second_port, "/metrics")[1]
            first.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(first.wait, 30) == 0
            lease = await client.get(LEASE, "penstock-operator", namespace=namespace)
            assert lease["spec"].get("holderIdentity", "") != f"operator-{first_port}"
            await until(
                says(second_port, "/metrics", "penstock_operator_leader 1.0"), "the other one", timeout_s=30
            )
            await client.delete(GRAPH_DEPLOYMENT, "g", namespace=namespace)

            async def gone():
                with contextlib.suppress(NotFoundError):
                    await client.get(GRAPH_DEPLOYMENT, "g", namespace=namespace)
                    return False
                return True

            await until(gone, "the graph to go", timeout_s=60)
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait, 30) == 0


async def test_the_table_of_rights_is_enough(crds, client, namespace):
    """Run as a ServiceAccount that may do what the table says and not a thing more."""
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": sorted(verbs)}
        for (group, resource), verbs in RULES.items()
    ]
    rules.append({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]})
    named = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "update", "patch"],
    }
    rules.append({**named, "resourceNames": ["penstock-operator"]})
    metadata = {"name": "operator", "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    objects = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "operator"},
            "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": namespace}],
        },
    ]
    crds.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    kubeconfig = crds.service_account_kubeconfig(namespace, "operator")
    mark = crds.audit_mark()
    await client.create(graph(namespace), field_manager="test")
    with process(kubeconfig, namespace) as (running, port):
        await until(says(port, "/readyz"), "readiness", timeout_s=90)
        await until(lambda: all_children(client, namespace), "all children", timeout_s=60)
        edit = {"spec": {"env": [{"name": "NEW", "value": "1"}]}}
        await client.patch(GRAPH_DEPLOYMENT, "g", edit, namespace=namespace, field_manager="test")
        await asyncio.sleep(2)
        await client.delete(GRAPH_DEPLOYMENT, "g", namespace=namespace)

        async def gone():
            return not (await client.list(GRAPH_DEPLOYMENT, namespace=namespace)).items

        await until(gone, "the graph to go", timeout_s=60)
        assert await all_children(client, namespace, {kind: set() for kind in CHILDREN})
        running.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.wait, 30) == 0
    user = f"system:serviceaccount:{namespace}:operator"
    refused = [
        (each["verb"], each["requestURI"])
        for each in crds.audit_events(after=mark, user=user)
        if each.get("responseStatus", {}).get("code") in {401, 403}
    ]
    assert refused == []
