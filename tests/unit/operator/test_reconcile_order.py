"""In which order routers and workers learn a setting on which they must agree."""

from __future__ import annotations

import copy

import pytest
import yaml
from graph_harness import KEY, conditions, edit, operator, to_rest, told

from penstock.runtimes.engine_flags import granted_lease_s, names_answered

WORKERS = ("g-decode", "g-prefill")


def roll_out(api, name, *, done=True):
    """Let a Deployment's controller have seen its template, and have rolled it."""
    live = api.at("Deployment", name)
    generation = live["metadata"]["generation"]
    replicas = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1 if done else 0}
    live["status"] = {"observedGeneration": generation, **replicas}
    api.stored(live, "MODIFIED")


def with_tiers(api, name):
    """Return whether a service's pods are to know tiers: workers by their flag, routers by the Deployment's digest."""
    return (
        "--scheduling-policy"
        in api.at("Deployment", name)["spec"]["template"]["spec"]["containers"][0]["args"]
    )


def routers_tiers(api):
    """Return what routers read."""
    [text] = api.at("ConfigMap", "g-router")["data"].values()
    return (yaml.safe_load(text)["spec"]["router"].get("tiers") or {}).get("enabled", False)


async def look(api, made):
    """Reconcile twice, so that what the first wrote is seen."""
    for _ in range(2):
        await told(api)
        await made.reconciler.reconcile(KEY)
    await told(api)


async def at_rest(api, made):
    """Make all Deployments run what they are wanted to."""
    await to_rest(api, made)
    for name in ("g-frontend", *WORKERS):
        roll_out(api, name)
    await to_rest(api, made)


async def test_tiers_are_switched_on_at_workers_first(api):
    """Routers keep file and pods until every worker schedules by priority, which refuses no request without one."""
    async with operator(api) as made:
        await at_rest(api, made)
        before = copy.deepcopy(api.at("Deployment", "g-frontend")["spec"])
        edit(api, "GraphDeployment", "g", router={"tiers": {"enabled": True}})
        for name in WORKERS:  # decode rolls before prefill
            await look(api, made)
            assert with_tiers(api, name)
            assert not routers_tiers(api)
            assert api.at("Deployment", "g-frontend")["spec"] == before
            roll_out(api, name, done=False)
            await look(api, made)
            assert not routers_tiers(api)
            roll_out(api, name)
        await look(api, made)
        assert routers_tiers(api)
        assert api.at("Deployment", "g-frontend")["spec"] != before


async def test_tiers_are_switched_off_at_routers_first(api):
    """Workers schedule by priority until no router sends one."""
    api.at("GraphDeployment", "g")["spec"]["router"] = {"tiers": {"enabled": True}}
    async with operator(api) as made:
        await at_rest(api, made)
        assert routers_tiers(api)
        edit(api, "GraphDeployment", "g", router={"tiers": {"enabled": False}})
        await look(api, made)
        assert not routers_tiers(api)
        assert all(with_tiers(api, name) for name in WORKERS)
        roll_out(api, "g-frontend", done=False)
        await look(api, made)
        assert all(with_tiers(api, name) for name in WORKERS)
        roll_out(api, "g-frontend")
        await look(api, made)
        assert not with_tiers(api, "g-decode")
        roll_out(api, "g-decode")
        await look(api, made)
        assert not with_tiers(api, "g-prefill")


def counted_s(api):
    """Return the lease that routers count with."""
    [text] = api.at("ConfigMap", "g-router")["data"].values()
    return yaml.safe_load(text)["spec"].get("lease", {}).get("durationSeconds", 30)


def granted_s(api):
    """Return the lease that prefill is to grant."""
    template = api.at("Deployment", "g-prefill")["spec"]["template"]["spec"]
    return granted_lease_s(template["containers"][0]["args"])


async def test_a_longer_lease_is_granted_before_routers_count_with_it(api):
    """A router that counts with too much would trust blocks that hold another prompt by then."""
    async with operator(api) as made:
        await at_rest(api, made)
        edit(api, "GraphDeployment", "g", lease={"durationSeconds": 60})
        for name in WORKERS:  # decode rolls before prefill
            await look(api, made)
            assert counted_s(api) == 30
            roll_out(api, name, done=False)
            await look(api, made)
            assert counted_s(api) == 30
            roll_out(api, name)
        assert granted_s(api) == 60
        await look(api, made)
        assert counted_s(api) == 60


