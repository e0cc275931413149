"""Turns a model into the structural OpenAPI v3 schema that a CustomResourceDefinition holds.

Starts from pydantic's own JSON schema, so types, bounds, patterns and descriptions have one source. What
differs: references are inlined, null is ``nullable``, exclusive bounds are flags, and ``metadata`` is reduced to the
name's length. Defaults are the models', who apply them when they read: an object that is stored with them would keep
those of its day. What a status starts from no controller has observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.api.base import SpecModel
from penstock.api.crd.absent_keys import is_stored, with_absent_keys
from penstock.api.fields import sections
from penstock.kube.objects.pod_template import overlay_schema

Schema = dict[str, Any]

_KEPT = (
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)

_LIST_KEYS: Mapping[str, str] = {"Condition": "type"}
"""Lists of these models are maps by this key, so that several writers can own one entry each."""

_OVERLAY: Final = "podTemplate"
"""Key of an overlay on a pod template, whose keys are Kubernetes' own."""

_LOCAL = frozenset({("PlannerConfig", "environment"), ("PlannerConfig", "logDir")})
"""Keys that mean something to a planner outside a cluster alone."""

_METADATA: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 63}},
}


def openapi(model: type[SpecModel]) -> Schema:
    """Return the schema of one kind.

    Args:
        model: A whole kind: apiVersion, kind, metadata, spec, status; its rules and those of its sections go with it.
    """
    whole = model.model_json_schema(by_alias=True, mode="validation")
    converter = _Converter(whole.pop("$defs"), {each.__name__: each for _, each in sections(model)})
    schema = converter.section(model.__name__, whole)
    for key in ("apiVersion", "kind"):
        schema["properties"][key] = {
            "description": schema["properties"][key]["description"],
            "type": "string",
        }
    schema["properties"]["metadata"] = _METADATA
    schema["required"] = ["spec"]
    return schema


class _Converter:
    """Converts parts of one JSON schema; knows its definitions and the models, whose rules it attaches."""

    def __init__(self, definitions: Mapping[str, Schema], models: Mapping[str, type[SpecModel]]) -> None:
        self._definitions = definitions
        self._models = models

    def section(self, name: str, source: Schema) -> Schema:
        """Return a model's schema; ``name`` is the model's."""
        properties = {
            key: self._property(f"{name}.{key}", value)
            for key, value in source["properties"].items()
            if (name, key) not in _LOCAL
        }
        result: Schema = {"description": _first_paragraph(source["description"]), "type": "object"}
        if source.get("required"):
            result["required"] = source["required"]
        result["properties"] = properties
        return self._with_rules(result, name)

    def _property(self, path: str, source: Schema) -> Schema:
        result = self._value(source)
        if "description" in source:
            result = {"description": source["description"], **_without(result, "description")}
        name, _, key = path.partition(".")
        if key == _OVERLAY:
            result = {"description": source["description"], **overlay_schema()}
        if is_stored(name, key):
            default = source["default"]
            result["default"] = {} if isinstance(default, dict) else default
        return self._with_rules(result, name, key)

    def _with_rules(self, schema: Schema, name: str, key: str = "") -> Schema:
        """Add the CEL of a model's rules, or of those that stand at one of its keys."""
        model = self._models.get(name)
        rules = () if model is None else model.rules
        entries = [each.to_schema() for each in rules if each.key == key and each.cel is not None]
        if model is not None and not key:
            for entry in entries:
                entry |= {
                    each: with_absent_keys(entry[each], model) for each in ("rule", "messageExpression")
                }
        return {**schema, "x-kubernetes-validations": entries} if entries else schema

    def _value(self, source: Schema) -> Schema:
        if "anyOf" in source:
            inner = next(each for each in source["anyOf"] if each.get("type") != "null")
            return {**self._value(inner), "nullable": True}
        if "$ref" in source:
            return self._reference(source["$ref"].rpartition("/")[2])
        result = {key: source[key] for key in _KEPT if key in source}
        if "const" in source:
            result["enum"] = [source["const"]]
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.capitalize()}"
            if exclusive in source:
                result |= {bound: source[exclusive], exclusive: True}
        if result.get("type") == "array":
            result |= self._list(source["items"])
        if result.get("type") == "object":
            result |= self._map(source)
        return result

    def _reference(self, name: str) -> Schema:
        definition = self._definitions[name]
        if "properties" in definition:
            return self.section(name, definition)
        if "enum" in definition:
            return {"type": definition["type"], "enum": definition["enum"]}
        return {"x-kubernetes-preserve-unknown-fields": True}

    def _list(self, items: Schema) -> Schema:
        result: Schema = {"items": self._value(items)}
        key = _LIST_KEYS.get(items.get("$ref", "").rpartition("/")[2])
        if key is None:
            return {**result, "x-kubernetes-list-type": "atomic"}
        return {**result, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}

    def _map(self, source: Schema) -> Schema:
        patterns = source.get("patternProperties")
        values = next(iter(patterns.values())) if patterns else source["additionalProperties"]
        inner = self._value(values)
        if "type" not in inner:
            return inner
        return {"additionalProperties": inner}


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "")


def _without(schema: Schema, key: str) -> Schema:
    return {name: value for name, value in schema.items() if name != key}
