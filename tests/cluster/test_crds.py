from __future__ import annotations

import json
import random
import re
import ssl
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml
from manifest_table import SCHEMA, TABLE, breaks_rules_alone, cel_says, manifest_of, merged, python_says
from operating import set_status

from penstock.api import GpuPool, GraphDeployment, ProfileRequest, ScalingAdapter
from penstock.kube.kinds import GRAPH_DEPLOYMENT

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))

DRY = "default"
"""Namespace of what is only judged, never stored."""

GRAPHS = "/apis/penstock.dev/v1alpha1/namespaces/{}/graphdeployments"


def manifest(patch, namespace):
    """The table's base in ``namespace``, changed by an entry's patch."""
    return manifest_of({"metadata": {"namespace": namespace}}, patch)


def dotted(text):
    """The server writes ``services[decode]`` where the models write ``services.decode``."""
    return re.sub(r"\[([a-z][-a-z0-9]*)\]", r".\1", text)


def unordered(text):
    """Of two services that collide either may be blamed: a map has no order in CEL."""
    return dotted(text).replace("decode-b", "decode")


@pytest.fixture(name="judge")
def made_judge(crds):
    """Returns what the server says of objects in a dry run, strict as kubectl is: "" where it takes one."""
    config = yaml.safe_load(crds.kubeconfig.read_text())
    token = config["users"][0]["user"]["token"]
    server = httpx.Client(
        base_url=crds.url,
        verify=ssl.create_default_context(cafile=config["clusters"][0]["cluster"]["certificate-authority"]),
        headers={"Authorization": f"Bearer {token}"},
        params={"dryRun": "All", "fieldValidation": "Strict"},
    )

    def said(obj, patched=None):
        if patched is None:
            answer = server.post(GRAPHS.format(obj["metadata"]["namespace"]), json=obj)
        else:
            path = f"{GRAPHS.format(obj['metadata']['namespace'])}/{patched}"
            merge = {"Content-Type": "application/merge-patch+json"}
            answer = server.patch(path, content=json.dumps(obj), headers=merge)
        assert answer.status_code in {200, 201, 400, 422}, answer.text
        return "" if answer.is_success else answer.json()["message"]

    def judge(objects, patched=None):
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda obj: said(obj, patched), objects))

    with server:
        yield judge


def test_the_server_accepts_what_python_and_cel_accept(judge):
    """Each manifest at a bound."""
    said = judge([manifest(each["patch"], DRY) for each in TABLE["valid"]])
    assert {each["name"]: text for each, text in zip(TABLE["valid"], said, strict=True) if text} == {}


def missing(entry, text):
    """What the server should have said about a broken rule and did not: its key, and what the rule itself says."""
    data = manifest_of(entry["patch"])
    expected = [entry["path"]]
    if breaks_rules_alone(data):
        expected += [each.partition(": ")[2] for each in cel_says(data)]
    return [each for each in expected if unordered(each) not in unordered(text)]


def test_the_server_refuses_each_broken_rule_by_its_key_in_the_rules_words(judge):
    """Python, CEL and the server judge the same table; bounds of one key are said in the server's own words."""
    entries = [each for each in TABLE["invalid"] if each["path"] != "apiVersion"]
    said = judge([manifest(each["patch"], DRY) for each in entries])
    wrong = {each["name"]: (missing(each, text), text) for each, text in zip(entries, said, strict=True)}
    assert {name: found for name, found in wrong.items() if found[0] or not found[1]} == {}


def test_a_pod_template_takes_directives_and_has_kubernetes_shapes(judge):
    """The server takes every directive that the overlay knows, and refuses a map in place of a list where it stands."""

    def overlaid(pod_spec):
        return manifest({"spec": {"services": {"decode": {"podTemplate": {"spec": pod_spec}}}}}, DRY)

    probe = {"httpGet": {"path": "/h", "port": "http"}, "periodSeconds": 3}
    main = {"name": "main", "resources": {"limits": {"cpu": 2, "memory": "4Gi"}}, "livenessProbe": probe}
    accepted = {
        "containers": [{**main, "env": [{"name": "A", "value": "1"}, {"name": "B", "$patch": "delete"}]}],
        "nodeSelector": None,
        "tolerations": [{"$patch": "replace"}, {"operator": "Exists"}],
        "affinity": {"nodeAffinity": None, "podAntiAffinity": {"$patch": "delete"}},
        "volumes": [{"name": "m", "configMap": {"name": "c", "items": [{"key": "a", "path": "b"}]}}],
        "securityContext": {"fsGroup": 7, "sysctls": []},
        "terminationGracePeriodSeconds": 5,
        "hostNetwork": False,
    }
    said = judge([overlaid(accepted), overlaid({"containers": {"name": "main"}})])
    assert said[0] == ""
    assert "spec.services.decode.podTemplate.spec.containers" in said[1]


