from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.api import ClusterGpuPool, GpuPool, GraphDeployment, ProfileRequest, ScalingAdapter
from penstock.api.crd import definitions, file_name
from penstock.api.crd.__main__ import FOLDERS, write
from penstock.api.fields import sections
from penstock.core.durations import MAX_CHARS, PATTERN

ROOT = Path(__file__).parents[2]
DURATION = "must be a duration from 1ms to 24h, such as 500ms or 2s"


def validations(node):
    """Every CEL rule below a part of a definition."""
    if isinstance(node, dict):
        yield from node.get("x-kubernetes-validations", ())
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from validations(inner)


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_written_definitions_are_the_models(folder, tmp_path):
    """Who changes a model runs `make crds`; the chart holds the same bytes."""
    write(tmp_path)
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / folder).iterdir()}
    assert written == {path.name: path.read_text(encoding="utf-8") for path in (ROOT / folder).iterdir()}


def test_names_are_the_documented_ones():
    """Names, short names and categories are what kubectl is asked for."""
    names = {each["spec"]["names"]["kind"]: each["spec"]["names"] for each in definitions().values()}
    assert {kind: (each["plural"], each["shortNames"]) for kind, each in names.items()} == {
        "GraphDeployment": ("graphdeployments", ["gd"]),
        "ProfileRequest": ("profilerequests", ["gpr"]),
        "ScalingAdapter": ("scalingadapters", ["gsa"]),
        "GpuPool": ("gpupools", ["gpool"]),
        "ClusterGpuPool": ("clustergpupools", ["cgpool"]),
    }
    assert [file_name(each) for each in definitions().values()] == [
        "penstock.dev_graphdeployments.yaml",
        "penstock.dev_profilerequests.yaml",
        "penstock.dev_scalingadapters.yaml",
        "penstock.dev_gpupools.yaml",
        "penstock.dev_clustergpupools.yaml",
    ]


def test_every_rule_in_cel_is_emitted():
    """The definitions carry the models' rules, and no others."""
    attached = {rule["message"] for each in definitions().values() for rule in validations(each)}
    models = [
        model
        for kind in (ClusterGpuPool, GpuPool, GraphDeployment, ProfileRequest, ScalingAdapter)
        for _, model in sections(kind)
    ]
    rows = [rule for model in models for rule in model.rules if rule.cel is not None]
    assert {rule.to_schema()["message"] for rule in rows} | {DURATION} == attached


def test_every_duration_is_checked_by_the_api_server():
    """By its form and its bounds; the target of the graph among them."""
    durations = {}
    for each in definitions().values():
        schema = each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        durations |= {path: text for path, text in of_type(schema, "", "string") if "pattern" in text}
    found = {path: text for path, text in durations.items() if text["pattern"] == PATTERN}
    assert {"spec.slo.ttft", "spec.slo.itl", "spec.router.tiers.slo.premium.endToEnd"} <= found.keys()
    for text in found.values():
        assert [rule["message"] for rule in text["x-kubernetes-validations"]] == [DURATION]
        assert text["maxLength"] == MAX_CHARS


def test_a_definition_fits_the_annotation_in_which_kubectl_keeps_what_it_applied():
    """An object's annotations hold 256 KiB (262,144 bytes) together, of which other annotations need few."""
    assert max(len(json.dumps(each, separators=(",", ":"))) for each in definitions().values()) < 240_000


def test_every_key_of_the_spec_is_described():
    """`kubectl explain` has a sentence for each key."""

    def undescribed(schema, path):
        for key, value in schema.get("properties", {}).items():
            if not value.get("description"):
                yield f"{path}.{key}"
            if key != "podTemplate":  # Kubernetes' own keys, which its own schema describes
                yield from undescribed(value, f"{path}.{key}")
        for inner in ("items", "additionalProperties"):
            if isinstance(schema.get(inner), dict):
                yield from undescribed(schema[inner], f"{path}[]")

    for each in definitions().values():
        schema = each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert list(undescribed(schema["properties"]["spec"], "spec")) == []
        assert list(undescribed(schema["properties"]["status"], "status")) == []


METAV1_CONDITION = {
    "type": {
        "type": "string",
        "maxLength": 316,
        "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
    },
    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
    "observedGeneration": {"type": "integer", "minimum": 0},
    "lastTransitionTime": {"type": "string", "format": "date-time"},
    "reason": {
        "type": "string",
        "minLength": 1,
        "maxLength": 1024,
        "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
    },
    "message": {"type": "string", "maxLength": 32768},
}
"""As controller-gen writes metav1.Condition, except for the words; int64 is what an integer is without a format."""


