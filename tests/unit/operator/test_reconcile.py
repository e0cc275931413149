"""The reconciler against an API server in memory: rest, crashes before and after every write, refusals."""

from __future__ import annotations

import copy

import pytest
from fake_api import Crash, FakeApi
from graph_harness import KEY, Loads, edit, graph, operator, router, to_rest, told

from penstock.kube.kinds import GRAPH_DEPLOYMENT


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
        obj.pop("stringData", None)
        for row in obj.get("status", {}).get("conditions", []):
            row.pop("lastTransitionTime")
        found[identity] = obj
    return found


async def test_a_second_look_writes_nothing(api):
    """Zero writes at rest; nor does a restart write anything."""
    async with operator(api) as made:
        await to_rest(api, made)
        before = len(api.writes)
        await made.reconciler.reconcile(KEY)
    async with operator(api) as made:
        await made.reconciler.reconcile(KEY)
    assert api.writes[before:] == []


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
        # The lost write, and those that were under way alongside it.
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
            finished = True
            try:
                await to_rest(api, made)
            except Crash:
                finished = False
        api.fault = None
        async with operator(api) as made:
            await to_rest(api, made)
        # The garbage collector deletes the Secret with its owner.
        assert [each for each in api.objects if each[0] not in {"Event", "Secret"}] == []
    assert k > 15


async def test_what_the_cluster_insists_on_is_not_written_again(api):
    """A webhook that sets another grace period is taken for granted, and a hand edit elsewhere is repaired."""
    create = api.create

    async def changed(obj, **keys):
        if obj["kind"] == "Deployment":
            obj = copy.deepcopy(obj)
            obj["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 7
        return await create(obj, **keys)

    api.create = changed
    async with operator(api) as made:
        await to_rest(api, made)
        pods = api.at("Deployment", "g-decode")["spec"]["template"]["spec"]
        assert pods["terminationGracePeriodSeconds"] == 7
        pods["enableServiceLinks"] = True
        api.stored(api.at("Deployment", "g-decode"), "MODIFIED")
        await told(api)
        await made.reconciler.reconcile(KEY)
    assert api.at("Deployment", "g-decode")["spec"]["template"]["spec"]["enableServiceLinks"] is False


async def test_a_change_during_a_look_is_not_lost(api):
    """A number written while the look was under way is acted on by the next one."""

    class Changing(Loads):
        is_due = False

        async def read(self, pods):
            if self.is_due:
                self.is_due = False
                edit(api, "ScalingAdapter", "g-decode", replicas=2)
                await told(api)
            return await super().read(pods)

    loads = Changing()
    async with operator(api, loads) as made:
        await to_rest(api, made)
        loads.is_due = True
        api.stored(api.at("GraphDeployment", "g"), "MODIFIED")
        await told(api)
        await made.reconciler.reconcile(KEY)
        await made.reconciler.reconcile(KEY)
    assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 2


async def test_a_graph_that_vanished_is_forgotten(api):
    """Its finalizer was removed by force."""
    async with operator(api) as made:
        await to_rest(api, made)
        for identity in list(api.objects):
            api.stored(api.objects.pop(identity), "DELETED")
        await told(api)
        await made.reconciler.reconcile(KEY)
        assert made.cluster.known() == []


async def test_the_routers_secret_is_made_once_before_them(api):
    """Routers refer to it by name; it is random, belongs to the graph, and is never written again."""
    async with operator(api) as made:
        await to_rest(api, made)
    kinds = [kind for verb, kind, _ in api.writes if verb == "create"]
    assert kinds.index("Secret") < kinds.index("Deployment")
    secret = next(each for each in api.objects.values() if each["kind"] == "Secret")
    assert len(secret["stringData"]["secret"]) == 43
    assert secret["metadata"]["ownerReferences"][0]["name"] == "g"
    pods = api.at("Deployment", "g-frontend")["spec"]["template"]["spec"]
    reference = {"name": secret["metadata"]["name"], "key": "secret"}
    variable = {"name": "PENSTOCK_GRAPH_SECRET", "valueFrom": {"secretKeyRef": reference}}
    assert variable in pods["containers"][0]["env"]
    assert pods["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}
    workers = api.at("Deployment", "g-decode")["spec"]["template"]["spec"]["containers"][0]
    assert "PENSTOCK_GRAPH_SECRET" not in {each["name"] for each in workers["env"]}


async def test_a_routers_secret_that_is_gone_comes_back(api):
    """No watch shows Secrets; a router's pod that cannot start without it does, and an Event says what to do."""
    async with operator(api) as made:
        await to_rest(api, made)
        [name] = [each[2] for each in api.objects if each[0] == "Secret"]
        del api.objects["Secret", "ns", name]
        waiting = router()
        words = {"reason": "CreateContainerConfigError", "message": f'secret "{name}" not found'}
        waiting["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": words}}]
        await api.create(waiting, field_manager="kubelet")
        await told(api)
        await made.reconciler.reconcile(KEY)
    assert ("Secret", "ns", name) in api.objects
    notes = [each["message"] for key, each in api.objects.items() if key[0] == "Event"]
    assert any(f"Secret {name} was missing" in each and "rollout restart" in each for each in notes)
