"""The condition of a planner that is gone, on a real API server: two writers of one condition, and a Lease."""

from __future__ import annotations

import pytest
from operating import graph

from penstock.kube.kinds import GRAPH_DEPLOYMENT, LEASE
from penstock.kube.objects.names import PLANNER
from penstock_operator.silence import SILENT_S, PlannerLeaseMonitor

pytestmark = [pytest.mark.cluster]


async def test_operator_and_planner_write_the_condition_in_turn(crds, client, namespace):
    """The planner's other words stay; the next planner has the last one, and the time of the change."""
    del crds
    at_s = 0.0
    made = await client.create(graph(namespace), field_manager="test")
    silence = PlannerLeaseMonitor(
        client, (namespace, PLANNER), namespace=namespace, operator_class="penstock", now_s=lambda: at_s
    )
    condition = {
        "type": "PlannerActive",
        "status": "True",
        "reason": "Observing",
        "message": "decides every 2 s",
        "observedGeneration": 1,
        "lastTransitionTime": "2027-01-15T08:00:00Z",
    }

    async def planner_says():
        head = {key: made[key] for key in ("apiVersion", "kind")}
        name = {"name": made["metadata"]["name"], "namespace": namespace}
        status = {"planner": {"gpus": 2}, "conditions": [condition]}
        await client.apply(
            {**head, "metadata": name, "status": status}, field_manager=PLANNER, subresource="status"
        )

    async def said():
        status = (await client.get(GRAPH_DEPLOYMENT, made["metadata"]["name"], namespace=namespace))["status"]
        (found,) = status["conditions"]
        return found["status"], found["reason"], status["planner"]

    lease = {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": {"name": PLANNER, "namespace": namespace},
        "spec": {"holderIdentity": "planner-1", "renewTime": "2027-01-15T08:00:00.000000Z"},
    }
    await client.create(lease, field_manager="test")
    await planner_says()
    await silence.check()
    at_s += SILENT_S
    await silence.check()
    assert await said() == ("Unknown", "PlannerSilent", {"gpus": 2})
    await planner_says()
    assert await said() == ("True", "Observing", {"gpus": 2})
