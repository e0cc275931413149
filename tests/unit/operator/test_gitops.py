"""What GitOps tools conclude from a graph's status over its life: kstatus (Flux, Helm 4) and the Argo CD rules in docs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from graph_harness import (
    KEY,
    Loads,
    conditions,
    edit,
    graph,
    operator,
    pod,
    router,
    serving,
    to_rest,
    told,
)
from lupa.lua51 import LuaRuntime, lua_type

from penstock.api.crd import definitions
from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock_operator.plan.drain import PodLoad

ROOT = Path(__file__).resolve().parents[3]
LUA = ROOT / "docs" / "examples" / "argo-cd" / "penstock.dev" / "GraphDeployment" / "health.lua"


def kstatus(obj):
    """Return what kstatus says of a custom resource.

    Source: sigs.k8s.io/cli-utils, pkg/kstatus/status/generic.go and status.go.
    """
    status = obj.get("status", {})
    if obj["metadata"].get("deletionTimestamp"):
        return "Terminating"
    if "observedGeneration" in status and status["observedGeneration"] != obj["metadata"]["generation"]:
        return "InProgress"
    held = {each["type"]: each["status"] for each in status.get("conditions", ())}
    if held.get("Reconciling") == "True":
        return "InProgress"
    if held.get("Stalled") == "True":
        return "Failed"
    if "Ready" in held:
        return "Current" if held["Ready"] == "True" else "InProgress"
    return "Current"


def argo(obj):
    """Return the health that Argo CD shows, by its engine's version of Lua."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(obj, recursive=True)
    found = lua.execute(LUA.read_text())
    assert lua_type(found) == "table"
    assert found["message"]
    return found["status"]


@pytest.fixture
def live(api):
    """The graph as the API server has it."""

    def read():
        return api.at("GraphDeployment", "g")

    return read


def said(obj):
    """Return both tools' words."""
    return kstatus(obj), argo(obj)


async def started(api, made, *, services=("prefill", "decode")):
    """Let all pods of the graph serve."""
    await to_rest(api, made)
    for each in services:
        await serving(api, f"{each}-1", each)
        roll(api, f"g-{each}")
    for number in (1, 2):
        each = router()
        each["metadata"]["name"] = f"f-{number}"
        await api.create(each, field_manager="kubelet")
    roll(api, "g-frontend", replicas=2, updated=2)
    await to_rest(api, made)


def roll(api, name, *, replicas=1, updated=1):
    """Let a Deployment's controller report that its replicas exist, and how many are of the newest revision."""
    live = api.at("Deployment", name)
    counts = {"replicas": replicas, "updatedReplicas": updated, "readyReplicas": replicas}
    live["status"] = {
        "observedGeneration": live["metadata"]["generation"],
        **counts,
        "availableReplicas": replicas,
    }
    api.stored(live, "MODIFIED")


def test_a_new_graph_is_in_progress_before_an_operator_has_observed_it(live):
    """The API server writes the status's default into each new object."""
    schema = definitions()["graphdeployments.penstock.dev"]["spec"]["versions"][0]["schema"]
    status = schema["openAPIV3Schema"]["properties"]["status"]["default"]
    assert said({**graph(), "metadata": {"name": "g", "generation": 1}, "status": status}) == (
        "InProgress",
        "Progressing",
    )


async def test_a_graph_is_current_when_it_serves_and_not_before(api, live):
    """Its pods start first. The planner's scaling does not change the answer; a rollout does until it has ended."""
    async with operator(api) as made:
        await to_rest(api, made)
        assert said(live()) == ("InProgress", "Progressing")
        await started(api, made)
        assert said(live()) == ("Current", "Healthy")

        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await to_rest(api, made)
        assert conditions(api)["Progressing"]["status"] == "True"
        assert said(live()) == ("Current", "Healthy")

        edit(api, "ScalingAdapter", "g-decode", replicas=1)
        edit(api, "GraphDeployment", "g", model={"name": "other"})
        assert said(live()) == ("InProgress", "Progressing"), "the operator has not observed the edit"
        await to_rest(api, made)
        assert said(live()) == ("InProgress", "Progressing")
        for name, replicas in (("g-decode", 1), ("g-prefill", 1), ("g-frontend", 2)):
            assert said(live()) == ("InProgress", "Progressing")
            roll(api, name, replicas=replicas, updated=replicas)
            await to_rest(api, made)
    assert said(live()) == ("Current", "Healthy")


async def test_a_refused_edit_fails_though_the_earlier_specification_serves(api, live):
    """It stays so until somebody corrects the edit."""
    async with operator(api) as made:
        await started(api, made)
        edit(api, "GraphDeployment", "g", router={"policy": "fastest"})
        await to_rest(api, made)
        assert conditions(api)["Ready"]["status"] == "True"
        assert said(live()) == ("Failed", "Degraded")
        edit(api, "GraphDeployment", "g", router=None)
        await to_rest(api, made)
    assert said(live()) == ("Current", "Healthy")


async def test_a_pod_in_trouble_degrades_a_graph_that_serves(api, live):
    """Kstatus has no word for the first: the graph serves."""
    async with operator(api) as made:
        await started(api, made)
        crashing = pod("decode-2", "decode", gated=False, phase="Running")
        crashing["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
        await api.create(crashing, field_manager="kubelet")
        await to_rest(api, made)
        assert said(live()) == ("Current", "Degraded")


async def test_a_graph_that_never_starts_fails_after_its_startup_timeout(api, live, monkeypatch):
    """Flux then reports the failure at once instead of at its own timeout."""
    now = time.time
    async with operator(api) as made:
        await to_rest(api, made)
        assert said(live()) == ("InProgress", "Progressing")
        monkeypatch.setattr("time.time", lambda: now() + 10_000)
        await to_rest(api, made)
    assert said(live()) == ("Failed", "Degraded")


async def test_a_graph_scaled_to_zero_is_current(api, live):
    """The next request starts its workers."""
    live()["spec"]["router"] = {"prefillQueue": {"maxWakeSeconds": 900}}
    live()["spec"]["planner"] = {"maxGpuBudget": 2, "minGpuBudget": 0, "scaleToZeroAfterSeconds": 600}
    for each in ("prefill", "decode"):
        live()["spec"]["services"][each]["scaling"]["minReplicas"] = 0
    async with operator(api) as made:
        await started(api, made, services=())
        for each in ("prefill", "decode"):
            edit(api, "ScalingAdapter", f"g-{each}", replicas=0)
        await to_rest(api, made)
    assert conditions(api)["Ready"]["reason"] == "ScaledToZero"
    assert said(live()) == ("Current", "Healthy")


async def test_a_paused_graph_is_suspended_and_a_deleted_one_terminates(api, live):
    """Neither is reported as broken."""
    async with operator(api, Loads({"decode-1": PodLoad(3, 0, 0.4)})) as made:
        await started(api, made)
        edit(api, "GraphDeployment", "g", paused=True)
        await to_rest(api, made)
        assert said(live()) == ("Current", "Suspended")
        edit(api, "GraphDeployment", "g", paused=None)
        await to_rest(api, made)
        await api.delete(GRAPH_DEPLOYMENT, "g", namespace="ns")
        assert said(live()) == ("Terminating", "Progressing")
        await told(api)
        await made.reconciler.reconcile(KEY)
        assert said(live()) == ("Terminating", "Progressing")