async def test_a_shorter_lease_is_counted_with_before_it_is_granted(api):
    """Prefill keeps its pods until every router runs with the shorter one."""
    api.at("GraphDeployment", "g")["spec"]["lease"] = {"durationSeconds": 60}
    async with operator(api) as made:
        await at_rest(api, made)
        assert (counted_s(api), granted_s(api)) == (60, 60)
        edit(api, "GraphDeployment", "g", lease={"durationSeconds": 40})
        await look(api, made)
        roll_out(api, "g-decode")
        await look(api, made)
        assert (counted_s(api), granted_s(api)) == (40, 60)
        roll_out(api, "g-frontend", done=False)
        await look(api, made)
        assert granted_s(api) == 60
        roll_out(api, "g-frontend")
        await look(api, made)
        assert granted_s(api) == 40


def edit_adapters(api, *names):
    """Give the model these adapters."""
    model = api.at("GraphDeployment", "g")["spec"]["model"]
    adapters = [{"name": name, "path": f"/adapters/{name}"} for name in names]
    edit(api, "GraphDeployment", "g", model=model | {"adapters": adapters})


def served(api):
    """Return the adapters that routers serve."""
    [text] = api.at("ConfigMap", "g-router")["data"].values()
    return [each["name"] for each in yaml.safe_load(text)["spec"]["model"].get("adapters", ())]


def loaded(api, name):
    """Return the adapters that a service's pods are to load."""
    template = api.at("Deployment", name)["spec"]["template"]["spec"]
    _, *adapters = names_answered(template["containers"][0]["args"])
    return adapters


async def test_an_adapter_is_loaded_before_routers_serve_its_name(api):
    """A request that reached a worker without it would be refused."""
    async with operator(api) as made:
        await at_rest(api, made)
        edit_adapters(api, "sql", "law")
        for name in WORKERS:  # decode rolls before prefill
            await look(api, made)
            assert loaded(api, name) == ["sql", "law"]
            assert served(api) == []
            roll_out(api, name, done=False)
            await look(api, made)
            assert served(api) == []
            roll_out(api, name)
        await look(api, made)
        assert served(api) == ["sql", "law"]


async def test_an_adapter_is_kept_until_no_router_serves_its_name(api):
    """Workers keep their pods until every router has forgotten it."""
    edit_adapters(api, "sql", "law")
    async with operator(api) as made:
        await at_rest(api, made)
        edit_adapters(api, "law")
        await look(api, made)
        assert served(api) == ["law"]
        roll_out(api, "g-frontend", done=False)
        await look(api, made)
        assert [loaded(api, name) for name in WORKERS] == [["sql", "law"]] * 2
        roll_out(api, "g-frontend")
        for name in WORKERS:
            await look(api, made)
            assert loaded(api, name) == ["law"]
            roll_out(api, name)


async def test_a_model_is_renamed_by_an_alias_without_an_order(api):
    """Both names are answered to before and after, so nothing waits and no Event warns; at once, one does."""
    model = api.at("GraphDeployment", "g")["spec"]["model"]
    old = model.get("servedName") or model["name"]
    api.at("GraphDeployment", "g")["spec"]["model"] = model | {"aliases": ["new"]}
    async with operator(api) as made:
        await at_rest(api, made)
        edit(api, "GraphDeployment", "g", model=model | {"servedName": "new", "aliases": [old]})
        await look(api, made)
        assert not [
            key for key, each in api.objects.items() if key[0] == "Event" and "refused" in each["message"]
        ]
        for name in (*WORKERS, "g-frontend"):
            roll_out(api, name)
            await look(api, made)
        edit(api, "GraphDeployment", "g", model=model | {"servedName": "newer", "aliases": [old]})
        await look(api, made)
    notes = [each["message"] for key, each in api.objects.items() if key[0] == "Event"]
    assert any("add newer to model.aliases first" in each for each in notes)