def test_conditions_are_metav1s():
    """Tools that wait for, show or sum up conditions find every key within its bounds, one entry for each type."""
    for each in definitions().values():
        status = each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
        found = status["properties"]["conditions"]
        assert found["x-kubernetes-list-type"] == "map"
        assert found["x-kubernetes-list-map-keys"] == ["type"]
        item = found["items"]
        assert set(item["required"]) == METAV1_CONDITION.keys() - {"observedGeneration"}
        keys = {
            name: {key: value for key, value in schema.items() if key != "description"}
            for name, schema in item["properties"].items()
        }
        assert keys == METAV1_CONDITION


def test_a_new_object_says_that_no_operator_has_observed_it():
    """Flux and `helm --wait` compare the generations: without a status they call a new object healthy."""
    reported = {}
    for each in definitions().values():
        status = each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
        if "observedGeneration" in status["properties"]:
            reported[each["spec"]["names"]["kind"]] = status["default"]

    assert reported == {
        key: {"observedGeneration": -1}
        for key in ("GraphDeployment", "ProfileRequest", "GpuPool", "ClusterGpuPool")
    }


def test_no_key_of_a_definition_is_a_directive_of_a_merge_patch():
    """`helm upgrade` patches definitions strategically: a map with a key such as $patch would be dropped, properties and all."""

    def directives(value):
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from directives(inner)
        if isinstance(value, dict):
            yield from (key for key in value if key.startswith("$"))

    for each in definitions().values():
        assert list(directives(each)) == []


FRACTIONS = {
    "shares, of one": {
        "spec.router.admission.activeDecodeBlocksThreshold",
        "spec.router.tiers.shares.premium",
        "spec.router.tiers.shares.standard",
        "spec.router.tiers.shares.background",
        "spec.router.tiers.maxTenantShare",
        "spec.router.tiers.shedding.recoverFraction",
        "spec.router.prefillDeflection.maxKvUsageFraction",
        "spec.router.breaker.maxEjectedFraction",
        "spec.router.retries.budgetFraction",
        "spec.engine.preemption.premiumReservedFraction",
        "spec.slo.attainment",
        *(f"spec.router.tiers.slo.{tier}.attainment" for tier in ("premium", "standard", "background")),
        "spec.planner.decodeKvScaleUpThreshold",
        "spec.planner.decodeKvScaleDownThreshold",
    },
    "latencies, of which a tenth of a second, or a hundredth, is much": {
        "spec.router.dualmap.decodeBottleneckSeconds",
        "spec.router.prefillDeflection.queueSeconds",
        "spec.router.prefillDeflection.itlSeconds",
        "spec.engine.preemption.dropAboveSeconds",
    },
    "waits and periods that may be less than a second": {
        "spec.router.prefillQueue.maxWaitSeconds",
        "spec.router.decodeQueue.maxWaitSeconds",
        "spec.router.limits.connectTimeoutRealSeconds",
        "spec.router.health.intervalSeconds",
        "spec.router.health.timeoutRealSeconds",
        "spec.planner.metricPullingIntervalSeconds",
    },
    "rates, levels and means": {
        "spec.router.admission.activePrefillTokensThresholdFrac",
        "spec.router.tiers.agingPerSecond",
        "spec.router.tiers.maxAging",
        "spec.router.retries.minPerSecond",
        "spec.planner.prefillQueueScaleUpThreshold",
        "spec.planner.prefillQueueScaleDownThreshold",
    },
    "measures of what is simulated, and memory that an engine takes in fractions of a gigabyte": {
        "spec.services[].startupSeconds",
        "spec.engine.preemption.swapGigabytes",
        "spec.engine.kvOffload.gigabytes",
    },
}  # fmt: skip
"""Why these keys are numbers with fractions, which Kubernetes' API conventions advise against: docs/adr/0024."""


def of_type(schema, path, kind):
    """Path and schema of every key of a type."""
    if schema.get("type") == kind:
        yield path, schema
    for key, value in schema.get("properties", {}).items():
        yield from of_type(value, f"{path}.{key}" if path else key, kind)
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            yield from of_type(schema[inner], f"{path}[]", kind)


def test_fractions_are_the_listed_ones():
    """A new key with fractions needs a reason; a status has none."""
    found = set()
    for each in definitions().values():
        schema = each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        found |= dict(of_type(schema, "", "number")).keys()
    assert found == set().union(*FRACTIONS.values())


@pytest.mark.parametrize(("kind", "bounds"), [("number", {"minimum", "maximum"}), ("integer", {"minimum"})])
def test_every_number_of_a_spec_is_bounded(kind, bounds):
    """By the API server already; only a toleration's seconds, Kubernetes' own, may be negative."""
    for each in definitions().values():
        spec = each["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        loose = [path for path, schema in of_type(spec, "spec", kind) if not bounds <= schema.keys()]
        assert [path for path in loose if not path.endswith(".tolerationSeconds")] == []