async def test_immutable_keys_are_refused_by_the_server(client, namespace, judge):
    """An update is refused for every immutable key that it changes, and for nothing else."""
    await client.apply(manifest({}, namespace), field_manager="test")
    entries = [each for each in TABLE["updates"] if each["paths"] != ["metadata.name"]]
    patches = [{"metadata": {"namespace": namespace}} | each["patch"] for each in entries]
    for each, text in zip(entries, judge(patches, "llama"), strict=True):
        assert [path for path in each["paths"] if path not in dotted(text)] == [], text
        assert bool(each["paths"]) == ("is immutable; keep it, or make a new graph" in text), text


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
async def test_samples_are_accepted_and_mean_the_same(client, crds, path):
    """What the server stores of a sample, the models read as the sample itself."""
    kinds = {each.__name__: each for each in (GpuPool, GraphDeployment, ProfileRequest, ScalingAdapter)}
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if document.get("apiVersion") != GRAPH_DEPLOYMENT.api_version or document["kind"] not in kinds:
            continue
        document["metadata"]["namespace"] = DRY
        live = await client.create(document, field_manager="test", dry_run=True)
        model = kinds[document["kind"]]
        assert model.model_validate(live).spec == model.model_validate(document).spec


MINIMAL = {
    "two services": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
    "one service": {"worker": {"role": "aggregated"}},
    "empty scaling": {"worker": {"role": "aggregated", "scaling": {}}},
}


@pytest.mark.parametrize("services", MINIMAL.values(), ids=MINIMAL)
async def test_a_stored_graph_stays_as_it_was_written(client, namespace, crds, services):
    """A later release may change a default; what may not change with it is written down."""
    spec = {"model": {"name": "m"}, "services": services, "nodePools": {"a100": {}}}
    small = GRAPH_DEPLOYMENT.of({"name": "small", "namespace": namespace}, spec=spec)
    await client.create(small, field_manager="test")
    live = await client.get(GRAPH_DEPLOYMENT, "small", namespace=namespace)
    stored = {"runtime": "vllm", "operatorClass": "penstock"}
    assert live["spec"] == {**small["spec"], **stored}
    assert live["status"] == {"observedGeneration": -1}
    assert GraphDeployment.model_validate(live).spec == GraphDeployment.model_validate(small).spec


async def test_empty_sections_take_their_defaults(client, crds):
    """An empty section equals one that is left out, however deep."""
    sections = {"router": {"tiers": {"shares": {}}}, "planner": {"metrics": {}, "sla": {}}, "lease": {}}
    bare = manifest({"spec": {"planner": None}}, DRY)
    live = await client.create(
        merged(bare, {"spec": {**sections, "engine": {"preemption": {}}}}), field_manager="test", dry_run=True
    )
    assert GraphDeployment.model_validate(live).spec == GraphDeployment.model_validate(bare).spec


async def test_null_stays_null_where_it_has_a_meaning(client, crds):
    """No ceiling is not the default ceiling."""
    unlimited = manifest({}, DRY)
    unlimited["spec"]["planner"] = {"maxGpuBudget": None}
    live = await client.create(unlimited, field_manager="test", dry_run=True)
    assert GraphDeployment.model_validate(live).spec.planner.max_gpu_budget is None


def leaves(schema, path=()):
    """Every scalar key of a schema with its path; maps, lists and Kubernetes' own podTemplate are left to their own tests."""
    for key, value in schema.get("properties", {}).items():
        if key == "podTemplate":
            continue
        if value["type"] == "object":
            yield from leaves(value, (*path, key))
        elif value["type"] != "array":
            yield (*path, key), value


