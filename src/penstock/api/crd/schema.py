"""Turns a model into the structural OpenAPI v3 schema that a CustomResourceDefinition holds.

Starts from pydantic's own JSON schema, so types, bounds, patterns and descriptions have one source. What
differs: references are inlined, null is ``nullable``, exclusive bounds are flags, a section's default is
``{}`` (the API server then fills in its keys) unless rules check it, which see a default as it stands; and
``metadata`` is reduced to the name's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.api.base import SpecModel
from penstock.api.fields import sections
from penstock.api.rule import Rule

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

_NO_DEFAULTS = ("GraphStatus", "AdapterStatus", "ProfileRequestStatus")
"""Controllers write a status; a default would claim a state that no controller has observed."""

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
    converter = _Converter(whole.pop("$defs"), {each.__name__: each.rules for _, each in sections(model)})
    schema = converter.section(model.__name__, whole, with_defaults=True)
    for key in ("apiVersion", "kind"):
        schema["properties"][key] = {
            "description": schema["properties"][key]["description"],
            "type": "string",
        }
    schema["properties"]["metadata"] = _METADATA
    schema["required"] = ["spec"]
    return schema


class _Converter:
    """Converts parts of one JSON schema; knows its definitions and the rules to attach."""

    def __init__(self, definitions: Mapping[str, Schema], rules: Mapping[str, tuple[Rule[Any], ...]]) -> None:
        self._definitions = definitions
        self._rules = rules

    def section(self, name: str, source: Schema, *, with_defaults: bool) -> Schema:
        with_defaults = with_defaults and name not in _NO_DEFAULTS
        properties = {
            key: self._property(f"{name}.{key}", value, with_defaults=with_defaults)
            for key, value in source["properties"].items()
        }
        result: Schema = {"description": _first_paragraph(source["description"]), "type": "object"}
        if source.get("required"):
            result["required"] = source["required"]
        result["properties"] = properties
        return self._with_rules(result, name)

    def _property(self, path: str, source: Schema, *, with_defaults: bool) -> Schema:
        result = self._value(source, with_defaults=with_defaults)
        if "description" in source:
            result = {"description": source["description"], **_without(result, "description")}
        default = _default(source.get("default"))
        if with_defaults and default not in (None, [], {}):
            whole = not isinstance(default, dict) or "x-kubernetes-validations" in result
            result["default"] = default if whole else {}
        name, _, key = path.partition(".")
        return self._with_rules(result, name, key)

    def _with_rules(self, schema: Schema, name: str, key: str = "") -> Schema:
        rules = [each for each in self._rules.get(name, ()) if each.key == key and each.cel is not None]
        return (
            {**schema, "x-kubernetes-validations": [each.to_schema() for each in rules]} if rules else schema
        )

    def _value(self, source: Schema, *, with_defaults: bool) -> Schema:
        if "anyOf" in source:
            inner = next(each for each in source["anyOf"] if each.get("type") != "null")
            return {**self._value(inner, with_defaults=with_defaults), "nullable": True}
        if "$ref" in source:
            return self._reference(source["$ref"].rpartition("/")[2], with_defaults=with_defaults)
        result = {key: source[key] for key in _KEPT if key in source}
        if "const" in source:
            result["enum"] = [source["const"]]
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.capitalize()}"
            if exclusive in source:
                result |= {bound: source[exclusive], exclusive: True}
        if result.get("type") == "array":
            result |= self._list(source["items"], with_defaults=with_defaults)
        if result.get("type") == "object":
            result |= self._map(source, with_defaults=with_defaults)
        return result

    def _reference(self, name: str, *, with_defaults: bool) -> Schema:
        definition = self._definitions[name]
        if "properties" in definition:
            return self.section(name, definition, with_defaults=with_defaults)
        if "enum" in definition:
            return {"type": definition["type"], "enum": definition["enum"]}
        return {"x-kubernetes-preserve-unknown-fields": True}

    def _list(self, items: Schema, *, with_defaults: bool) -> Schema:
        result: Schema = {"items": self._value(items, with_defaults=with_defaults)}
        key = _LIST_KEYS.get(items.get("$ref", "").rpartition("/")[2])
        if key is None:
            return {**result, "x-kubernetes-list-type": "atomic"}
        return {**result, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}

    def _map(self, source: Schema, *, with_defaults: bool) -> Schema:
        patterns = source.get("patternProperties")
        values = next(iter(patterns.values())) if patterns else source["additionalProperties"]
        inner = self._value(values, with_defaults=with_defaults)
        if "type" not in inner:
            return inner
        return {"additionalProperties": inner}


def _default(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kept for key, each in value.items() if (kept := _default(each)) not in (None, [], {})}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "")


def _without(schema: Schema, key: str) -> Schema:
    return {name: value for name, value in schema.items() if name != key}
