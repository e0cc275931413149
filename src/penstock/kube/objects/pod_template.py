"""Fields of Kubernetes pod templates, so that a misspelt key is refused instead of being lost silently.

Pure. The API server drops unknown keys of a created pod, and refuses them in an applied one.

Source: ``pod_template.json`` has the fields of PodTemplateSpec and of its types as Kubernetes 1.34 serves them at
/openapi/v3/api/v1. Each field has the name of its type, with ``[]`` before it for a list, or null if it has no type
of its own (text, quantity, labels).
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
    """A key that pod templates do not have.

    Attributes:
        path: Path of the key in the template.
        kind: Kubernetes' name of the type that lacks the key.
        suggestion: Known key that was probably meant; None if no known key is similar.
    """

    path: FieldPath
    kind: str
    suggestion: str | None


def unknown_fields(template: Mapping[str, Any]) -> Iterator[UnknownField]:
    """Yield the keys of a podTemplate that pod templates do not have.

    Directives such as ``$patch`` are ignored here; the overlay checks them.
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
    """Return the structural schema of a podTemplate, in which null deletes a key.

    Unknown keys are accepted, because ``$patch`` cannot be declared: Helm upgrades a CustomResourceDefinition by a
    strategic merge patch, in which a map with that key is a directive, and the API server would then drop the map,
    here all keys of a pod. The operator and `penstock validate` refuse misspelt keys. Content below a key without a
    type of its own is checked by Kubernetes when it validates the pod.
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