def edges(schema):
    """Values at, just inside and just outside a key's bounds, and of other types."""
    if "enum" in schema:
        return [*schema["enum"], "no-such-value", 7]
    if schema["type"] == "boolean":
        return [True, False, "true", 1]
    if schema["type"] == "string":
        longest = schema.get("maxLength", 63)
        return ["", "a", "-", "A b", "a" * longest, "a" * (longest + 1), 3, "https://host:1/x", "/models"]
    step = 1 if schema["type"] == "integer" else 0.001
    bounds = [schema[each] for each in ("minimum", "maximum") if each in schema]
    return [each + by for each in bounds for by in (-step, 0, step)] + [0.5, "1", -1]


def placed(path, value):
    """A nested mapping that holds ``value`` at ``path``."""
    for key in reversed(path):
        value = {key: value}
    return value


BIG = {
    "spec": {
        "services": {
            "decode": {"nodePool": "a100", "scaling": {"minReplicas": 1, "maxReplicas": 6, "priority": 2}}
        },
        "planner": {"maxGpuBudget": 100, "adjustmentIntervalSeconds": 60},
    }
}


def disagreements(judge, candidates):
    """Manifests that the models and the server judge differently, with both verdicts."""
    verdicts = zip(candidates, map(python_says, candidates), judge(candidates), strict=True)
    return [(obj["spec"], ours, theirs) for obj, ours, theirs in verdicts if bool(ours) != bool(theirs)]


INSTALLED = {("runtime",), ("router", "policy"), ("planner", "mode"), ("planner", "timeZone")}
"""Keys that name what a package may have added, and time zones, which come with the machine or with tzdata."""


def test_models_and_server_agree_on_every_bound(judge):
    """For every scalar key, the values around its bounds and of other types get one verdict.

    Which runtimes, policies and time zones are installed the server cannot know: it judges the form of those names alone.
    """
    spec = SCHEMA["properties"]["spec"]
    keys = [(path, value) for path, value in leaves(spec) if path not in INSTALLED]
    keys += [
        (("services", "decode", *path), value)
        for path, value in leaves(spec["properties"]["services"]["additionalProperties"])
    ]
    keys += [
        (("nodePools", "a100", *path), value)
        for path, value in leaves(spec["properties"]["nodePools"]["additionalProperties"])
    ]
    assert len(keys) > 100
    base = manifest(BIG, DRY)
    candidates = [
        merged(base, {"spec": placed(path, value)}) for path, schema in keys for value in edges(schema)
    ]
    assert disagreements(judge, candidates) == []


CHANGES = (
    *(
        {"services": {name: {"role": role}}}
        for name in ("frontend", "prefill", "decode", "extra")
        for role in ("router", "prefill", "decode", "aggregated")
    ),
    *({"services": {name: None}} for name in ("frontend", "prefill", "decode")),
    *({"services": {name: {"role": "router"}}} for name in ("planner", "-x", "x.y", "a" * 47, "a" * 46, "9")),
    *({"services": {name: {"replicas": count}}} for name in ("prefill", "decode") for count in (0, 3, 6, 7)),
    *({"services": {name: {"gpusPerReplica": gpus}}} for name in ("prefill", "decode") for gpus in (2, 3, 4)),
    *({"services": {name: {"nodesPerReplica": nodes}}} for name in ("prefill", "decode") for nodes in (2, 3)),
    *(
        {"services": {name: {"scaling": {"minReplicas": low}}}}
        for name in ("prefill", "decode")
        for low in (0, 2, 6, 7)
    ),
    *({"services": {name: {"scaling": None}}} for name in ("prefill", "decode")),
    *({"services": {"decode": {"nodePool": pool}}} for pool in ("a100", "h100")),
    {"nodePools": None},
    {"nodePools": {"h100": {"cacheClaim": "models"}}},
    *({"planner": {"maxGpuBudget": most}} for most in (1, 2, 4, 5, 12)),
    *({"planner": {"minGpuBudget": least}} for least in (0, 2, 3, 8, 9)),
    *({"planner": {"enabled": on}} for on in (True, False)),
    *({"slo": {"ttft": text}} for text in ("0s", "1ms", "90s", "1h30m", "24h", "25h", "5", "2 s", "-1s", 5)),
    *(
        {"slo": {"itl": text, "attainment": share}}
        for text in (None, "50ms")
        for share in (0.4, 0.5, 0.99, 1)
    ),
    *({"planner": {"decodeKvScaleUpThreshold": up}} for up in (0.4, 0.5, 0.6)),
    *({"planner": {"metricPullingIntervalSeconds": pull}} for pull in (29.5, 30, 31)),
    {"planner": {"metrics": {"source": "prometheus"}}},
    {"planner": {"metrics": {"prometheusUrl": "http://prometheus:9090"}}},
    *({"runtime": runtime} for runtime in ("vllm", "dynamo", "simulated")),
    *({"router": {"policy": policy}} for policy in ("dualmap", "round-robin", "kv-cost")),
    *({"router": {"tokenizer": tokenizer}} for tokenizer in ("simulated", "/models/tokenizer.json")),
    {"router": {"kvEventsPort": 5557}},
    *({"engine": change} for change in ({"mocker": True}, {"requestLimit": 4})),
    *({"lease": change} for change in ({"durationSeconds": 5}, {"acknowledgeShortLease": True})),
    *(
        {"router": {"tiers": {"shares": {tier: share}}}}
        for tier in ("premium", "background")
        for share in (0.1, 0.5, 0.9)
    ),
    {
        "env": [
            {"name": "A", "value": "b"},
            {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ]
    },
    {"env": [{"name": "A", "value": "b", "valueFrom": {}}]},
    {"envFrom": [{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c", "optional": True}}]},
    {"envFrom": [{"secretRef": {"name": "s"}, "configMapRef": {"name": "c"}}]},
)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))])
def test_models_and_server_agree_on_random_graphs(judge, seed):
    """One to five random changes at once, valid and invalid, get one verdict."""
    rng = random.Random(seed)
    candidates = []
    for _ in range(150):
        obj = manifest({}, DRY)
        for change in rng.sample(CHANGES, rng.randint(1, 5)):
            obj = merged(obj, {"spec": change})
        candidates.append(obj)
    refused = sum(bool(python_says(obj)) for obj in candidates)
    assert 15 <= refused <= 145
    assert disagreements(judge, candidates) == []


