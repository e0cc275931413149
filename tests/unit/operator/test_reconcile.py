"""The reconciler against an API server in memory: crashes before and after every write, refusals, gates, rest."""

from __future__ import annotations

import asyncio
import copy
from contextlib import asynccontextmanager, suppress

import pytest
from fake_api import Crash, FakeApi

from penstock_core.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    UnavailableError,
)
from penstock_kube.kinds import GRAPH_DEPLOYMENT
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.plan.scale import Load
from penstock_operator.service import Operator
from penstock_operator.settings import OperatorSettings

KEY = ("ns", "g")
GATE = {"name": "penstock.dev/gpu-budget"}


class Loads:
    """Loads by pod; absent ones are unknown."""

    def __init__(self, loads=None):
        self.loads = loads or {}
        self.asked = []

    async def read(self, pods):
        """Return what is set."""
        names = [pod.name for pod, _ in pods]
        self.asked.append(names)
        return {name: self.loads.get(name) for name in names}


def graph(**changes):
    """Return a graph of one router, one prefill and one decode worker, and 2 GPUs."""
    spec = {
        "model": {"name": "tiny"},
        "runtime": "simulated",
        "services": {
            "frontend": {"role": "router"},
            "prefill": {"role": "prefill", "scaling": {"maxReplicas": 3}},
            "decode": {"role": "decode", "scaling": {"maxReplicas": 3}},
        },
        "planner": {"maxGpuBudget": 2},
        **changes,
    }
    metadata = {"name": "g", "namespace": "ns"}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": metadata,
        "spec": spec,
    }


