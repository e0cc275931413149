"""The command itself: two processes, one leader, a Lease given back, rights exactly as the table says."""

from __future__ import annotations

import asyncio
import signal

import pytest
from accounts import account, let_watch_nodes, operators_rules
from operating import CHILDREN, all_children, graph, no_graph, page, process, says, set_round, until

from penstock.kube.kinds import GRAPH_DEPLOYMENT, LEASE

pytestmark = [pytest.mark.cluster]


async def test_one_of_two_processes_acts_and_gives_its_lease_back(crds, client, namespace):
    """SIGTERM ends the leader with 0; the other one takes over well before the Lease would have run out."""
    await client.create(graph(namespace), field_manager="test")
    with process(crds.kubeconfig, namespace) as (first, first_port):
        await until(says(first_port, "/metrics", "penstock_operator_leader 1.0"), "a leader")
        await until(lambda: all_children(client, namespace), "all children")
        await until(says(first_port, "/readyz"), "readiness")
        with process(crds.kubeconfig, namespace) as (second, second_port):
            await until(says(second_port, "/readyz"), "the second to stand by")
            assert "penstock_operator_leader 0.0" in page(second_port, "/metrics")[1]
            first.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(first.wait, 30) == 0
            lease = await client.get(LEASE, "penstock-operator", namespace=namespace)
            assert lease["spec"].get("holderIdentity", "") != f"operator-{first_port}"
            await until(says(second_port, "/metrics", "penstock_operator_leader 1.0"), "the other one")
            await client.delete(GRAPH_DEPLOYMENT, "g", namespace=namespace)
            await until(no_graph(client, namespace), "the graph to go")
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait, 30) == 0


async def test_the_table_of_rights_is_enough(crds, client, namespace):
    """Run as a ServiceAccount that may do what the table says and not a thing more."""
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    own = {**leases, "verbs": ["get", "update", "patch"], "resourceNames": ["penstock-operator"]}
    planners = {**leases, "verbs": ["get"], "resourceNames": ["penstock-planner"]}
    rules = [*operators_rules(), {**leases, "verbs": ["create"]}, own, planners]
    kubeconfig = account(crds, namespace, "operator", rules)
    let_watch_nodes(crds, namespace, "operator")
    mark = crds.audit_mark()
    await client.create(graph(namespace), field_manager="test")
    with process(kubeconfig, namespace) as (running, port):
        await until(says(port, "/readyz"), "readiness")
        await until(lambda: all_children(client, namespace), "all children")
        await set_round(client, namespace, 1)
        await asyncio.sleep(2)
        await client.delete(GRAPH_DEPLOYMENT, "g", namespace=namespace)
        await until(no_graph(client, namespace), "the graph to go")
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
