"""What a graph names of a host's files is refused where its pods lack them."""

from __future__ import annotations

import pytest

from penstock_operator.resources import absent_files

KEYS = {"router": {"tiers": {"enabled": True, "keysFile": "/keys/tiers"}}}
SIMULATED = {"runtime": "simulated"}


def mounted(path, source, **pod):
    """A podTemplate that mounts a volume."""
    main = {"name": "main", "volumeMounts": [{"name": "own", "mountPath": path}]}
    return {"podTemplate": {"spec": {"containers": [main], "volumes": [{"name": "own", **source}], **pod}}}


CLAIM = {"persistentVolumeClaim": {"claimName": "files"}}


@pytest.fixture
def absent(build, objects):
    """Return a function that finds what pods of the changed base graph lack, by its key."""

    def find(**changes):
        found = absent_files(build(**changes), objects(**changes).values())
        return {each.path: each.message for each in found}

    return find


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        (KEYS, "router.tiers.keysFile", "/keys/tiers is not in the pods of service frontend; name a Secret in keysSecret"),
        ({"router": {"auth": {"apiKeysFile": "keys"}}}, "router.auth.apiKeysFile", "name a Secret in apiKeysSecret"),
        ({"router": {"tokenizer": "/t.json"}}, "router.tokenizer", "mount it by that service's podTemplate"),
        ({"model": {"name": "/models/llama"}}, "model.name", "cacheMount"),
        ({"model": {"adapters": [{"name": "a", "path": "/sql"}]}}, "model.adapters[0].path", "cacheMount"),
        ({"engine": {"pythonEnvironment": "/venv"}}, "engine.pythonEnvironment", "an image that holds it"),
        ({"planner": {"memory": "./memory.json"}}, "planner.memory", "not a ConfigMap's name"),
        ({"planner": {"sla": {"profile": "out/profile"}}}, "planner.sla.profile", "not a ConfigMap's name"),
        ({**SIMULATED, "engine": {"profile": "mine.yaml"}}, "engine.profile", "/tmp"),
        ({**SIMULATED, "services": {"decode": {"profile": "mine.yaml"}}}, "services.decode.profile", "mine.yaml"),
    ],
)  # fmt: skip
def test_a_file_of_some_host_is_told_with_its_remedy(absent, changes, key, words):
    """Key, path and what to do: the pod would start and end repeatedly."""
    found = absent(**changes)
    assert set(found) == {f"spec.{key}"}
    assert words.removeprefix("/tmp") in found[f"spec.{key}"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": {"tiers": {"enabled": False, "keysFile": "/keys/tiers"}}},
        {"router": {"tiers": {"enabled": True, "keysFile": "/keys/tiers", "keysSecret": "tiers"}}},
        {"router": {"auth": {"apiKeysFile": "/keys", "apiKeysSecret": "keys"}}},
        {**KEYS, "services": {"frontend": mounted("/keys", CLAIM)}},
        {**KEYS, "services": {"frontend": {"image": "registry/router:1"}}},
        {
            **KEYS,
            "services": {
                "frontend": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "own"}]}}}
            },
        },
        {**SIMULATED, "router": {"tokenizer": "simulated"}},
        {**SIMULATED, "model": {"name": "/models/llama"}, "image": "registry/own:1", "engine": {"profile": "a.yaml"}},
        {**SIMULATED, "model": {"name": "/models/llama", "adapters": [{"name": "a", "path": "/sql"}]}},
        {"model": {"name": "org/llama", "adapters": [{"name": "a", "path": "org/sql"}]}},
        {
            "model": {"name": "/models/llama"},
            "nodePools": {"h100": {"cacheMount": "/models"}},
            "services": {"prefill": {"nodePool": "h100"}, "decode": {"nodePool": "h100"}},
        },
        {"planner": {"memory": "memory.json", "sla": {"profile": "llama-h100"}}},
        {"planner": {"enabled": False, "memory": "./memory.json"}},
    ],
)  # fmt: skip
def test_what_the_pods_have_or_nothing_reads_is_no_problem(absent, changes):
    """A volume, an image of one's own, a Secret in its place, a name of a hub, a setting that is off."""
    assert absent(**changes) == {}


@pytest.mark.parametrize(("pod", "is_there"), [({}, False), ({"initContainers": [{"name": "fetch", "image": "i"}]}, True)])  # fmt: skip
def test_an_empty_folder_holds_a_file_where_an_init_container_puts_it(absent, pod, is_there):
    """Without one it is empty when the process starts."""
    service = mounted("/keys", {"emptyDir": {}}, **pod)
    found = absent(**KEYS, services={"frontend": service})
    assert (found == {}) is is_there


def test_a_relative_file_is_in_the_working_folder(absent):
    """The image's is /tmp; a podTemplate may set another, where its volume is."""
    service = mounted("/profiles", CLAIM)
    service["podTemplate"]["spec"]["containers"][0]["workingDir"] = "/profiles"
    changes = {**SIMULATED, "engine": {"profile": "mine.yaml"}}
    services = {"prefill": service, "decode": service}
    assert absent(**changes, services=services) == {}


def test_dynamos_frontend_reads_no_file_of_penstocks_router(absent):
    """Its own flags configure it."""
    assert absent(runtime="dynamo") == {}
