"""What the reconciler says of a graph: conditions, Events and series."""

from __future__ import annotations

import time

import pytest
from graph_harness import KEY, Loads, conditions, edit, graph, operator, pod, router, serving, to_rest, told

from penstock.core.stamps import stamp
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock.kube.objects.names import APPLIED_ANNOTATION
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.plan.drain import PodLoad


async def test_an_invalid_graph_says_every_problem_and_keeps_its_children(api):
    """Should the API server's rules be older than the models'."""
    async with operator(api) as made:
        await to_rest(api, made)
        children = {each for each in api.objects if each[0] != "Event"}
        api.at("GraphDeployment", "g")["spec"]["services"]["decode"]["replicas"] = 9
        edit(api, "GraphDeployment", "g", router={"policy": "fastest"})
        await to_rest(api, made)
    degraded = conditions(api)["Degraded"]
    assert degraded["reason"] == "InvalidSpec"
    assert api.at("GraphDeployment", "g")["status"]["phase"] == "Failed"
    for path in ("spec.services.decode.replicas", "spec.router.policy"):
        assert path in degraded["message"]
    assert children <= set(api.objects)


async def test_an_invalid_edit_of_a_graph_that_serves_leaves_it_ready(api):
    """Its pods are counted as they are, GPUs within the budget and all; only Degraded says what is wrong."""
    async with operator(api) as made:
        await to_rest(api, made)
        for each in ("prefill", "decode"):
            await serving(api, f"{each}-1", each)
        await api.create(router(), field_manager="kubelet")
        edit(api, "GraphDeployment", "g", router={"policy": "fastest"})
        await to_rest(api, made)
    rows = conditions(api)
    assert (rows["Ready"]["status"], rows["Ready"]["reason"]) == ("True", "Serving")
    assert rows["Degraded"]["reason"] == "InvalidSpec"
    assert rows["BudgetRespected"]["message"] == "2 GPUs are in use of 2"
    services = api.at("GraphDeployment", "g")["status"]["services"]
    assert {name: each["gpus"] for name, each in services.items()} == {
        "decode": 1,
        "frontend": 0,
        "prefill": 1,
    }


async def test_a_graph_that_is_no_longer_ready_gets_an_event(api):
    """One warning at the transition; a graph that starts gets none."""

    def warned():
        events = [each for key, each in api.objects.items() if key[0] == "Event"]
        return [each["message"] for each in events if each["reason"] == "NoReadyRouter"]

    async with operator(api) as made:
        await to_rest(api, made)
        for each in ("prefill", "decode"):
            await serving(api, f"{each}-1", each)
        await api.create(router(), field_manager="kubelet")
        await to_rest(api, made)
        assert conditions(api)["Ready"]["status"] == "True"
        assert warned() == []
        gone = router()
        gone["status"]["conditions"] = []
        api.stored(gone, "MODIFIED")
        await to_rest(api, made)
        await to_rest(api, made)
    assert conditions(api)["Ready"]["status"] == "False"
    assert warned() == ["Ready is False: no ready replica of router"]


async def test_a_deletion_reports_what_still_runs(api):
    """GPUs that a draining worker holds are in use until it has gone."""
    loads = Loads({"decode-1": PodLoad(3, 0, 0.4)})
    async with operator(api, loads) as made:
        await to_rest(api, made)
        busy = pod("decode-1", "decode", gated=False, ready=True, phase="Running")
        busy["spec"]["terminationGracePeriodSeconds"] = 10**9
        await api.create(busy, field_manager="kubelet")
        await api.delete(GRAPH_DEPLOYMENT, "g", namespace="ns")
        await told(api)
        for _ in range(6):
            await made.reconciler.reconcile(KEY)
            await told(api)
    rows = conditions(api)
    assert api.at("GraphDeployment", "g")["status"]["services"]["decode"]["gpus"] == 1
    assert (rows["Ready"]["status"], rows["Ready"]["reason"]) == ("False", "Deleting")
    assert rows["BudgetRespected"]["message"] == "1 GPUs are in use of 2"


