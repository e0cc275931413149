"""Graphs as the API's models judge them, remembered until they change."""

from __future__ import annotations

from typing import Final

from penstock.api import GraphDeployment, dotted
from penstock.api.manifests.validation import validate
from penstock.core.errors import Problem
from penstock.operator.memory import LruCache
from penstock.operator.queue import Key
from penstock.operator.trim import Object

MODELS: Final = 256
"""Validated graphs that are kept; one at rest needs none. Chosen: five megabytes."""

Validated = tuple[GraphDeployment | None, tuple[Problem, ...]]


class Models:
    """The validated graphs of late."""

    def __init__(self) -> None:
        self._recent: LruCache[Key, tuple[tuple[str, int], Validated]] = LruCache(MODELS)

    def forget(self, key: Key) -> None:
        """Drop a graph that is gone."""
        self._recent.forget(key)

    def of(self, key: Key, raw: Object) -> Validated:
        """Return the validated graph, or None with everything wrong with it."""
        metadata = raw["metadata"]
        identity = (metadata["uid"], metadata.get("generation", 0))
        known = self._recent.get(key)
        if known is None or known[0] != identity:
            known = identity, validated(raw)
            self._recent.put(key, known)
        return known[1]


def validated(raw: Object) -> Validated:
    """Return a graph of the cluster as the model, or None with everything wrong with it."""
    found, model = validate(GraphDeployment, manifest_of(raw))
    problems = tuple(Problem(path=dotted(path), message=message) for path, message in found)
    return (model if isinstance(model, GraphDeployment) else None), problems


def manifest_of(raw: Object) -> Object:
    """Return the user-written part of a cluster's object, for validation."""
    metadata = {key: raw["metadata"][key] for key in ("name", "namespace")}
    return {**{key: raw[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata}
