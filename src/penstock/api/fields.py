"""The models' fields as a tree: the model at a key path, and every field with its bounds."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import StringConstraints
from pydantic.fields import FieldInfo

from penstock.api.base import SpecModel
from penstock.api.durations import DurationBounds
from penstock.api.rule import KeyPath

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

ANY_NAME = "NAME"
"""Stands for a key that the user chooses, in a path of the reference."""


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """One field of the API.

    Attributes:
        path: For example ``spec.services.NAME.role``; lists end in ``[]``.
        shape: Type and bounds in words.
        section: The model that the field, or each item of it, holds; None: a scalar or free data.
        below: What the paths of the section's keys begin with; empty without a section.
    """

    path: str
    info: FieldInfo
    shape: str
    section: type[SpecModel] | None
    below: str


@cache
def keys_of(model: type[SpecModel]) -> Mapping[str, FieldInfo]:
    """Return a model's fields by their keys in manifests."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def model_at(root: type[SpecModel], path: KeyPath) -> type[SpecModel] | None:
    """Return the model at ``path`` below ``root``, or None if none does."""
    annotation: Any = root
    for key in path:
        annotation, _ = _strip(annotation)
        if isinstance(annotation, type) and issubclass(annotation, SpecModel):
            info = keys_of(annotation).get(str(key))
            if info is None:
                return None
            annotation = info.annotation
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        else:
            return None
    annotation, _ = _strip(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, SpecModel) else None


def walk(model: type[SpecModel], prefix: str = "") -> Iterator[FieldEntry]:
    """Yield every field below ``model``, parents before children."""
    for key, info in keys_of(model).items():
        path = f"{prefix}{key}"
        annotation, constraints = _strip(info.annotation)
        origin = get_origin(annotation)
        inner: Any = annotation
        if origin is dict:
            inner, _ = _strip(get_args(annotation)[1])
            path_below = f"{path}.{ANY_NAME}."
        elif origin is tuple:
            inner, _ = _strip(get_args(annotation)[0])
            path = f"{path}[]"
            path_below = f"{path}."
        else:
            path_below = f"{path}."
        section = inner if isinstance(inner, type) and issubclass(inner, SpecModel) else None
        shape = _shape(annotation, [*constraints, *info.metadata])
        yield FieldEntry(path, info, shape, section, path_below if section else "")
        if section is not None:
            yield from walk(section, path_below)


def kind_of(field: FieldInfo) -> Any:
    """Return the type of a field's values except for None, without what annotates it."""
    return _strip(field.annotation)[0]


def is_duration(field: FieldInfo) -> bool:
    """Return whether a field's values are durations, also of one that may be None."""
    return any(isinstance(each, DurationBounds) for each in (*_strip(field.annotation)[1], *field.metadata))


def bounds(field: FieldInfo) -> dict[str, float]:
    """Return the bounds of a number, also of one that may be None, by ``gt``, ``ge``, ``lt`` and ``le``."""
    constraints = (*_strip(field.annotation)[1], *field.metadata)
    return {name: getattr(each, name) for each in constraints for name in _SIGNS if hasattr(each, name)}


def sections(kind: type[SpecModel]) -> Iterator[tuple[str, type[SpecModel]]]:
    """Yield a kind and every model below it, each with what the paths of its keys begin with."""
    yield "", kind
    yield from ((entry.below, entry.section) for entry in walk(kind) if entry.section is not None)


def _strip(annotation: Any) -> tuple[Any, list[Any]]:
    constraints: list[Any] = []
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *found = get_args(annotation)
            for each in found:
                constraints += each.metadata if isinstance(each, FieldInfo) else [each]
        elif get_origin(annotation) in (Union, types.UnionType):
            annotation = next(each for each in get_args(annotation) if each is not type(None))
        else:
            return annotation, constraints


def _shape(annotation: Any, constraints: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is dict:
        inner, _ = _strip(get_args(annotation)[1])
        return f"map of {_shape(inner, [])}"
    if origin is tuple:
        inner, _ = _strip(get_args(annotation)[0])
        return f"list of {_shape(inner, [])}"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(f"`{each.value}`" for each in annotation)
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        return "section"
    return _scalar_shape(annotation, constraints)


def _scalar_shape(annotation: Any, constraints: list[Any]) -> str:
    for each in constraints:
        if isinstance(each, DurationBounds):
            return f"duration, {each.least} to {each.most}"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    bounds = _bounds(constraints)
    name = words.get(annotation, "any value")
    return f"{name}, {bounds}" if bounds else name


def _bounds(constraints: list[Any]) -> str:
    parts = [
        f"{sign} {getattr(each, name)}"
        for each in constraints
        for name, sign in _SIGNS.items()
        if hasattr(each, name)
    ]
    lengths = [each for each in constraints if isinstance(each, StringConstraints) and each.pattern]
    parts += [f"at most {each.max_length} characters" for each in lengths if each.max_length is not None]
    return ", ".join(parts)
