from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, JsonValue

from penstock.api import Condition, GraphDeployment, Role, ScalingAdapter
from penstock.api.base import DnsLabel, Flag, Integer, Number, SpecModel
from penstock.api.crd.schema import openapi, with_absent_keys
from penstock.api.rule import Rule


class Part(SpecModel):
    """A part of a section.

    More about it.
    """

    size: Annotated[Number, Field(gt=0, le=2)] = Field(default=1, description="Size.")
    label: str | None = Field(default=None, description="Label.")


class Ruled(SpecModel):
    """A section with rules."""

    rules = (
        Rule(must="size is above 0", cel="self.size > 0", text="it is 0", remedy="raise it"),
        Rule(must="size is not 1.5", cel="self != 1.5", text="it is 1.5", remedy="change it", key="size"),
        Rule(must="size is wise", cel=None, text="it is not wise", remedy="think"),
    )

    size: Number = Field(default=1, description="Size.")


class Body(SpecModel):
    """What a thing is made of."""

    role: Role = Field(description="Role.")
    part: Part = Field(default=Part(), description="The part.")
    ruled: Ruled = Field(default=Ruled(), description="The part with rules.")
    parts: Annotated[dict[DnsLabel, Part], Field(max_length=3)] = Field(default={}, description="Parts.")
    limit: Annotated[Integer, Field(ge=1)] | None = Field(default=8, description="Limit.")
    flag: Flag = Field(default=False, description="Flag.")
    args: tuple[str, ...] = Field(default=(), description="Arguments.")
    overlay: dict[str, JsonValue] = Field(default={}, description="Overlay.")


class GraphStatus(SpecModel):
    """A thing's state."""

    phase: str = Field(default="Pending", description="Phase.")
    conditions: tuple[Condition, ...] = Field(default=(), description="Conditions.")


class Thing(SpecModel):
    """A kind."""

    api_version: str = Field(default="v1", description="Version.")
    kind: str = Field(default="Thing", description="Kind.")
    metadata: dict[str, str] = Field(default={}, description="Name.")
    spec: Body = Field(description="What it is.")
    status: GraphStatus | None = Field(default=None, description="What it became.")


@pytest.fixture(name="body")
def made_body():
    """Schemas of the spec's keys."""
    return openapi(Thing)["properties"]["spec"]["properties"]


@pytest.mark.parametrize(
    ("key", "schema"),
    [
        (
            "role",
            {"description": "Role.", "type": "string", "enum": ["router", "prefill", "decode", "aggregated"]},
        ),
        (
            "limit",
            {"description": "Limit.", "type": "integer", "minimum": 1, "nullable": True},
        ),
        ("flag", {"description": "Flag.", "type": "boolean"}),
        (
            "args",
            {
                "description": "Arguments.",
                "type": "array",
                "items": {"type": "string"},
                "x-kubernetes-list-type": "atomic",
            },
        ),
        (
            "overlay",
            {"description": "Overlay.", "type": "object", "x-kubernetes-preserve-unknown-fields": True},
        ),
    ],
)
def test_a_key_keeps_type_bounds_and_description(body, key, schema):
    """Each sort of key becomes what a structural schema can say."""
    assert body[key] == schema


def test_a_map_has_one_schema_for_its_values_and_a_bound(body):
    """Names are judged by a rule, because a structural schema has no patterns for keys."""
    parts = body["parts"]
    assert parts["maxProperties"] == 3
    assert parts["additionalProperties"]["description"] == "A part of a section."
    assert set(parts["additionalProperties"]["properties"]) == {"size", "label"}


def test_a_rule_finds_the_defaults_that_the_object_does_not_hold(body):
    """No default is written into an object, so that a later release may have another."""
    assert "default" not in body["part"] | body["ruled"]
    assert body["ruled"]["x-kubernetes-validations"] == [
        {
            "rule": "(has(self.size) ? self.size : 1.0) > 0",
            "message": "must hold: size is above 0; raise it",
            "messageExpression": "'it is 0; raise it'",
        }
    ]


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


def test_keys_of_a_local_planner_are_none_of_the_clusters():
    """They would be accepted there and do nothing."""
    planner = openapi(GraphDeployment)["properties"]["spec"]["properties"]["planner"]["properties"]
    assert not {"environment", "logDir"} & set(planner)


def test_the_few_defaults_that_are_stored():
    """Those whose change a rule forbids, the budget, whose null means something else, and the number of /scale."""

    def stored(schema, path=""):
        for key, value in schema.get("properties", {}).items():
            yield from [f"{path}.{key}"] * ("default" in value)
            yield from stored(value, f"{path}.{key}")

    assert set(stored(openapi(GraphDeployment))) == {
        ".spec.runtime",
        ".spec.operatorClass",
        ".spec.planner",
        ".spec.planner.maxGpuBudget",
    }
    assert set(stored(openapi(ScalingAdapter))) == {".spec.replicas"}


def test_a_rule_of_a_key_stands_at_the_key():
    """``self`` is then the key's value; a rule that CEL cannot tell is not emitted."""
    size = openapi(Thing)["properties"]["spec"]["properties"]["ruled"]["properties"]["size"]
    assert [each["rule"] for each in size["x-kubernetes-validations"]] == ["self != 1.5"]


def test_several_writers_own_one_condition_each():
    """So a list of conditions is a map by their type."""
    status = openapi(Thing)["properties"]["status"]["properties"]
    assert status["conditions"]["x-kubernetes-list-type"] == "map"
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_the_type_keys_carry_no_bounds():
    """The API server forbids it, and bounds of metadata but for the name."""
    schema = openapi(Thing)
    assert schema["properties"]["kind"] == {"description": "Kind.", "type": "string"}
    assert set(schema["properties"]["metadata"]["properties"]) == {"name"}
    assert schema["required"] == ["spec"]


@pytest.mark.parametrize("model", [GraphDeployment, ScalingAdapter])
def test_no_reference_or_null_type_is_left(model):
    """A structural schema knows neither references nor alternatives."""

    def keys(node):
        if isinstance(node, dict):
            yield from node
            for value in node.values():
                yield from keys(value)
        elif isinstance(node, list):
            for value in node:
                yield from keys(value)

    assert not {"$ref", "anyOf", "allOf", "const", "title", "patternProperties"} & set(keys(openapi(model)))
