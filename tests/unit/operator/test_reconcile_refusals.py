"""What the reconciler does where the API server refuses a write, or the operator refuses an edit: everything else."""

from __future__ import annotations

import copy
import json

import pytest
from fake_api import FakeApi
from graph_harness import KEY, Loads, conditions, edit, graph, operator, pod, router, serving, to_rest, told

from penstock.core.errors import (
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    UnavailableError,
)
from penstock_operator.plan import drain
from penstock_operator.plan.drain import PodLoad

DENIED = (
    "422: x is forbidden: ValidatingAdmissionPolicy 'freeze' with binding 'freeze' denied request: hands off"
)


class Idle(Loads):
    """Every pod is idle for long."""

    async def read(self, pods):
        """Return an idle load for each."""
        return {each.name: PodLoad(0, 0, 0.0, idle_s=60.0) for each in pods}


def denying(denied):
    """Return a fault that refuses one write as another team's policy does."""

    def fault(_number, write):
        if write == denied:
            raise InvalidObjectError(DENIED)

    return fault


def reasons(api):
    """Return reasons and texts of the Events."""
    return {(each["reason"], each["message"]) for key, each in api.objects.items() if key[0] == "Event"}


async def life(api):
    """Make a graph, its pods, then shrink a service and give another's scaling up; tolerate refusals."""
    async with operator(api, Idle()) as made:
        await looks(api, made)
        await api.create(pod("prefill-1", "prefill"), field_manager="kubelet")
        await api.create(router(), field_manager="kubelet")
        for name in ("decode-1", "decode-2"):
            await serving(api, name, "decode")
        edit(api, "ScalingAdapter", "g-decode", replicas=2) if _has(api, "g-decode") else None
        await looks(api, made)
        edit(api, "ScalingAdapter", "g-decode", replicas=1) if _has(api, "g-decode") else None
        await looks(api, made)
        services = copy.deepcopy(api.at("GraphDeployment", "g")["spec"]["services"])
        services["prefill"] = {"role": "prefill"}
        edit(api, "GraphDeployment", "g", services=services)
        await looks(api, made)


def _has(api, name):
    return ("ScalingAdapter", "ns", name) in api.objects


async def looks(api, made):
    """Reconcile often enough for everything."""
    for _ in range(4):
        await told(api)
        await made.reconciler.reconcile(KEY)
    await told(api)


def state(api, *, without=()):
    """Return what is stored, by identity, without statuses and what differs from run to run."""
    found = {}
    for identity, stored in api.objects.items():
        if identity[0] in {"Event", "GraphDeployment"} or identity in without:
            continue
        obj = copy.deepcopy(stored)
        for key in ("resourceVersion", "uid", "managedFields", "generation", "ownerReferences"):
            obj["metadata"].pop(key, None)
        obj["metadata"].get("annotations", {}).pop("penstock.dev/drain-since", None)
        obj.pop("stringData", None)
        obj.pop("status", None)
        found[identity] = obj
    return found


async def made_api():
    """Return an API server with the graph."""
    api = FakeApi()
    await api.create(graph(), field_manager="user")
    api.writes.clear()
    return api


async def test_each_write_denied_in_turn_stops_no_other(monkeypatch):
    """Another team's policy denies one write for good: all others happen, and condition and Event name the policy."""
    monkeypatch.setattr(drain, "SETTLE_S", 0.0)
    api = await made_api()
    await life(api)
    base = api
    kinds = {(verb, kind) for verb, kind, _ in base.writes}
    assert {("patch", "Pod"), ("status", "ScalingAdapter"), ("delete", "ScalingAdapter")} <= kinds
    # Pods are the test's to make, and an Event that is lost is not a trouble.
    for denied in sorted(
        {each for each in base.writes if each[:2] != ("create", "Pod") and each[1] != "Event"}
    ):
        verb, kind, name = denied
        api = await made_api()
        api.fault = denying(denied)
        await life(api)
        # What depends on the refused object: an adapter's number, and the drain that it would have begun.
        gone = {(kind, "ns", name)}
        if kind == "ScalingAdapter" and verb == "create":
            gone |= {("Deployment", "ns", name), ("Pod", "ns", "decode-2"), ("Pod", "ns", "decode-1")}
        if kind == "Pod" and name.startswith("decode"):
            gone.add(("Deployment", "ns", "g-decode"))
        assert state(api, without=gone) == state(base, without=gone), denied
        assert any(reason == "AdmissionDenied" and "freeze" in text for reason, text in reasons(api)), denied


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidObjectError("422: no"), "ApplyFailed"),
        (InvalidObjectError(DENIED), "AdmissionDenied"),
        (ForbiddenError('403: admission webhook "w.example" denied the request: no'), "AdmissionDenied"),
        (UnavailableError('500: failed calling webhook "w.example": refused'), "AdmissionDenied"),
        (ForbiddenError("403: exceeded quota: team-a, requested: services=1"), "QuotaExceeded"),
        (
            ForbiddenError('403: User "x" cannot create resource "services" in API group ""'),
            "Forbidden",
        ),
        (
            ForbiddenError(
                "403: unable to create new content in namespace ns because it is being terminated"
            ),
            "NamespaceTerminating",
        ),
        (NotFoundError("404: the server could not find the requested resource"), "ApplyFailed"),
    ],
)
async def test_a_refused_child_is_named_and_the_others_are_made(api, error, reason):
    """The status says which, why in one word, and in the server's words; it is tried again before long."""

    def fault(_number, write):
        if write == ("create", "Service", "g-decode"):
            raise error

    api.fault = fault
    async with operator(api) as made:
        wait_s = await made.reconciler.reconcile(KEY)
    degraded = conditions(api)["Degraded"]
    assert degraded["reason"] == reason
    assert f"Service g-decode: {error}" in degraded["message"]
    assert conditions(api)["Progressing"]["reason"] != "Stable"
    assert ("Deployment", "ns", "g-decode") in api.objects
    assert reason in {each for each, _ in reasons(api)}
    assert wait_s == 15.0


