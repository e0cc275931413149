"""Every field of a manifest, and another value for it."""

from __future__ import annotations

import enum
import types
import typing

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

GIVEN = {
    "aliases": ["also"],
    "adapters": [{"name": "sql", "path": "/sql"}],
    "args": ["--x"],
    "corsAllowedOrigins": ["https://a.example"],
    "env": [{"name": "A", "value": "1"}],
    "envFrom": [{"configMapRef": {"name": "c"}}],
    "inheritedAnnotations": ["a"],
    "nodePools": {"p": {}},
    "podTemplate": {"metadata": {"labels": {"a": "b"}}},
    "requestLimit": 512,
}
"""Values of fields whose type alone suggests none."""


def candidates(kind, value):
    """Yield other values of a field, by its type and its present value."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        yield from candidates(typing.get_args(kind)[0], value)
    elif origin in {typing.Union, types.UnionType}:
        for each in typing.get_args(kind):
            yield from candidates(each, value)
    elif isinstance(value, bool) or kind is bool:
        yield not value
    elif isinstance(value, enum.Enum) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        yield from (each.value for each in (type(value) if value is not None else kind) if each != value)
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, value / 2, value - 1)
    elif kind in {int, float}:
        yield from (1, 2, 64, 1000, 0.5, 5557)
    elif kind is str:
        yield from ("other", "5m", "1", "vllm" if value == "simulated" else "simulated")
    elif origin is typing.Literal:
        yield from typing.get_args(kind)


def leaves(model, path=()):
    """Yield path, type and value of each field."""
    for name, field in type(model).model_fields.items():
        value, here = getattr(model, name), (*path, field.alias or to_camel(name))
        if isinstance(value, BaseModel):
            yield from leaves(value, here)
        elif (
            isinstance(value, dict) and value and all(isinstance(each, BaseModel) for each in value.values())
        ):
            for key, each in value.items():
                yield from leaves(each, (*here, key))
        else:
            yield here, field.annotation, value
