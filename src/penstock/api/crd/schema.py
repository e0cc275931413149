"""Turns a model into the structural OpenAPI v3 schema that a CustomResourceDefinition holds.

Starts from pydantic's own JSON schema, so types, bounds, patterns and descriptions have one source. What
differs: references are inlined, null is ``nullable``, exclusive bounds are flags, and ``metadata`` is reduced to the
name's length. Defaults are the models', who apply them when they read: an object that is stored with them would keep
those of its day. What a status starts from no controller has observed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import PydanticUndefined

from penstock.api.base import SpecModel
from penstock.api.durations import BOUNDS_KEY, DurationBounds
from penstock.api.fields import keys_of, model_at, sections
from penstock.api.rule import literal
from penstock.kube.objects.pod_template import overlay_schema

_INDEX: Final = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]"
_READ: Final = re.compile(
    rf"(?P<text>'(?:\\'|[^'])*')|(?P<has>\bhas\()?\bself(?P<path>(?:\.\w+(?:{_INDEX})?)+)(?P<call>\()?"
)
"""Text, which stays as it is; or a path below ``self``, perhaps within ``has``, perhaps ending in a function's name."""
_STEP: Final = re.compile(rf"\.(\w+)({_INDEX})?")

_STORED: Final = frozenset(
    {
        ("GraphSpec", "operatorClass"),
        ("GraphSpec", "runtime"),
        ("ScalingAdapterSpec", "replicas"),
    }
)
"""Defaults that the API server writes into objects. A rule that compares two versions of a key sees none that is
absent, and /scale needs a number."""


def is_stored(model: str, key: str) -> bool:
    """Return whether the API server writes the default of a model's key into objects."""
    return (model, key) in _STORED


def with_absent_keys(cel: str, model: type[SpecModel]) -> str:
    """Return CEL that means for an object as written what ``cel`` means for one with every default."""

    def read(found: re.Match[str]) -> str:
        if found["text"]:
            return found["text"]
        steps = list(_STEP.finditer(found["path"]))
        method = steps.pop()[0] if found["call"] else ""
        present, default = _presence(steps, model)
        path = "self" + "".join(step[0] for step in steps)
        if found["has"]:  # its closing bracket follows
            return f"({' && '.join(dict.fromkeys((*present, f'has({path})')))}"
        if default is None or not present:
            return f"{path}{method}{found['call'] or ''}"
        return f"({' && '.join(present)} ? {path} : {default}){method}{found['call'] or ''}"

    return _READ.sub(read, cel)


def _presence(steps: list[re.Match[str]], model: type[SpecModel]) -> tuple[list[str], str | None]:
    """Return what must be there for a path to be read, and its key's default as CEL; None: it has none to compare."""
    present: list[str] = []
    at: type[SpecModel] | None = model
    default: str | None = None
    path = "self"
    for step in steps:
        if at is None:
            return present, None
        info = keys_of(at)[step[1]]
        path = f"{path}.{step[1]}"
        value = info.default
        default = None
        if value is not PydanticUndefined and not is_stored(at.__name__, step[1]):
            present.append(f"has({path})")
            if value is not None and not isinstance(value, SpecModel | tuple | dict):
                default = literal(value, info.annotation)
        path += step[2] or ""
        at = model_at(at, (step[1], "k") if step[2] else (step[1],))
    return present, default


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

NOT_OBSERVED: Final = -1
"""The generation in the status of a new object. Flux, Argo CD and ``helm --wait`` then see that no operator has looked at it yet,
and wait; an object without a status counts as healthy."""

_OVERLAY: Final = "podTemplate"
"""Key of an overlay on a pod template, whose keys are Kubernetes' own."""

_METADATA: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 63}},
}


def openapi(model: type[SpecModel]) -> Schema:
    """Return the schema of a complete kind (apiVersion, kind, metadata, spec, status), with all its rules."""
    full = model.model_json_schema(by_alias=True, mode="validation")
    converter = _Converter(full.pop("$defs"), {each.__name__: each for _, each in sections(model)})
    schema = converter.section(model.__name__, full)
    for key in ("apiVersion", "kind"):
        schema["properties"][key] = {
            "description": schema["properties"][key]["description"],
            "type": "string",
        }
    schema["properties"]["metadata"] = _METADATA
    schema["required"] = ["spec"]
    status = schema["properties"].get("status", {})
    if "observedGeneration" in status.get("properties", {}):
        status["default"] = {"observedGeneration": NOT_OBSERVED}
    return schema


class _Converter:
    """Converts parts of one JSON schema; knows its definitions and the models, whose rules it attaches."""

    def __init__(self, definitions: Mapping[str, Schema], models: Mapping[str, type[SpecModel]]) -> None:
        self._definitions = definitions
        self._models = models

    def section(self, name: str, source: Schema) -> Schema:
        properties = {
            key: self._property(f"{name}.{key}", value) for key, value in source["properties"].items()
        }
        result: Schema = {"description": _first_paragraph(source["description"]), "type": "object"}
        if source.get("required"):
            result["required"] = source["required"]
        result["properties"] = properties
        return self._with_rules(result, name)

    def _property(self, path: str, source: Schema) -> Schema:
        result = self._value(source)
        if "description" in source:
            result.pop("description", None)  # of the section that is referred to
            result = {"description": source["description"], **result}
        name, _, key = path.partition(".")
        if key == _OVERLAY:
            result = {"description": source["description"], **overlay_schema()}
        if is_stored(name, key):
            default = source["default"]
            result["default"] = {} if isinstance(default, dict) else default
        return self._with_rules(result, name, key)

    def _with_rules(self, schema: Schema, name: str, key: str = "") -> Schema:
        """Add the CEL of a model's rules, or of those at one of its keys."""
        model = self._models.get(name, SpecModel)
        entries = [each.to_schema() for each in model.rules if each.key == key and each.cel is not None]
        for entry in () if key else entries:
            entry |= {each: with_absent_keys(entry[each], model) for each in ("rule", "messageExpression")}
        entries = [*schema.get("x-kubernetes-validations", ()), *entries]
        return {**schema, "x-kubernetes-validations": entries} if entries else schema

    def _value(self, source: Schema) -> Schema:
        if "anyOf" in source:
            inner = next(each for each in source["anyOf"] if each.get("type") != "null")
            return {**self._value(inner), "nullable": True}
        if "$ref" in source:
            return self._reference(source["$ref"].rpartition("/")[2])
        result = {key: source[key] for key in _KEPT if key in source}
        if BOUNDS_KEY in source:
            result["x-kubernetes-validations"] = [_duration_rule(*source[BOUNDS_KEY])]
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


def _duration_rule(least: str, most: str) -> Schema:
    """Return the CEL that holds the bounds of a duration."""
    return {
        "rule": DurationBounds(least, most).cel,
        "message": f"must be a duration from {least} to {most}, such as 500ms or 2s",
    }


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "")
