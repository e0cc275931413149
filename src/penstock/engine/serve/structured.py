"""JSON that satisfies a schema, for structured outputs and tool calls of simulated workers; equal for equal seeds. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.engine.serve.fields import RequestError

_MAX_DEPTH: Final = 12
"""Chosen: OpenAI allows schemas of 10 levels; a recursive one ends here by its optional properties."""
_MAX_VALUES: Final = 10_000
"""Maximum number of values, and of characters of a string. Chosen: far more than a worker could generate within a context."""
_WORDS: Final = ("alpha", "bravo", "delta", "golf", "kilo", "lima", "oscar", "tango")
_BY_FORMAT: Final = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "user@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
}
_UNSUPPORTED: Final = ("pattern", "not", "if", "patternProperties", "dependentRequired", "contains")
"""Keywords of JSON Schema that are refused, because a value that is made here may violate them."""


def json_of(schema: Any, seed: int, *, param: str) -> bytes:
    """Return ASCII JSON that satisfies a schema.

    Args:
        schema: JSON schema; an empty one allows everything, and gets an object.
        seed: Number that selects the values.
        param: Name of the request's field, for errors.

    Raises:
        RequestError: The schema has a keyword that is not supported, or cannot be satisfied.
    """
    if not isinstance(schema, dict):
        raise RequestError(f"{param}: the schema must be an object.", param=param)
    try:
        value = _Maker(schema, seed, param).value(schema or {"type": "object"}, 0)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise RequestError(
            f"{param}: not a valid JSON schema ({exc}); check the types of its keywords.", param=param
        ) from exc
    return json.dumps(value, separators=(", ", ": ")).encode()


class _Maker:
    def __init__(self, root: Mapping[str, Any], seed: int, param: str) -> None:
        self._root, self._seed, self._param = root, seed, param
        self._made = 0
        self._values = 0

    def _next(self) -> int:
        self._made += 1
        return (self._seed >> 8) + 7 * self._made

    def _refuse(self, why: str) -> RequestError:
        return RequestError(f"{self._param}: a simulated worker {why}.", param=self._param)

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value that satisfies a schema at this depth."""
        self._values += 1
        if self._values > _MAX_VALUES:
            raise self._refuse(f"makes at most {_MAX_VALUES:,} values; send a schema that requires fewer")
        if schema is True or schema == {}:
            return _WORDS[self._next() % len(_WORDS)]
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            raise self._refuse(
                f"makes no value for this schema within {_MAX_DEPTH} levels; send a flatter one"
            )
        for name in _UNSUPPORTED:
            if name in schema:
                raise self._refuse(f"does not support the keyword {name}; leave it out")
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][self._next() % len(schema["enum"])]
        other = self._other(schema)
        return self._typed(schema, depth) if other is None else self.value(other, depth + 1)

    def _other(self, schema: dict[str, Any]) -> Any:
        """Return the schema that stands for this one; None if it stands for itself."""
        if "$ref" in schema:
            return self._resolved(schema["$ref"])
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            return self._flattest(choices)
        return _merged(schema) if schema.get("allOf") else None

    def _flattest(self, choices: list[Any]) -> Any:
        """Return the choice that needs no other schema, if there is one, so that recursive schemas end."""
        plain = [each for each in choices if "$ref" not in json.dumps(each)]
        return (plain or choices)[0]

    def _resolved(self, reference: Any) -> Any:
        found: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self._refuse("resolves $ref within the schema alone; send the definition")
        for name in reference.removeprefix("#").strip("/").split("/"):
            if name:
                found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise self._refuse(f"finds no {reference[:100]} in the schema; define it")
        return found

    def _typed(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((each for each in kind if each != "null"), "null")
        if kind is None:
            kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
        makers: dict[str, Callable[[], Any]] = {
            "object": lambda: self._object(schema, depth),
            "array": lambda: self._array(schema, depth),
            "string": lambda: self._string(schema),
            "integer": lambda: self._number(schema, 1),
            "number": lambda: self._number(schema, schema.get("multipleOf", 0.5)),
            "boolean": lambda: self._next() % 2 == 0,
            "null": lambda: None,
        }
        if kind not in makers:
            raise self._refuse(f"knows no type {kind!r}; use one of JSON's")
        return makers[kind]()

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        names = [each for each in properties if each in required or depth < 3]
        names += [each for each in required if each not in properties]
        return {name: self.value(properties.get(name, True), depth + 1) for name in names}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        prefix = schema.get("prefixItems") or []
        count = max(schema.get("minItems", 0), len(prefix), 1 if depth < 3 else 0)
        count = min(count, schema.get("maxItems", count), _MAX_VALUES + 1)
        items = schema.get("items", True)
        made = [self.value(prefix[at] if at < len(prefix) else items, depth + 1) for at in range(count)]
        if schema.get("uniqueItems") and len({json.dumps(each) for each in made}) < len(made):
            raise self._refuse("makes no unique items for this schema; leave uniqueItems out")
        return made

    def _string(self, schema: dict[str, Any]) -> str:
        if "format" in schema:
            return _BY_FORMAT.get(schema["format"], _WORDS[0])
        text = _WORDS[self._next() % len(_WORDS)]
        if schema.get("minLength", 0) > _MAX_VALUES:
            raise self._refuse(f"makes strings of at most {_MAX_VALUES:,} characters; lower minLength")
        text = text.ljust(schema.get("minLength", 0), "x")
        return text[: schema.get("maxLength", len(text))]

    def _number(self, schema: dict[str, Any], step: float) -> float:
        step = schema.get("multipleOf", step)
        low, high = schema.get("minimum"), schema.get("maximum")
        if (above := schema.get("exclusiveMinimum")) is not None:
            low = above + step
        if (below := schema.get("exclusiveMaximum")) is not None:
            high = below - step
        value = self._next() % 100 * step
        if low is not None and value < low:
            value = -(-low // step) * step
        if high is not None and value > high:
            value = high // step * step
        if low is not None and value < low:
            raise self._refuse("finds no number within these bounds; widen them")
        return int(value) if schema.get("type") == "integer" else value


def _merged(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with those of ``allOf`` merged into it."""
    merged = {key: value for key, value in schema.items() if key != "allOf"}
    for each in schema["allOf"]:
        properties = {**merged.get("properties", {}), **each.get("properties", {})}
        required = [*merged.get("required", []), *each.get("required", [])]
        merged |= each
        if properties:
            merged |= {"properties": properties, "required": required}
    return merged