async def test_two_settings_of_opposite_orders_are_told(api):
    """Both wait for nobody: the tiers' order holds, and the Event says what to do instead."""
    api.at("GraphDeployment", "g")["spec"]["lease"] = {"durationSeconds": 60}
    async with operator(api) as made:
        await at_rest(api, made)
        edit(api, "GraphDeployment", "g", lease={"durationSeconds": 40}, router={"tiers": {"enabled": True}})
        for name in WORKERS:
            await look(api, made)
            assert not routers_tiers(api)
            roll_out(api, name)
        await look(api, made)
    assert routers_tiers(api)
    assert (counted_s(api), granted_s(api)) == (40, 40)
    notes = [each["message"] for key, each in api.objects.items() if key[0] == "Event"]
    assert any("change one after the other" in each for each in notes)


@pytest.mark.parametrize(("name", "is_told"), [("other", True), ("tiny", False)])
async def test_a_changed_served_name_is_told_before_it_refuses_requests(api, name, is_told):
    """At once, no order loses none: the Event says what to do instead."""
    async with operator(api) as made:
        await at_rest(api, made)
        edit(api, "GraphDeployment", "g", model={"name": "tiny", "servedName": name})
        await look(api, made)
    notes = [
        each["message"]
        for key, each in api.objects.items()
        if key[0] == "Event" and each["reason"] == "RequestsRefused"
    ]
    assert bool(notes) is is_told
    assert all("from tiny to other" in each and "add other to model.aliases first" in each for each in notes)


async def test_a_device_that_no_budget_counts_is_told_when_its_pods_are_made(api):
    """Once for each change of the pods, not at rest."""
    pod = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"acme.io/npu": 1}}}]}}

    def notes():
        return [
            (each["message"], each.get("count", 1))
            for key, each in api.objects.items()
            if key[0] == "Event" and each["reason"] == "DeviceNotCounted"
        ]

    async with operator(api) as made:
        await at_rest(api, made)
        assert notes() == []
        services = copy.deepcopy(api.at("GraphDeployment", "g")["spec"]["services"])
        services["decode"]["podTemplate"] = pod
        edit(api, "GraphDeployment", "g", services=services)
        await look(api, made)
        [(message, _)] = told_then = notes()
        assert message.startswith(
            "spec.services.decode.podTemplate.spec.containers[main].resources: acme.io/npu "
        )
        await look(api, made)
        assert notes() == told_then


def rolls_out(api):
    """Return whether the graph is said to roll out."""
    progressing = conditions(api)["Progressing"]
    return progressing["reason"] == "RollingOut"


async def test_a_restarted_operator_takes_a_changed_number_for_no_rollout(api):
    """Whether the newest generation brought a template or a number is on the workload: a restart in between knows."""
    async with operator(api) as made:
        await at_rest(api, made)
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await look(api, made)
        assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 2
    async with operator(api) as made:
        await look(api, made)
        assert not rolls_out(api)
        roll_out(api, "g-decode")
        edit(api, "GraphDeployment", "g", lease={"durationSeconds": 60})
        await look(api, made)
        assert rolls_out(api)
    async with operator(api) as made:
        await look(api, made)
        assert rolls_out(api)


async def test_a_template_that_is_put_right_rolls_out_for_a_restarted_operator_too(api):
    """What another hand changed and the operator changed back is a rollout until the controller has seen it."""
    async with operator(api) as made:
        await at_rest(api, made)
        live = api.at("Deployment", "g-decode")
        live["spec"]["template"]["spec"]["containers"][0]["image"] = "another"
        live["metadata"]["generation"] += 1
        api.stored(live, "MODIFIED")
        roll_out(api, "g-decode")
        await look(api, made)
        notes = [each["message"] for (kind, _, _), each in api.objects.items() if kind == "Event"]
        assert any("[name=main].image: expected" in each and 'found "another"' in each for each in notes), (
            notes
        )
    async with operator(api) as made:
        await look(api, made)
        assert rolls_out(api)


@pytest.mark.parametrize("text", ["99", "soon", None])
async def test_a_template_generation_that_cannot_be_is_taken_for_unknown(api, text):
    """A hand's edit, or an older release's workload: the newest generation counts until a template is written."""
    async with operator(api) as made:
        await at_rest(api, made)
        live = api.at("Deployment", "g-decode")
        live["metadata"]["annotations"] |= {"penstock.dev/template-generation": text}
        live["metadata"]["generation"] += 1
        api.stored(live, "MODIFIED")
        await look(api, made)
        assert rolls_out(api)
        roll_out(api, "g-decode")
        await look(api, made)
        assert not rolls_out(api)
