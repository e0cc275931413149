"""Which keys a Kubernetes pod template has, so that a misspelt one is refused before it is lost in silence.

Pure. An API server drops unknown keys of a pod that is created, and refuses them in one that is applied.

Source: ``pod_template.json`` holds type, field and field's type of PodTemplateSpec as Kubernetes 1.34 serves them at
/openapi/v3/api/v1; a field without a type of its own (text, quantity, labels) has null.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_ROOT = "PodTemplateSpec"

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class UnknownField:
    """One key that no pod template has.

    Attributes:
        path: Keys and list positions from the template to the key itself.
        kind: Kubernetes' name of the type that has no such key.
        meant: The key that was probably meant, or None.
    """

    path: FieldPath
    kind: str
    meant: str | None


def unknown_fields(template: Mapping[str, Any]) -> Iterator[UnknownField]:
    """Yield the keys of a podTemplate that no pod template has, each with its path within the template.

    Directives such as ``$patch`` are left to the overlay, which knows them.
    """
    yield from _unknown(template, _ROOT, ())


def _unknown(value: Any, kind: str, path: FieldPath) -> Iterator[UnknownField]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, kind, (*path, index))
    elif isinstance(value, Mapping):
        fields = _fields()[kind]
        for key, item in value.items():
            if key.startswith("$"):
                continue
            if key not in fields:
                close = difflib.get_close_matches(key, fields, n=1, cutoff=0.75)
                yield UnknownField((*path, key), kind, close[0] if close else None)
            elif (inner := fields[key]) is not None:
                yield from _unknown(item, inner, (*path, key))


@cache
def _fields() -> dict[str, dict[str, str | None]]:
    text = resources.files("penstock.kube.objects").joinpath("pod_template.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, str | None]] = json.loads(text)
    return found
