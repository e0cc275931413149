"""The reconciler's replicas: gates inside the budget, drains, shrinking, services that go."""

from __future__ import annotations

import copy

import pytest
from graph_harness import KEY, Loads, conditions, edit, operator, pod, router, serving, to_rest, told

from penstock.core.errors import ForbiddenError, UnavailableError
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock_operator.plan.drain import PodLoad
from penstock_operator.pools.driver import GpuPools


async def test_gates_are_lifted_within_the_budget_even_if_answers_are_lost(api):
    """Two GPUs: two of three pods; a release whose answer was lost counts until the watch shows it."""
    async with operator(api) as made:
        await to_rest(api, made)
        for name, service in (("p-1", "prefill"), ("d-1", "decode"), ("d-2", "decode")):
            await api.create(pod(name, service), field_manager="kubelet")
        await told(api)

        def fault(_number, write):
            return (
                UnavailableError("PATCH: the API server does not answer: reset")
                if write[:2] == ("patch", "Pod")
                else None
            )

        api.fault = fault
        with pytest.raises(UnavailableError):
            await made.reconciler.reconcile(KEY)
        api.fault = None
        for _ in range(4):
            await made.reconciler.reconcile(KEY)
            await told(api)
    gated = {
        name: bool(obj["spec"]["schedulingGates"])
        for (kind, _, name), obj in api.objects.items()
        if kind == "Pod"
    }
    assert sum(not each for each in gated.values()) == 2
    assert not gated["p-1"]


async def test_gated_pods_that_nobody_wants_any_more_stay_gated(api):
    """A policy kept three pods at the gate until one was wanted; once it is lifted, one starts and the others go."""
    async with operator(api) as made:
        edit(api, "GraphDeployment", "g", planner={"maxGpuBudget": 8})
        await to_rest(api, made)
        edit(api, "ScalingAdapter", "g-decode", replicas=3)
        await to_rest(api, made)

        def deny(_number, write):
            if write[:2] == ("patch", "Pod"):
                raise ForbiddenError("PATCH: denied by policy")

        api.fault = deny
        for name in ("d-1", "d-2", "d-3"):
            await api.create(pod(name, "decode"), field_manager="kubelet")
        workload = api.at("Deployment", "g-decode")
        workload["status"] = {"replicas": 3, "updatedReplicas": 3}
        workload["status"]["observedGeneration"] = workload["metadata"]["generation"]
        api.stored(workload, "MODIFIED")
        for wanted in (3, 1):
            edit(api, "ScalingAdapter", "g-decode", replicas=wanted)
            for _ in range(3):
                await told(api)
                await made.reconciler.reconcile(KEY)
        assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 3
        api.fault = None
        await to_rest(api, made)
    started = [name for name in ("d-1", "d-2", "d-3") if not api.at("Pod", name)["spec"]["schedulingGates"]]
    assert len(started) == 1
    assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 1


async def test_a_graph_bids_for_what_its_planner_wants_and_starts_none_of_that(api, monkeypatch):
    """One GPU for each of one prefill and three decode workers; the adapters still ask for one each."""
    bids = []
    monkeypatch.setattr(GpuPools, "report", lambda *said: bids.append(said[-1]))
    async with operator(api) as made:
        edit(api, "GraphDeployment", "g", planner={"maxGpuBudget": 8})
        await to_rest(api, made)
        live = api.at("GraphDeployment", "g")
        live["status"]["planner"] = {"wants": {"decode": 3, "prefill": 0}, "gpus": 2}
        api.stored(live, "MODIFIED")
        await told(api)
        await made.reconciler.reconcile(KEY)
    assert (bids[0], bids[-1]) == ((1, 1), (1, 1, 1, 1))
    assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 1