async def test_columns_show_what_the_status_says(crds, client, namespace):
    """As in `kubectl get gd` and its wide form."""
    await client.create(manifest({}, namespace), field_manager="test")
    since = (datetime.now(UTC) - timedelta(minutes=70)).strftime("%Y-%m-%dT%H:%M:%SZ")
    serving = {"type": "Ready", "status": "True", "reason": "Serving", "message": ""}
    status = {
        "phase": "Ready",
        "summary": {"prefill": "1/1", "decode": "2/3", "gpus": "3/8"},
        "conditions": [{**serving, "lastTransitionTime": since}],
        "planner": {"lastDecision": "decode 2 -> 3"},
        "address": {"url": "http://llama-frontend.serving.svc:8000"},
    }
    await set_status(client, GRAPH_DEPLOYMENT, "llama", namespace, status)
    head, row = crds.kubectl("get", "gd", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "PHASE", "SINCE", "PREFILL", "DECODE", "GPUS", "MODEL", "AGE"]
    assert row.split()[1:6] == ["Ready", "70m", "1/1", "2/3", "3/8"]
    head, row = crds.kubectl("get", "graphdeployments", "-o", "wide", "-n", namespace).splitlines()
    assert head.split()[-2:] == ["REASON", "DECISION"]
    assert "Serving" in row
    assert "http://llama-frontend.serving.svc:8000" in row
    assert row.rstrip().endswith("decode 2 -> 3")
    for category in ("penstock", "all"):
        assert "llama" in crds.kubectl("get", category, "-n", namespace)


async def test_fractions_come_back_as_they_were_sent(crds, client, namespace):
    """Bit for bit, so that applying a graph that was read changes nothing: docs/adr/0024 rests on it."""
    rng = random.Random(3)
    awkward = [0.1, 1 / 3, 5e-324, 2.0, 1e-7, 99.99999999999999, *(rng.uniform(0, 100) for _ in range(50))]
    made = manifest({"spec": {"router": {"dualmap": {"decodeBottleneckSeconds": 1.5}}}}, namespace)
    await client.create(made, field_manager="test")
    for value in awkward:
        made["spec"]["router"]["dualmap"]["decodeBottleneckSeconds"] = value
        sent = await client.apply(made, field_manager="test")
        assert sent["spec"]["router"]["dualmap"]["decodeBottleneckSeconds"] == value
        read = {key: sent[key] for key in ("apiVersion", "kind", "spec")}
        read["metadata"] = {key: sent["metadata"][key] for key in ("name", "namespace")}
        again = await client.apply(read, field_manager="test")
        assert again["metadata"]["generation"] == sent["metadata"]["generation"]
