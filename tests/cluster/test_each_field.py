"""Fields of the manifest are changed in turn, under load and with real routers and workers: no request is lost."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
from client_load import ClientLoad
from manifest_fields import GIVEN, candidates, leaves
from node_agent import NodeAgent, addresses
from operating import edit, events, graph, process, says, until

from penstock.api import GraphDeployment
from penstock.core.errors import InvalidObjectError
from penstock.kube.kinds import CONFIG_MAP, DEPLOYMENT, GRAPH_DEPLOYMENT, POD
from penstock_operator.resources import BuildContext, children

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

NAMESPACE = "default"
ROLLED_S = 180.0
CONTEXT = BuildContext(owner_uid="u", namespace=NAMESPACE)
LARGE = ("engine", "planner", "router", "services")
"""Sections of the manifest with a test of their own; the others share one."""


def manifest():
    """Return a small graph."""
    worker = {"gpusPerReplica": 1, "terminationGracePeriodSeconds": 60}
    return graph(
        NAMESPACE,
        model={"name": "tiny", "servedName": "s", "contextTokens": 8192},
        services={
            "frontend": {"role": "router", "terminationGracePeriodSeconds": 60},
            "prefill": {"role": "prefill", "scaling": {}, **worker},
            "decode": {"role": "decode", "scaling": {}, **worker},
        },
        planner={"maxGpuBudget": 8},
    )


class Place:
    """A graph whose pods run, its operator, and clients."""

    def __init__(self, client, load):
        self.load = load
        self.lost = {}
        self._client = client

    async def change(self, name, spec):
        """Carry out an edit; note what the load lost meanwhile under the edit's name."""
        before, answered = len(self.load.lost), self.load.answered
        await self.edit(spec)
        await until(self.rests, f"{name} is carried out", timeout_s=ROLLED_S)
        done = self.load.answered

        async def served():
            return self.load.answered >= done + 6

        await until(served, f"requests after {name}", timeout_s=ROLLED_S)
        if lost := self.load.lost[before:]:
            self.lost[name] = lost
        log.info("%s: %d answered, %d lost", name, self.load.answered - answered, len(lost))

    async def edit(self, spec):
        """Edit the graph."""
        await edit(self._client, NAMESPACE, spec)

    async def warnings(self):
        """Return the Events that say beforehand that requests will be refused."""
        return await events(self._client, NAMESPACE, "RequestsRefused")

    async def rests(self):
        """Return whether the newest specification serves, and nothing comes or goes."""
        live = await self._client.get(GRAPH_DEPLOYMENT, "g", namespace=NAMESPACE)
        status = live.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        if (
            status.get("observedGeneration") != live["metadata"]["generation"]
            or status.get("phase") != "Ready"
            or conditions.get("Progressing") != "False"
        ):
            return False
        workloads = (await self._client.list(DEPLOYMENT, namespace=NAMESPACE)).items
        pods = (await self._client.list(POD, namespace=NAMESPACE)).items
        return len(pods) == sum(each["spec"]["replicas"] for each in workloads) and all(
            map(_rests, workloads)
        )


def _rests(workload):
    """Whether every pod of a Deployment is ready and of its newest template."""
    spec, status = workload["spec"], workload["status"]
    numbers = {spec["replicas"], status.get("updatedReplicas"), status.get("availableReplicas")}
    return len(numbers) == 1 and status["observedGeneration"] == workload["metadata"]["generation"]


@pytest.fixture
async def place(own, tmp_path):
    """A small graph at rest, under load."""
    plane, client = own
    plane.start_controllers()
    named = CONFIG_MAP.of({"name": "c", "namespace": NAMESPACE}, data={"B": "2"})
    await client.create(named, field_manager="test")
    load = ClientLoad(client, NAMESPACE, "g-frontend", model="s")
    place = Place(client, load)
    async with contextlib.AsyncExitStack() as stack:
        free = stack.enter_context(addresses())
        agent = await stack.enter_async_context(NodeAgent(plane, client, free, tmp_path).on(gpus=16))
        _, port = stack.enter_context(process(plane.kubeconfig, NAMESPACE))
        await until(says(port, "/readyz"), "an operator", timeout_s=90)
        await client.create(manifest(), field_manager="test")
        await until(place.rests, "a graph that serves", timeout_s=ROLLED_S)
        await stack.enter_async_context(load.on())
        yield place
    assert agent.crashed == []