async def test_pods_that_the_watch_does_not_show_yet_are_not_shrunk_away(api, monkeypatch):
    """The Deployment counts three, the view two: it shrinks only once one of the two may go."""
    loads = Loads({"d-1": PodLoad(1, 0, 0.1), "d-2": PodLoad(1, 0, 0.1)})
    now = [1_800_000_000.0]
    async with operator(api, loads) as made:
        monkeypatch.setattr("time.time", lambda: now[0])
        edit(api, "GraphDeployment", "g", planner={"maxGpuBudget": 8})
        await to_rest(api, made)
        edit(api, "ScalingAdapter", "g-decode", replicas=3)
        await to_rest(api, made)
        workload = api.at("Deployment", "g-decode")
        assert workload["spec"]["replicas"] == 3
        workload["status"] = {"replicas": 3, "updatedReplicas": 3, "readyReplicas": 3, "availableReplicas": 3}
        workload["status"]["observedGeneration"] = workload["metadata"]["generation"]
        api.stored(workload, "MODIFIED")
        for name in ("d-1", "d-2"):
            await serving(api, name, "decode")
        edit(api, "ScalingAdapter", "g-decode", replicas=1)
        await told(api)
        for expected in (3, 2):
            for _ in range(6):
                now[0] += 5
                await made.reconciler.reconcile(KEY)
                await told(api)
            assert api.at("Deployment", "g-decode")["spec"]["replicas"] == expected
            loads.loads = dict.fromkeys(("d-1", "d-2"), PodLoad(0, 0, 0.0, idle_s=9.0))


