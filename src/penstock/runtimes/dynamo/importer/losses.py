"""What a conversion leaves out on purpose, and why."""

from __future__ import annotations

import re
from typing import Any

from penstock.api.base import KeyPath, dotted
from penstock.api.manifests.messages import shown
from penstock.api.manifests.nodes import Document
from penstock.runtimes.dynamo.importer.source import ManifestSource, Unconverted, leaves

FOREIGN_GROUP = "nvidia.com/"
"""API group of Dynamo's operator, before a version."""

_WEIGHTS = "has no counterpart: each replica loads its weights from files"
_STANDBY = "has no counterpart: a failed replica is started again, with no standby beside it"
_PROBE = "is set by the runtime; put another into podTemplate"
_UNUSED = {
    "dynamoNamespace": "is the graph's own namespace and name here",
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "ingress": "is not made by the operator; expose the router's Service yourself",
    "modelRef": "names the model to Dynamo's DynamoModel objects; load adapters by the worker's own API",
    "frontendSidecar": "is filled in by Dynamo's operator; a service with role router stands in its place",
    "runtimeVersionOverride": "tells Dynamo's operator a version; here the image decides",
    "failover": _STANDBY,
    "gpuMemoryService": _WEIGHTS,
    "experimental.failover": _STANDBY,
    "experimental.gpuMemoryService": _WEIGHTS,
    "experimental.checkpoint": _WEIGHTS,
}
"""Keys of a component, and why a graph does without them."""

_PLACEHOLDER = re.compile(r"\$\{[A-Za-z_]\w*\}")


def note_unused_keys(source: ManifestSource, path: KeyPath) -> None:
    """Report the keys of a component that are left out on purpose."""
    for key, why in _UNUSED.items():
        found = (*path, *key.split("."))
        if source.peek(found) is not None:
            source.note(found, why)


def other_object(document: Document) -> Unconverted:
    """Report another object of the same file."""
    value = document.value if isinstance(document.value, dict) else {}
    is_dynamos = str(value.get("apiVersion")).startswith(FOREIGN_GROUP)
    why = "is read by Dynamo's operator alone" if is_dynamos else "is no part of a graph; apply it by itself"
    return Unconverted("(another object)", shown(value.get("kind")), why, document.line_of(()))


def placeholders(manifest: dict[str, Any]) -> list[Unconverted]:
    """Report each ``${NAME}`` of a template, which is to be filled in before it is applied."""
    found: dict[str, str] = {}
    for path, value in leaves(manifest):
        for text in (*map(str, path), value):
            for name in _PLACEHOLDER.findall(text) if isinstance(text, str) else ():
                found.setdefault(name, dotted(path))
    why = "is filled in by envsubst; do that first, or write it into the graph"
    return [Unconverted(f"(converted) {path}", name, why) for name, path in found.items()]