AGREED = {
    "tiers on": {"router": {"tiers": {"enabled": True}}},
    "a longer lease": {"lease": {"durationSeconds": 60}},
    "an alias": {"model": {"aliases": ["t"]}},
    "its turn": {"model": {"servedName": "t", "aliases": ["s"]}},
}
AND_BACK = {
    "tiers off": {"router": {"tiers": {"enabled": False}}},
    "a shorter lease": {"lease": {"durationSeconds": 30}},
    "an adapter": {"model": {"adapters": [{"name": "sql", "path": "/sql"}]}},
    "no adapter": {"model": {"adapters": None}},
    "the first name": {"model": {"servedName": "s", "aliases": ["t"]}},
    "no alias": {"model": {"aliases": None}},
}


async def test_what_both_sides_must_agree_on_is_changed_without_a_lost_request(place):
    """Tiers on, a longer lease, another name by way of an alias; a setting of the routers that is live."""
    for name, spec in AGREED.items():
        await place.change(name, spec)
    await place.change("a threshold", {"router": {"admission": {"retryAfterSeconds": 2}}})
    assert place.lost == {}
    assert await place.warnings() == []


@pytest.mark.nightly
async def test_it_is_changed_back_without_a_lost_request(place):
    """Tiers off, a shorter lease, an adapter and none, an alias that goes."""
    for name, spec in (AGREED | AND_BACK).items():
        await place.change(name, spec)
    assert place.lost == {}
    assert await place.warnings() == []


@pytest.mark.nightly
async def test_what_must_lose_requests_is_said_before_the_first_is_lost(place):
    """An Event names the new name; once all is rolled it is served."""
    await place.edit({"model": {"servedName": "other"}})

    async def told():
        return [each for each in await place.warnings() if "from s to other" in each["message"]]

    await until(told, "an Event")
    assert place.load.lost == []
    place.load.model = "other"
    await until(place.rests, "the edit is carried out", timeout_s=ROLLED_S)
    await place.change("requests of neither name", {"inheritedAnnotations": ["a"]})
    place.lost.clear()
    await place.change("something else", {"env": [{"name": "A", "value": "2"}]})
    assert place.lost == {}


@pytest.mark.nightly
@pytest.mark.parametrize("change", [{"model": {"name": "other"}}, {"runtime": "vllm"}])
async def test_what_no_order_carries_out_is_refused(place, change):
    """Workers that cannot use each other's KV: the API server refuses the change, and what serves goes on."""
    with pytest.raises(InvalidObjectError, match="immutable"):
        await place.edit(change)
    await place.change("something else", {"inheritedAnnotations": ["a"]})
    assert place.lost == {}


VALUES = {
    "engine.blockTokens": 32,
    "engine.kvBlocks": 8192,
    "engine.maxBatchTokens": 4096,
    "engine.maxRunningRequests": 128,
    "router.decodeQueue.maxWaitSeconds": 60,
    "router.health.stallRealSeconds": 30,
    "router.kvEventsPort": 5557,
    "services.frontend.args": ["--shutdown-grace", "50"],
    "services.frontend.livenessTimeoutSeconds": 60,
    **{f"services.{each}.args": ["--kv-link-latency-ms", "6"] for each in ("prefill", "decode")},
    **{f"services.{each}.livenessTimeoutSeconds": 60 for each in ("prefill", "decode")},
}
"""Where the type suggests what nobody would write."""

LEFT_OUT = {
    "model.name": "immutable, above",
    "model.servedName": "told, above",
    "runtime": "immutable, above",
    "operatorClass": "immutable",
    "paused": "carries nothing out from then on",
    "router.auth.apiKeysSecret": "asks clients for a key from then on",
    "router.tiers.keysSecret": "names a Secret of keys",
    "router.tokenizer": "names files of a model",
}


def nested(path, value):
    """Return a patch of one field."""
    *above, last = path.split(".")
    patch = {last: value}
    for key in reversed(above):
        patch = {key: patch}
    return patch


def edits(section):
    """Yield path and patch of each field of a section, each valid with all that came before; `others` are of no large one."""
    raw = manifest()
    for keys, kind, value in leaves(GraphDeployment.model_validate(raw).spec):
        path = ".".join(keys)
        if path in LEFT_OUT or section != (keys[0] if keys[0] in LARGE else "others"):
            continue
        given = VALUES.get(path, GIVEN.get(keys[-1]))
        for each in candidates(kind, value) if given is None else [given]:
            changed = copy.deepcopy(raw)
            at = changed["spec"]
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            at[keys[-1]] = each
            with contextlib.suppress(ValueError):
                children(GraphDeployment.model_validate(changed), CONTEXT, replicas={}, unavailable={})
                raw = changed
                yield path, nested(path, each)
                break


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("section", [*LARGE, "others"])
async def test_no_field_of_the_manifest_loses_a_request_when_it_changes(place, section):
    """One after the other, each on top of those before it."""
    made = 0
    for path, patch in edits(section):
        await place.change(path, patch)
        made += 1
    log.info("%s: %d fields", section, made)
    assert place.lost == {}