@pytest.mark.parametrize(("is_waiting", "surge"), [(False, 1), (True, 0)])
async def test_a_rollout_that_surges_goes_on_so_while_more_is_wanted(api, is_waiting, surge):
    """The planner's next replica must not end the only prefill worker; the budget that holds its new pod back does."""
    edit(api, "GraphDeployment", "g", planner={"maxGpuBudget": 3})
    async with operator(api) as made:
        await to_rest(api, made)
        prefill = api.at("Deployment", "g-prefill")
        assert prefill["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        prefill["status"] = {"replicas": 2, "updatedReplicas": 1, "readyReplicas": 1}
        api.stored(prefill, "MODIFIED")
        others = ["d-1", "d-2"] if is_waiting else ["d-1"]
        for name in ["p-old", *others]:
            await serving(api, name, "prefill" if name == "p-old" else "decode")
        await api.create(pod("p-new", "prefill"), field_manager="kubelet")
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await to_rest(api, made)
    assert api.at("Deployment", "g-prefill")["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == surge


@pytest.mark.parametrize("by", ["spec", "annotation"])
async def test_a_paused_graph_keeps_its_children_and_its_budget(api, by):
    """A new image and number wait, and a status says so; a pod is still let in by the budget alone. Then all of it comes."""
    async with operator(api) as made:
        await to_rest(api, made)
        edit(api, "Deployment", "g-decode", replicas=3)
        before = copy.deepcopy(api.at("Deployment", "g-decode"))
        if by == "annotation":
            annotations = {"penstock.dev/reconcile": "disabled"}
            api.at("GraphDeployment", "g")["metadata"]["annotations"] = annotations
        edit(api, "GraphDeployment", "g", image="other:2", paused=True if by == "spec" else None)
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        for name in ("d-1", "d-2", "d-3"):
            await api.create(pod(name, "decode"), field_manager="kubelet")
        await to_rest(api, made)
        assert api.at("Deployment", "g-decode")["spec"] == before["spec"]
        gated = [name for name in ("d-1", "d-2", "d-3") if api.at("Pod", name)["spec"]["schedulingGates"]]
        assert len(gated) == 1, "the budget is 2 GPUs"
        progressing = conditions(api)["Progressing"]
        assert (progressing["status"], progressing["reason"]) == ("False", "Paused")
        limited = api.at("ScalingAdapter", "g-decode")["status"]["conditions"][0]
        assert (limited["status"], limited["reason"]) == ("True", "Paused")

        api.at("GraphDeployment", "g")["metadata"].pop("annotations", None)
        edit(api, "GraphDeployment", "g", paused=None)
        await to_rest(api, made)
    spec = api.at("Deployment", "g-decode")["spec"]
    assert (spec["replicas"], spec["template"]["spec"]["containers"][0]["image"]) == (2, "other:2")


async def test_a_service_that_is_no_longer_wanted_goes(api):
    """A second router service: its workload first, then its Service."""
    services = api.at("GraphDeployment", "g")["spec"]["services"]
    edit(api, "GraphDeployment", "g", services={**services, "second": {"role": "router"}})
    async with operator(api) as made:
        await to_rest(api, made)
        assert ("Deployment", "ns", "g-second") in api.objects
        edit(api, "GraphDeployment", "g", services=services)
        await told(api)
        api.writes.clear()
        await to_rest(api, made)
    deleted = [each[1:] for each in api.writes if each[0] == "delete"]
    assert deleted[0] == ("Deployment", "g-second")
    assert set(deleted[1:]) == {("Service", "g-second"), ("PodDisruptionBudget", "g-second")}


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_service_that_fits_one_node_again_gives_its_leader_worker_set_up(api, is_restarted):
    """Its Deployment comes, and the set, whose kind no service needs any more, goes, after a restart of the operator too."""

    async def raw_get(_path):
        return {"resources": [{"name": "leaderworkersets"}]}

    api.raw_get = raw_get
    services = api.at("GraphDeployment", "g")["spec"]["services"]
    wide = {**services["decode"], "nodesPerReplica": 2, "gpusPerReplica": 2}
    edit(api, "GraphDeployment", "g", services={**services, "decode": wide}, planner={"maxGpuBudget": 9})
    async with operator(api) as made:
        await to_rest(api, made)
        workloads = {each[0] for each in api.objects if each[2] == "g-decode"}
        assert "LeaderWorkerSet" in workloads
        assert "Deployment" not in workloads
        if not is_restarted:
            edit(api, "GraphDeployment", "g", services=services)
            await to_rest(api, made)
    if is_restarted:
        edit(api, "GraphDeployment", "g", services=services)
        async with operator(api) as made:
            await to_rest(api, made)
    workloads = {each[0] for each in api.objects if each[2] == "g-decode"}
    assert "Deployment" in workloads
    assert "LeaderWorkerSet" not in workloads


async def _ended(api, loads):
    """Delete a graph with two routers, prefill and decode; return the pods that were ended and their grace."""
    given = {}
    delete = api.delete

    async def noted(kind, name, *, grace_s=None, **keys):
        if kind.kind == "Pod":
            given[name] = grace_s
        await delete(kind, name, grace_s=grace_s, **keys)

    api.delete = noted
    async with operator(api, Loads(loads)) as made:
        await to_rest(api, made)
        routers = [each for each in ("f-1", "f-2") if each in loads]
        for name in (*routers, "decode-1", "prefill-1"):
            service = name.partition("-")[0]
            made_pod = (
                router() if name in routers else pod(name, service, gated=False, ready=True, phase="Running")
            )
            made_pod["metadata"]["name"] = name
            made_pod["spec"]["terminationGracePeriodSeconds"] = 10**9
            if name in routers:
                made_pod["metadata"]["deletionTimestamp"] = "2099-01-01T00:00:00Z"
            await api.create(made_pod, field_manager="kubelet")
        await api.delete(GRAPH_DEPLOYMENT, "g", namespace="ns")
        await told(api)
        for _ in range(4):
            await made.reconciler.reconcile(KEY)
            await told(api)
    return given


IDLE, BUSY = PodLoad(0, 0, 0.0, idle_s=60.0), PodLoad(3, 0, 0.4)


async def test_idle_workers_of_a_deleted_graph_end_at_once(api):
    """Routers are gone, so nothing is waited for but idleness; a busy worker keeps its own grace period."""
    assert await _ended(api, {"decode-1": IDLE, "prefill-1": BUSY}) == {"decode-1": 1}


async def test_idle_workers_leave_beside_idle_routers_which_keep_their_own_end(api):
    """First out of their Services, so that a late request is refused; they end once routers have heard of it."""
    loads = dict.fromkeys(("f-1", "f-2", "decode-1", "prefill-1"), IDLE)
    assert await _ended(api, loads) == {}
    marks = {api.at("Pod", each)["metadata"]["labels"]["penstock.dev/serving"] for each in loads}
    assert marks == {"true", "draining"}
    assert api.at("Pod", "decode-1")["metadata"]["labels"]["penstock.dev/serving"] == "draining"


@pytest.mark.parametrize("load", [BUSY, PodLoad(0, 0, None), None])
async def test_a_router_that_may_hold_a_request_keeps_the_others(api, load):
    """They may pass requests on for it; one that was idle once, or does not answer, may hold some."""
    assert await _ended(api, {"f-1": IDLE, "f-2": load, "decode-1": IDLE, "prefill-1": IDLE}) == {}
