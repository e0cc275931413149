"""What the emitted definitions say alongside the models' own words, which tests/contract/test_crds.py holds as files."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field

from penstock.api import GraphDeployment, Role, ScalingAdapter
from penstock.api.base import DnsLabel, Flag, Number, SpecModel
from penstock.api.crd.schema import openapi, with_absent_keys


class Part(SpecModel):
    """A part of a section."""

    size: Annotated[Number, Field(gt=0, le=2)] = Field(default=1, description="Size.")
    label: str | None = Field(default=None, description="Label.")


class Body(SpecModel):
    """What a thing is made of."""

    role: Role = Field(description="Role.")
    part: Part = Field(default=Part(), description="The part.")
    parts: dict[DnsLabel, Part] = Field(default={}, description="Parts.")
    flag: Flag = Field(default=False, description="Flag.")
    args: tuple[str, ...] = Field(default=(), description="Arguments.")


@pytest.mark.parametrize(
    ("cel", "expected"),
    [
        ("self.role == 'self.flag'", "self.role == 'self.flag'"),
        ("!self.flag", "!(has(self.flag) ? self.flag : false)"),
        ("self.part.size > 1", "(has(self.part) && has(self.part.size) ? self.part.size : 1.0) > 1"),
        ("has(self.part.label)", "(has(self.part) && has(self.part.label))"),
        ("self.args.all(a, a != '')", "self.args.all(a, a != '')"),
        (
            "self.parts.all(k, self.parts[k].size < 2)",
            "self.parts.all(k, (has(self.parts) && has(self.parts[k].size) ? self.parts[k].size : 1.0) < 2)",
        ),
    ],
)
def test_a_read_of_an_absent_key_is_one_of_its_default(cel, expected):
    """Also below an absent section; what a rule guards itself, and text, stay as they are."""
    assert with_absent_keys(cel, Body) == expected


def test_the_few_defaults_that_are_stored():
    """Those whose change a rule forbids, the number of /scale, and that no operator has observed a new object.

    No budget is among them: it would count inside a pool.
    """

    def stored(schema, path=""):
        for key, value in schema.get("properties", {}).items():
            yield from [f"{path}.{key}"] * ("default" in value)
            yield from stored(value, f"{path}.{key}")

    assert set(stored(openapi(GraphDeployment))) == {
        ".spec.runtime",
        ".spec.operatorClass",
        ".status",
    }
    assert set(stored(openapi(ScalingAdapter))) == {".spec.replicas"}


@pytest.mark.parametrize("model", [GraphDeployment, ScalingAdapter])
def test_a_schema_is_structural(model):
    """It knows neither references nor alternatives; conditions are a map by type, with an owner each."""

    def keys(node):
        if isinstance(node, dict):
            yield from node
            for value in node.values():
                yield from keys(value)
        elif isinstance(node, list):
            for value in node:
                yield from keys(value)

    schema = openapi(model)
    assert not {"$ref", "anyOf", "allOf", "const", "title", "patternProperties"} & set(keys(schema))
    assert set(schema["properties"]["metadata"]["properties"]) == {"name"}
    conditions = schema["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