async def test_a_conflict_is_no_trouble_and_comes_again_soon(api):
    """Another writer was first; nobody has to do anything."""

    def fault(_number, write):
        if write == ("apply", "Deployment", "g-frontend"):
            api.fault = None
            raise ConflictError("409: the object has been modified")

    async with operator(api) as made:
        await to_rest(api, made)
        live = api.at("Deployment", "g-frontend")
        live["spec"]["template"]["spec"]["enableServiceLinks"] = True
        api.stored(live, "MODIFIED")
        await told(api)
        api.fault = fault
        assert await made.reconciler.reconcile(KEY) == 1.0
        assert conditions(api)["Degraded"]["reason"] == "Healthy"
        await to_rest(api, made)
    assert live["spec"]["template"]["spec"]["enableServiceLinks"] is False


async def test_a_name_that_falls_free_while_it_is_looked_at_is_taken_at_once(api):
    """The garbage collector ran between the two calls; without a second try the child is missing, and no condition says so."""
    tries = 0

    def fault(_number, write):
        nonlocal tries
        if write == ("create", "Service", "g-decode"):
            tries += 1
            if tries == 1:
                raise ConflictError("409: g-decode already exists")

    async with operator(api) as made:
        api.fault = fault
        await made.reconciler.reconcile(KEY)
    assert tries == 2
    assert ("Service", "ns", "g-decode") in api.objects


async def test_a_refused_release_lets_the_next_pod_start(api):
    """Its GPUs are not held for a pod that another team's policy does not let go."""
    async with operator(api) as made:
        await to_rest(api, made)
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        for name in ("decode-a", "decode-b"):
            await api.create(pod(name, "decode"), field_manager="kubelet")
        api.fault = denying(("patch", "Pod", "decode-a"))
        for _ in range(3):
            await told(api)
            await made.reconciler.reconcile(KEY)
    gated = {
        key[2] for key, each in api.objects.items() if key[0] == "Pod" and each["spec"]["schedulingGates"]
    }
    assert gated == {"decode-a"}
    said = conditions(api)["Schedulable"]
    assert (said["status"], said["reason"]) == ("False", "AdmissionDenied")
    assert "decode-a" in said["message"]


HOST_IPC = {"spec": {"hostIPC": True}}


def worsen(api, **more):
    """Edit the graph to what the operator refuses and the API server does not."""
    services = copy.deepcopy(api.at("GraphDeployment", "g")["spec"]["services"])
    services["decode"] |= {"podTemplate": HOST_IPC, **more}
    edit(api, "GraphDeployment", "g", services=services)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_refused_edit_stops_no_gate_drain_adapter_or_repair(api, monkeypatch, is_restarted):
    """The last valid edit is carried out, also by an operator that starts after the refused one."""
    monkeypatch.setattr(drain, "SETTLE_S", 0.0)
    async with operator(api, Idle()) as made:
        await to_rest(api, made)
        for name in ("decode-1", "decode-2"):
            await serving(api, name, "decode")
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await looks(api, made)
        before = api.at("GraphDeployment", "g")["metadata"]["generation"]
        if not is_restarted:
            worsen(api)
            await _goes_on(api, made, before)
    if is_restarted:
        worsen(api)
        async with operator(api, Idle()) as made:
            await _goes_on(api, made, before)