def pod(name, service, *, gated=True, ready=False, phase="Pending", **spec):
    """Return a worker pod of one GPU."""
    running = {"name": "main", "ready": ready, "started": ready, "state": {"running": {}} if ready else {}}
    status = {"phase": phase, "podIP": "10.0.0.1", "containerStatuses": [running]}
    status["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
    labels = {
        "penstock.dev/graph": "g",
        "penstock.dev/service": service,
        "penstock.dev/role": service,
        "app.kubernetes.io/managed-by": "penstock",
        "penstock.dev/serving": "true",
    }
    metadata = {"name": name, "namespace": "ns", "labels": labels, "annotations": {"penstock.dev/gpus": "1"}}
    containers = [{"name": "main"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "schedulingGates": [GATE] if gated else [],
            "containers": containers,
            **({} if gated else {"nodeName": "n"}),
            **spec,
        },
        "status": status,
    }


async def told(api):
    """Let every watch tell what it has."""
    for _ in range(60):
        await asyncio.sleep(0)


@asynccontextmanager
async def operator(api, loads=None):
    """Give an operator whose watches run, without its queue."""
    settings = OperatorSettings(namespace="ns", leader_election=False)
    made = Operator(api, settings, loads=loads or Loads(), metrics=OperatorMetrics())
    task = asyncio.create_task(made.cluster.run())
    await made.cluster.synced()
    await told(api)
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def to_rest(api, made, *, looks=12):
    """Look until a look writes nothing."""
    for _ in range(looks):
        before = len(api.writes)
        await made.reconciler.reconcile(KEY)
        await told(api)
        if len(api.writes) == before:
            return
    pytest.fail(f"still writing after {looks} looks: {api.writes[-5:]}")


def state(api):
    """Return what is stored, without what differs from run to run."""
    found = {}
    for identity, stored in api.objects.items():
        if identity[0] == "Event":
            continue
        obj = copy.deepcopy(stored)
        for key in ("resourceVersion", "uid", "managedFields", "generation"):
            obj["metadata"].pop(key, None)
        obj["metadata"].pop("ownerReferences", None)
        for row in obj.get("status", {}).get("conditions", []):
            row.pop("lastTransitionTime")
        found[identity] = obj
    return found


@pytest.fixture
async def api():
    """An API server with the graph."""
    made = FakeApi()
    await made.create(graph(), field_manager="user")
    made.writes.clear()
    return made


async def test_a_second_look_writes_nothing(api):
    """Zero writes at rest; nor does a restart write anything."""
    async with operator(api) as made:
        await to_rest(api, made)
        made.reconciler._settled.clear()
        before = len(api.writes)
        await made.reconciler.reconcile(KEY)
    async with operator(api) as made:
        await made.reconciler.reconcile(KEY)
    assert api.writes[before:] == []


async def test_the_finalizer_is_the_first_write_and_each_child_is_written_once(api):
    """So that no deletion can leave a child behind, and nothing is repeated."""
    async with operator(api) as made:
        await to_rest(api, made)
    assert api.writes[0] == ("patch", "GraphDeployment", "g")
    created = [each for each in api.writes if each[0] == "create"]
    assert len(created) == len(set(created)) == 18
    assert not [each for each in api.writes if each[0] == "apply"]


async def test_the_role_binding_comes_last_before_the_pods(api):
    """The API server sees a Role some time after it was written; it refuses a RoleBinding until then."""
    async with operator(api) as made:
        await to_rest(api, made)
    kinds = [kind for verb, kind, _ in api.writes if verb == "create" and kind != "ScalingAdapter"]
    place = kinds.index("RoleBinding")
    assert "Role" in kinds[:place]
    assert set(kinds[place + 1 :]) == {"Deployment"}
    assert "Deployment" not in kinds[:place]


async def _writes_of_a_whole_run():
    api = FakeApi()
    await api.create(graph(), field_manager="user")
    api.writes.clear()
    async with operator(api) as made:
        await to_rest(api, made)
    return len(api.writes), state(api)


def _crash_at(k, *, answered):
    """Die before write ``k``, or once it is stored and before its answer."""

    def fault(number, _write):
        if number != k:
            return None
        if answered:
            return Crash()
        raise Crash

    return fault


@pytest.mark.parametrize("answered", [False, True])
async def test_a_crash_at_any_write_of_the_first_run_costs_a_second_look(answered):
    """Killed before write k, or after it was stored and before its answer: the end is the same."""
    total, wanted = await _writes_of_a_whole_run()
    for k in range(1, total + 1):
        api = FakeApi()
        await api.create(graph(), field_manager="user")
        api.writes.clear()
        api.fault = _crash_at(k, answered=answered)
        async with operator(api) as made:
            with pytest.raises((Crash, BaseExceptionGroup)):
                await to_rest(api, made)
        api.fault = None
        async with operator(api) as made:
            await to_rest(api, made)
        assert state(api) == wanted
        # The lost write, and those that were under way beside it.
        assert len(api.writes) <= total + 4


@pytest.mark.parametrize("answered", [False, True])
async def test_a_crash_at_any_write_of_a_deletion_costs_a_second_look(answered):
    """Nothing of the graph is left in the end."""
    k = 0
    finished = False
    while not finished:
        k += 1
        api = FakeApi()
        await api.create(graph(), field_manager="user")
        async with operator(api) as made:
            await to_rest(api, made)
        await api.delete(GRAPH_DEPLOYMENT, "g", namespace="ns")
        api.writes.clear()
        api.fault = _crash_at(k, answered=answered)
        async with operator(api) as made:
            try:
                await to_rest(api, made)
            except Crash:
                finished = False
            else:
                finished = True
        api.fault = None
        async with operator(api) as made:
            await to_rest(api, made)
        assert [each for each in api.objects if each[0] != "Event"] == []
    assert k > 15


@pytest.mark.parametrize(
    "error", [UnavailableError("503"), UnavailableError("429", retry_after_s=3), ConflictError("409")]
)
async def test_a_failing_api_server_costs_nothing_but_time(api, error):
    """Every third write fails; nothing is deleted, and the end is the same."""
    _, wanted = await _writes_of_a_whole_run()

    def fault(number, _write):
        if number % 3 == 0:
            raise error

    api.fault = fault
    async with operator(api) as made:
        for _ in range(60):
            with suppress(ClusterError):
                before = len(api.writes)
                await made.reconciler.reconcile(KEY)
                await told(api)
                if len(api.writes) == before:
                    break
    assert not [each for each in api.writes if each[0] == "delete"]
    assert state(api) == wanted


@pytest.mark.parametrize(
    "error",
    [
        InvalidObjectError("422: no"),
        ForbiddenError("403: quota"),
        UnavailableError("500: failed calling webhook"),
        NotFoundError("404: the server could not find the requested resource"),
    ],
)
async def test_a_refused_child_is_named_and_the_others_are_made(api, error):
    """The status says which, in the server's words."""

    def fault(_number, write):
        if write == ("create", "Service", "g-decode"):
            raise error

    api.fault = fault
    async with operator(api) as made:
        with pytest.raises(ClusterError, match="Service g-decode"):
            await made.reconciler.reconcile(KEY)
    rows = {each["type"]: each for each in api.at("GraphDeployment", "g")["status"]["conditions"]}
    assert rows["Degraded"]["reason"] == "ApplyFailed"
    assert str(error) in rows["Degraded"]["message"]
    assert ("Deployment", "ns", "g-decode") in api.objects


async def test_a_deleted_adapter_comes_back_with_the_number_that_runs(api):
    """Not with the graph's first one."""
    async with operator(api) as made:
        await to_rest(api, made)
        api.at("ScalingAdapter", "g-decode")["spec"]["replicas"] = 2
        api.stored(api.at("ScalingAdapter", "g-decode"), "MODIFIED")
        await told(api)
        await to_rest(api, made)
        assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 2
        api.stored(api.objects.pop(("ScalingAdapter", "ns", "g-decode")), "DELETED")
        await told(api)
        await to_rest(api, made)
    assert api.at("ScalingAdapter", "g-decode")["spec"]["replicas"] == 2


async def test_a_change_during_a_look_is_not_lost(api):
    """A number written while the look was under way is acted on by the next one."""
    async with operator(api) as made:
        await to_rest(api, made)
        made.reconciler._settled.clear()

        class Changing(Loads):
            async def read(self, pods):
                adapter = api.at("ScalingAdapter", "g-decode")
                if adapter["spec"]["replicas"] == 1:
                    adapter["spec"]["replicas"] = 2
                    api.stored(adapter, "MODIFIED")
                    await told(api)
                return await super().read(pods)

        made.reconciler._parts.drains._loads = Changing()
        await made.reconciler.reconcile(KEY)
        await made.reconciler.reconcile(KEY)
    assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 2


async def test_gates_are_lifted_within_the_budget_even_if_answers_are_lost(api):
    """Two GPUs: two of three pods; a release whose answer was lost counts until the watch shows it."""
    async with operator(api) as made:
        await to_rest(api, made)
        for name, service in (("p-1", "prefill"), ("d-1", "decode"), ("d-2", "decode")):
            await api.create(pod(name, service), field_manager="kubelet")
        await told(api)

        def fault(_number, write):
            return UnavailableError("no answer") if write[:2] == ("patch", "Pod") else None

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


async def test_a_drain_marks_waits_and_only_then_shrinks(api):
    """And at rest no worker is asked for its load."""
    loads = Loads({"d-1": Load(2, 0, 0.3), "d-2": Load(1, 0, 0.1)})
    now = [1_800_000_000.0]
    async with operator(api, loads) as made:
        made.reconciler._now_s = lambda: now[0]
        api.at("GraphDeployment", "g")["spec"]["planner"]["maxGpuBudget"] = 8
        api.at("GraphDeployment", "g")["metadata"]["generation"] += 1
        api.stored(api.at("GraphDeployment", "g"), "MODIFIED")
        await told(api)
        await to_rest(api, made)
        adapter = api.at("ScalingAdapter", "g-decode")
        adapter["spec"]["replicas"] = 2
        api.stored(adapter, "MODIFIED")
        for name in ("d-1", "d-2"):
            running = pod(name, "decode", gated=False, ready=True, phase="Running")
            await api.create(running, field_manager="kubelet")
        await told(api)
        await to_rest(api, made)
        assert not any(loads.asked)
        adapter["spec"]["replicas"] = 1
        api.stored(adapter, "MODIFIED")
        await told(api)
        assert await made.reconciler.reconcile(KEY) == 1.0
        assert api.at("Pod", "d-2")["metadata"]["labels"]["penstock.dev/serving"] == "draining"
        assert api.at("Pod", "d-1")["metadata"]["labels"]["penstock.dev/serving"] == "true"
        now[0] += 10
        await made.reconciler.reconcile(KEY)
        assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 2
        loads.loads["d-2"] = Load(0, 0, 0.0, idle_s=2.0)
        for _ in range(3):
            now[0] += 1
            await made.reconciler.reconcile(KEY)
            await told(api)
    assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 1
    assert api.at("Pod", "d-2")["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"]


async def test_a_service_that_is_no_longer_wanted_goes(api):
    """A second router service: its workload first, then its Service."""
    live = api.at("GraphDeployment", "g")
    live["spec"]["services"]["second"] = {"role": "router"}
    async with operator(api) as made:
        await to_rest(api, made)
        assert ("Deployment", "ns", "g-second") in api.objects
        del live["spec"]["services"]["second"]
        live["metadata"]["generation"] += 1
        api.stored(live, "MODIFIED")
        await told(api)
        api.writes.clear()
        await to_rest(api, made)
    deleted = [each[1:] for each in api.writes if each[0] == "delete"]
    assert deleted[0] == ("Deployment", "g-second")
    assert set(deleted[1:]) == {("Service", "g-second"), ("PodDisruptionBudget", "g-second")}


async def test_a_missing_kind_is_named_with_its_remedy(api):
    """A service over two nodes needs LeaderWorkerSet."""
    live = api.at("GraphDeployment", "g")
    live["spec"]["services"]["decode"] |= {"nodesPerReplica": 2, "gpusPerReplica": 2}
    live["spec"]["planner"]["maxGpuBudget"] = 8
    async with operator(api) as made:
        await to_rest(api, made)
    rows = {each["type"]: each for each in api.at("GraphDeployment", "g")["status"]["conditions"]}
    assert rows["Degraded"]["reason"] == "MissingCRD"
    assert "lws.sigs.k8s.io" in rows["Degraded"]["message"]
    assert ("Deployment", "ns", "g-prefill") in api.objects


async def test_an_invalid_graph_says_every_problem_and_keeps_its_children(api):
    """Should the API server's rules be older than the models'."""
    async with operator(api) as made:
        await to_rest(api, made)
        children = {each for each in api.objects if each[0] != "Event"}
        live = api.at("GraphDeployment", "g")
        live["spec"]["router"] = {"policy": "fastest"}
        live["spec"]["services"]["decode"]["replicas"] = 9
        live["metadata"]["generation"] += 1
        api.stored(live, "MODIFIED")
        await told(api)
        await to_rest(api, made)
    rows = {each["type"]: each for each in api.at("GraphDeployment", "g")["status"]["conditions"]}
    assert (rows["Ready"]["status"], rows["Ready"]["reason"]) == ("False", "InvalidSpec")
    for path in ("spec.services.decode.replicas", "spec.router.policy"):
        assert path in rows["Ready"]["message"]
    assert children <= set(api.objects)


def router():
    """Return a router pod that serves."""
    made = pod("f-1", "frontend", gated=False, ready=True, phase="Running")
    made["metadata"]["labels"]["penstock.dev/role"] = "router"
    del made["metadata"]["annotations"]
    return made


async def test_an_invalid_edit_of_a_graph_that_serves_leaves_it_ready(api):
    """Its pods are counted as they are, GPUs and all; only Degraded says what is wrong."""
    async with operator(api) as made:
        await to_rest(api, made)
        for each in ("prefill", "decode"):
            ready = pod(f"{each}-1", each, gated=False, ready=True, phase="Running")
            await api.create(ready, field_manager="kubelet")
        await api.create(router(), field_manager="kubelet")
        live = api.at("GraphDeployment", "g")
        live["spec"]["router"] = {"policy": "fastest"}
        live["metadata"]["generation"] += 1
        api.stored(live, "MODIFIED")
        await told(api)
        await to_rest(api, made)
    status = api.at("GraphDeployment", "g")["status"]
    rows = {each["type"]: each for each in status["conditions"]}
    assert (rows["Ready"]["status"], rows["Ready"]["reason"]) == ("True", "Serving")
    assert rows["Degraded"]["reason"] == "InvalidSpec"
    assert {name: each["gpus"] for name, each in status["services"].items()} == {
        "decode": 1,
        "frontend": 0,
        "prefill": 1,
    }


async def test_a_deletion_reports_what_still_runs(api):
    """GPUs that a draining worker holds are in use until it has gone."""
    loads = Loads({"decode-1": Load(3, 0, 0.4)})
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
    status = api.at("GraphDeployment", "g")["status"]
    assert status["services"]["decode"]["gpus"] == 1
    rows = {each["type"]: each for each in status["conditions"]}
    assert (rows["Ready"]["status"], rows["Ready"]["reason"]) == ("False", "Deleting")


async def test_a_wish_beyond_the_bounds_is_no_progress(api):
    """The adapter says that it was cut; the graph is as it should be and at rest."""
    async with operator(api) as made:
        await to_rest(api, made)
        adapter = api.at("ScalingAdapter", "g-decode")
        adapter["spec"]["replicas"] = 0
        api.stored(adapter, "MODIFIED")
        for each in ("prefill", "decode"):
            ready = pod(f"{each}-1", each, gated=False, ready=True, phase="Running")
            await api.create(ready, field_manager="kubelet")
            workload = api.at("Deployment", f"g-{each}")
            workload["status"] = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
            workload["status"]["observedGeneration"] = workload["metadata"]["generation"]
            workload["status"]["availableReplicas"] = 1
            api.stored(workload, "MODIFIED")
        await api.create(router(), field_manager="kubelet")
        workload = api.at("Deployment", "g-frontend")
        workload["status"] = dict(api.at("Deployment", "g-decode")["status"])
        api.stored(workload, "MODIFIED")
        await told(api)
        await to_rest(api, made)
    rows = {each["type"]: each for each in api.at("GraphDeployment", "g")["status"]["conditions"]}
    assert (rows["Progressing"]["status"], rows["Progressing"]["message"]) == (
        "False",
        "everything is as wanted",
    )
    told_of = api.at("ScalingAdapter", "g-decode")["status"]["conditions"]
    assert any("scaling.minReplicas is 1" in each["message"] for each in told_of)


async def test_pods_that_the_watch_does_not_show_yet_are_not_shrunk_away(api):
    """The Deployment counts three, the view two: it shrinks only once one of the two may go."""
    loads = Loads({"d-1": Load(1, 0, 0.1), "d-2": Load(1, 0, 0.1)})
    now = [1_800_000_000.0]
    async with operator(api, loads) as made:
        made.reconciler._now_s = lambda: now[0]
        live = api.at("GraphDeployment", "g")
        live["spec"]["planner"]["maxGpuBudget"] = 8
        live["metadata"]["generation"] += 1
        api.stored(live, "MODIFIED")
        await told(api)
        await to_rest(api, made)
        adapter = api.at("ScalingAdapter", "g-decode")
        adapter["spec"]["replicas"] = 3
        api.stored(adapter, "MODIFIED")
        await told(api)
        await to_rest(api, made)
        workload = api.at("Deployment", "g-decode")
        assert workload["spec"]["replicas"] == 3
        workload["status"] = {"replicas": 3, "updatedReplicas": 3, "readyReplicas": 3, "availableReplicas": 3}
        workload["status"]["observedGeneration"] = workload["metadata"]["generation"]
        api.stored(workload, "MODIFIED")
        for name in ("d-1", "d-2"):
            ready = pod(name, "decode", gated=False, ready=True, phase="Running")
            await api.create(ready, field_manager="kubelet")
        adapter["spec"]["replicas"] = 1
        api.stored(adapter, "MODIFIED")
        await told(api)
        for expected in (3, 2):
            for _ in range(6):
                now[0] += 5
                await made.reconciler.reconcile(KEY)
                await told(api)
            assert api.at("Deployment", "g-decode")["spec"]["replicas"] == expected
            loads.loads = dict.fromkeys(("d-1", "d-2"), Load(0, 0, 0.0, idle_s=9.0))


async def test_a_graph_that_vanished_is_forgotten(api):
    """Its finalizer was removed by force."""
    async with operator(api) as made:
        await to_rest(api, made)
        for identity in list(api.objects):
            api.stored(api.objects.pop(identity), "DELETED")
        await told(api)
        await made.reconciler.reconcile(KEY)
        assert made.cluster.known() == []
        assert KEY not in made.reconciler._models