@pytest.mark.parametrize(("finalizers", "number"), [([], 0), (["foregroundDeletion"], 1)])
async def test_a_foreground_deletion_is_warned_of(api, finalizers, number):
    """The garbage collector waits for no drain: an Event says what may be lost, and how to delete."""
    async with operator(api) as made:
        await to_rest(api, made)
        graph_now = api.at("GraphDeployment", "g")
        graph_now["metadata"]["finalizers"] += finalizers
        api.stored(graph_now, "MODIFIED")
        await api.delete(GRAPH_DEPLOYMENT, "g", namespace="ns")
        await told(api)
        await made.reconciler.reconcile(KEY)
    warned = [
        each["type"]
        for (kind, *_), each in api.objects.items()
        if kind == "Event" and each["reason"] == "ForegroundDeletion"
    ]
    assert warned == ["Warning"] * number


async def test_every_declared_role_has_a_series_also_without_a_pod(api):
    """A series that vanishes alarms no one; a graph that is being deleted has none."""
    await api.create(
        {**graph(planner={"enabled": False}), "metadata": {"name": "h", "namespace": "ns"}},
        field_manager="user",
    )
    async with operator(api) as made:
        await to_rest(api, made)
        metrics = OperatorMetrics()
        metrics.watch(depth=lambda: 0, graphs=made.graphs, pools=made.pools.all)
        page = metrics.page().decode()
        for role in ("router", "prefill", "decode"):
            assert f'penstock_operator_ready_replicas{{graph="g",namespace="ns",role="{role}"}} 0.0' in page
        assert 'penstock_operator_planner_expected{graph="g",namespace="ns"} 1.0' in page
        assert 'planner_expected{graph="h"' not in page
        await serving(api, "d0", "decode")
        await to_rest(api, made)
        assert 'replicas{graph="g",namespace="ns",role="decode"} 1.0' in metrics.page().decode()
        await api.delete(GRAPH_DEPLOYMENT, "g", namespace="ns")
        await told(api)
        assert 'graph="g"' not in metrics.page().decode()


async def test_an_evicted_pod_is_told_until_it_is_replaced(api):
    """Kubernetes keeps a failed pod for thousands of others; the graph that serves without it is well."""
    async with operator(api) as made:
        await to_rest(api, made)
        for each in ("prefill", "decode"):
            await serving(api, f"{each}-1", each)
        await api.create(router(), field_manager="kubelet")
        evicted = pod("decode-0", "decode", gated=False, phase="Failed")
        target = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": stamp(time.time())}
        evicted["status"] |= {"reason": "Evicted", "message": "low on memory", "conditions": [target]}
        await api.create(evicted, field_manager="kubelet")
        replaced = api.objects.pop(("Pod", "ns", "decode-1"))
        api.stored(replaced, "DELETED")
        await to_rest(api, made)
        assert conditions(api)["Degraded"]["reason"] == "Evicted"
        await serving(api, "decode-2", "decode")
        await to_rest(api, made)
        assert conditions(api)["Degraded"]["reason"] == "Healthy"
        target["lastTransitionTime"] = stamp(time.time() - 86400)
        api.stored(evicted, "MODIFIED")
        api.at("ScalingAdapter", "g-decode")["spec"]["replicas"] = 2
        api.stored(api.at("ScalingAdapter", "g-decode"), "MODIFIED")
        await to_rest(api, made)
    assert conditions(api)["Degraded"]["reason"] == "Healthy"


async def test_what_a_second_operator_writes_is_told(api):
    """It leaves a digest of its own, which is not an edit of the graph."""
    async with operator(api) as made:
        await to_rest(api, made)
        live = api.at("Deployment", "g-decode")
        live["metadata"]["annotations"][APPLIED_ANNOTATION] = "another"
        [container] = live["spec"]["template"]["spec"]["containers"]
        container["image"] = "other:2"
        api.stored(live, "MODIFIED")
        await to_rest(api, made)
        edit(api, "GraphDeployment", "g", env=[{"name": "OWN", "value": "1"}])
        await to_rest(api, made)
    said = [each["message"] for key, each in api.objects.items() if key[0] == "Event"]
    assert len(said) == 1
    assert said[0].startswith("Deployment g-decode: ")