async def _goes_on(api, made, generation):
    await looks(api, made)
    edit(api, "ScalingAdapter", "g-decode", replicas=1)
    live = api.at("Deployment", "g-frontend")
    live["spec"]["template"]["spec"]["enableServiceLinks"] = True
    api.stored(live, "MODIFIED")
    await looks(api, made)
    assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 1
    assert (
        api.at("Pod", "decode-1")["metadata"]["labels"]["penstock.dev/serving"]
        != (api.at("Pod", "decode-2")["metadata"]["labels"]["penstock.dev/serving"])
    )
    live = api.at("Deployment", "g-frontend")
    assert live["spec"]["template"]["spec"]["enableServiceLinks"] is False
    await api.create(pod("prefill-1", "prefill"), field_manager="kubelet")
    for name in ("decode-1", "decode-2"):
        del api.objects["Pod", "ns", name]["spec"]["schedulingGates"][:]
    api.objects.pop(("Pod", "ns", "decode-2"))
    await looks(api, made)
    status = api.at("GraphDeployment", "g")["status"]
    assert status["servedGeneration"] == generation
    assert status["observedGeneration"] == generation + 1
    assert "podTemplate" not in json.loads(status["servedSpec"])["services"]["decode"]
    rows = conditions(api)
    assert f"generation {generation} remains applied" in rows["Degraded"]["message"]
    assert rows["Degraded"]["reason"] == "InvalidSpec"
    assert rows["Progressing"]["reason"] != "Stable"
    assert "InvalidSpec" in {each for each, _ in reasons(api)}


async def test_a_refused_edit_drains_no_worker(api):
    """Objects are built before the first write: a lower ceiling alongside a refused podTemplate takes no worker away."""
    async with operator(api, Idle()) as made:
        await to_rest(api, made)
        for name in ("decode-1", "decode-2"):
            await serving(api, name, "decode")
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await looks(api, made)
        worsen(api, scaling={"maxReplicas": 1})
        await looks(api, made)
    labels = [api.at("Pod", name)["metadata"]["labels"] for name in ("decode-1", "decode-2")]
    assert [each["penstock.dev/serving"] for each in labels] == ["true", "true"]
    assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 2


async def test_a_corrected_edit_is_carried_out_and_the_word_goes(api):
    """The served generation is the newest again."""
    async with operator(api, Idle()) as made:
        await to_rest(api, made)
        worsen(api)
        await looks(api, made)
        services = copy.deepcopy(api.at("GraphDeployment", "g")["spec"]["services"])
        services["decode"]["podTemplate"] = {"spec": {"priorityClassName": "mine"}}
        edit(api, "GraphDeployment", "g", services=services)
        await to_rest(api, made)
    live = api.at("GraphDeployment", "g")
    assert live["status"]["servedGeneration"] == live["metadata"]["generation"]
    assert conditions(api)["Degraded"]["reason"] == "Healthy"
    template = api.at("Deployment", "g-decode")["spec"]["template"]["spec"]
    assert template["priorityClassName"] == "mine"


async def test_pods_start_though_no_edit_can_be_built_any_more(api):
    """The operator was restarted with fewer allowances and finds nothing that it would build."""
    async with operator(api) as made:
        await to_rest(api, made)
    services = copy.deepcopy(api.at("GraphDeployment", "g")["spec"]["services"])
    services["decode"]["podTemplate"] = HOST_IPC
    edit(api, "GraphDeployment", "g", services=services)
    live = api.at("GraphDeployment", "g")
    live["status"] |= {"servedGeneration": 2, "servedSpec": json.dumps(live["spec"])}
    await api.create(pod("decode-1", "decode"), field_manager="kubelet")
    async with operator(api) as made:
        await looks(api, made)
    assert not api.at("Pod", "decode-1")["spec"]["schedulingGates"]
    assert conditions(api)["Degraded"]["reason"] == "InvalidSpec"


async def test_a_file_that_routers_lack_is_refused_before_one_starts_with_it(api):
    """It would end at every start; the routers that serve stay as they are, and the word names the Secret's key."""
    async with operator(api) as made:
        await to_rest(api, made)
        before = copy.deepcopy(api.at("Deployment", "g-frontend"))
        edit(api, "GraphDeployment", "g", router={"tiers": {"enabled": True, "keysFile": "/keys"}})
        await looks(api, made)
    degraded = conditions(api)["Degraded"]
    assert degraded["reason"] == "InvalidSpec"
    assert "spec.router.tiers.keysFile: /keys is not in the pods" in degraded["message"]
    assert "name a Secret in keysSecret" in degraded["message"]
    assert api.at("Deployment", "g-frontend") == before
