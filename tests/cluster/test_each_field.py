"""Fields of the manifest are changed in turn, under load and with real routers and workers: no request is lost."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
from manifest_fields import GIVEN, candidates, leaves
from operating import until
from serving import NAMESPACE, ROLLED_S, manifest

from penstock.api import GraphDeployment
from penstock.core.errors import InvalidObjectError
from penstock_operator.resources import BuildContext, children

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

CONTEXT = BuildContext(owner_uid="u", namespace=NAMESPACE)
LARGE = ("engine", "planner", "router", "services")
"""Sections of the manifest with a test of their own; the others share one."""


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


async def test_what_both_sides_must_agree_on_is_changed_without_a_lost_request(serving):
    """Tiers on, a longer lease, another name by way of an alias; a setting of the routers that is live."""
    for name, spec in AGREED.items():
        await serving.change(name, spec)
    await serving.change("a threshold", {"router": {"admission": {"retryAfterSeconds": 2}}})
    assert serving.lost == {}
    assert await serving.warnings() == []


@pytest.mark.nightly
async def test_it_is_changed_back_without_a_lost_request(serving):
    """Tiers off, a shorter lease, an adapter and none, an alias that goes."""
    for name, spec in (AGREED | AND_BACK).items():
        await serving.change(name, spec)
    assert serving.lost == {}
    assert await serving.warnings() == []


@pytest.mark.nightly
async def test_what_must_lose_requests_is_said_before_the_first_is_lost(serving):
    """An Event names the new name; once all is rolled it is served."""
    await serving.edit({"model": {"servedName": "other"}})

    async def told():
        return [each for each in await serving.warnings() if "from s to other" in each["message"]]

    await until(told, "an Event")
    assert serving.load.lost == []
    serving.load.model = "other"
    await until(serving.rests, "the edit is carried out", timeout_s=ROLLED_S)
    await serving.change("requests of neither name", {"inheritedAnnotations": ["a"]})
    serving.lost.clear()
    await serving.change("something else", {"env": [{"name": "A", "value": "2"}]})
    assert serving.lost == {}


@pytest.mark.nightly
@pytest.mark.parametrize("change", [{"model": {"name": "other"}}, {"runtime": "vllm"}])
async def test_what_no_order_carries_out_is_refused(serving, change):
    """Workers that cannot use each other's KV: the API server refuses the change, and what serves continues."""
    with pytest.raises(InvalidObjectError, match="immutable"):
        await serving.edit(change)
    await serving.change("something else", {"inheritedAnnotations": ["a"]})
    assert serving.lost == {}


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
    "router.auth.apiKeysFile": "names a file, which the pods lack",
    "router.auth.apiKeysSecret": "asks clients for a key from then on",
    "router.tiers.keysFile": "names a file, which the pods lack",
    "router.tiers.keysSecret": "names a Secret of keys",
    "router.gateway.enabled": "needs the kinds of the Gateway API Inference Extension, which this API server lacks",
    "router.tokenizer": "names files of a model",
    "services.decode.nodesPerReplica": "needs LeaderWorkerSets, which this API server lacks",
    "services.prefill.nodesPerReplica": "needs LeaderWorkerSets, which this API server lacks",
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
async def test_no_field_of_the_manifest_loses_a_request_when_it_changes(serving, section):
    """One after the other, each on top of those before it."""
    made = 0
    for path, patch in edits(section):
        await serving.change(path, patch)
        made += 1
    log.info("%s: %d fields", section, made)
    assert serving.lost == {}
