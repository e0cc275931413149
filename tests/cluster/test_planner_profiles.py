"""Mode sla against a real API server: the profile's ConfigMap comes, changes and goes while the planner runs."""

from __future__ import annotations

import dataclasses
import json

import pytest
from accounts import PLANNER, account
from operating import until
from planning import is_now

from penstock.api import Role
from penstock.engine.profiles.performance import graph_performance
from penstock.kube.client import KubeClient
from penstock.kube.kinds import CONFIG_MAP, GRAPH_DEPLOYMENT
from penstock_planner.cluster.fleet import parse
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory, RoleMemory
from penstock_planner.learnt import LearnedStateExport, as_json

pytestmark = pytest.mark.cluster

SLA = {"mode": "sla", "sla": {"profile": "fast"}}


async def profile_of(world):
    """The true profile of the world's engines."""
    return graph_performance(
        parse(await world.client.get(GRAPH_DEPLOYMENT, "llama", namespace=world.namespace)).spec
    )


async def keep(world, text, name="fast", key="profile.json"):
    """Write a ConfigMap."""
    obj = CONFIG_MAP.of({"name": name, "namespace": world.namespace}, data={key: text})
    await world.client.apply(obj, field_manager="penstock-profiler")


async def message(world):
    """The message of PlannerActive."""
    conditions = (await world.status()).get("conditions", [])
    return next((each["message"] for each in conditions if each["type"] == "PlannerActive"), "")


def decided_by(world):
    """KV cache, in tokens, of the decode engine of each profile that the ledger's headers say was planned by, in order."""
    headers = [each for each in world.ledger().records if each.get("config", {}).get("performance")]
    return list(dict.fromkeys(each["config"]["performance"]["decode"]["kv_tokens"] for each in headers))


async def test_a_profile_that_comes_changes_and_goes_is_followed_without_a_restart(world):
    """The condition says what to run; the ledger says by which profile was decided; the replicas never shrink."""
    await world.make_graph(**SLA)
    profile = None
    async with world.planning(profile_poll_s=0.2):
        await until(lambda: is_now(world.reason(), "ProfileMissing"), "the profile is missing")
        assert "apply a ProfileRequest with graph: llama, configMap: fast" in await message(world)
        await keep(world, "{")
        await until(lambda: is_now(world.reason(), "ProfileInvalid"), "the profile is invalid")
        profile = await profile_of(world)
        await keep(world, json.dumps(dataclasses.asdict(profile)))
        await until(lambda: is_now(_is_planned(world), True), "it is planned")
        kv_tokens = profile.decode.kv_tokens
        await until(_decided(world, [kv_tokens]), "a decision by it")
        halved = dataclasses.replace(profile.decode, kv_tokens=kv_tokens / 2)
        await keep(world, json.dumps(dataclasses.asdict(dataclasses.replace(profile, decode=halved))))
        await until(_decided(world, [kv_tokens, kv_tokens / 2]), "a decision by the changed one")
        await world.edit("decode", 3)
        await world.client.delete(CONFIG_MAP, "fast", namespace=world.namespace)
        await until(lambda: is_now(world.reason(), "ProfileMissing"), "the profile is gone")
        assert await world.desired("decode") == 3


async def test_a_graph_without_a_profile_disturbs_no_other(world):
    """One waits, the other is planned."""
    await world.make_graph(**SLA)
    await world.make_graph("other")
    async with world.planning(profile_poll_s=0.2):
        await until(lambda: is_now(world.reason(), "ProfileMissing"), "the one waits")
        await until(lambda: is_now(world.reason("other"), "Observing"), "the other is planned")


async def test_a_new_graph_starts_from_what_another_planner_had_learnt(world):
    """It waits for the ConfigMap that planner.memory names; its ledger begins with what that holds."""
    known = AdaptiveMemory(roles={Role.PREFILL: RoleMemory(startups_s=(77.0,))})
    gpus = {Role.PREFILL: 1, Role.DECODE: 1}
    export = as_json(LearnedStateExport(model="m", gpus=gpus, memory=to_plain({"adaptive": known})))
    await world.make_graph(mode="adaptive", memory="learnt")
    async with world.planning(profile_poll_s=0.2):
        await until(lambda: is_now(world.reason(), "Misconfigured"), "the ConfigMap is missing")
        assert "spec.planner.memory: ConfigMap learnt does not exist" in await message(world)
        await keep(world, export.decode(), "learnt", "memory.json")
        await until(lambda: is_now(_is_planned(world), True), "it is planned")
    header = world.ledger().records[0]
    assert header["state"]["learned"]["adaptive"]["roles"]["prefill"]["startups_s"] == [77.0]


async def test_get_is_all_that_the_planner_needs_of_config_maps(crds, world):
    """With the rights that the doctor asks for, no more."""
    path = account(crds, world.namespace, "planner", PLANNER)
    await world.make_graph(**SLA)
    await keep(world, json.dumps(dataclasses.asdict(await profile_of(world))))
    admin, world.client = world.client, await KubeClient.connect(kubeconfig=path)
    bound = world.client
    try:
        async with world.planning(profile_poll_s=0.2):
            world.client = admin
            await until(lambda: is_now(_is_planned(world), True), "it is planned")
    finally:
        world.client = admin
        await bound.close()


async def _is_planned(world):
    return await world.reason() in {"Observing", "MetricsMissing", "Adjusting"}


def _decided(world, expected):
    async def check():
        return decided_by(world) == expected

    return check
