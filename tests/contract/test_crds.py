from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.api import GraphDeployment, ProfileRequest, ScalingAdapter
from penstock.api.crd import definitions, file_name
from penstock.api.crd.__main__ import FOLDERS, write
from penstock.api.fields import sections

ROOT = Path(__file__).parents[2]


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
    }
    assert [file_name(each) for each in definitions().values()] == [
        "penstock.dev_graphdeployments.yaml",
        "penstock.dev_profilerequests.yaml",
        "penstock.dev_scalingadapters.yaml",
        "penstock.dev_gpupools.yaml",
    ]


def test_every_rule_in_cel_is_emitted():
    """The definitions carry the models' rules, and no others."""
    attached = {rule["message"] for each in definitions().values() for rule in validations(each)}
    models = [
        model for kind in (GraphDeployment, ProfileRequest, ScalingAdapter) for _, model in sections(kind)
    ]
    rows = [rule for model in models for rule in model.rules if rule.cel is not None]
    assert {rule.to_schema()["message"] for rule in rows} == attached


def test_a_definition_fits_the_annotation_in_which_kubectl_keeps_what_it_applied():
    """An object's annotations hold 256 KiB together."""
    assert max(len(json.dumps(each, separators=(",", ":"))) for each in definitions().values()) < 230_000


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
"""As controller-gen writes metav1.Condition, but for the words; int64 is what an integer is without a format."""


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


def test_no_key_of_a_definition_is_a_directive_of_a_merge_patch():
    """`helm upgrade` patches definitions strategically: a map with a key such as $patch would be dropped, properties and all."""

    def directives(value):
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from directives(inner)
        if isinstance(value, dict):
            yield from (key for key in value if key.startswith("$"))

    for each in definitions().values():
        assert list(directives(each)) == []
