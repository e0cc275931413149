"""Which keys a Kubernetes pod template has, so that a misspelt one is refused before it is lost in silence.

Pure. An API server drops unknown keys of a pod that is created, and refuses them in one that is applied.

Source: ``pod_template.json`` holds type, field and field's type of PodTemplateSpec as Kubernetes 1.34 serves them at
/openapi/v3/api/v1, ``[]`` before that of a list; a field without a type of its own (text, quantity, labels) has null.
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
_LIST = "[]"

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class UnknownField:
    """One key that no pod template has: its path, Kubernetes' name of the type, and the key that was probably meant."""

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
                yield from _unknown(item, inner.removeprefix(_LIST), (*path, key))


def overlay_schema() -> dict[str, Any]:
    """Return the structural schema of an overlay on a pod template: its keys, which null deletes.

    Other keys pass, for ``$patch`` cannot be named: Helm upgrades a definition by a strategic merge patch, in which a map
    with that key is a directive, and the API server then drops the map, here all keys of a pod. The operator and
    `penstock validate` refuse misspelt keys. What is below a key without a type of its own is left to Kubernetes, which
    judges the pod.
    """
    return _schema(_ROOT)


def _schema(kind: str) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key, inner in _fields()[kind].items():
        if inner is None:
            properties[key] = {"nullable": True, "x-kubernetes-preserve-unknown-fields": True}
        elif inner.startswith(_LIST):
            items = _schema(inner.removeprefix(_LIST))
            properties[key] = {"type": "array", "nullable": True, "items": items}
        else:
            properties[key] = {"nullable": True, **_schema(inner)}
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": properties}


@cache
def _fields() -> dict[str, dict[str, str | None]]:
    text = resources.files("penstock.kube.objects").joinpath("pod_template.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, str | None]] = json.loads(text)
    return found
