"""Graphs as the API's models judge them."""

from __future__ import annotations

from penstock.api import GraphDeployment, dotted
from penstock.api.manifests.validation import validate
from penstock.core.errors import Problem
from penstock.operator.trim import Object

Validated = tuple[GraphDeployment | None, tuple[Problem, ...]]


def validated(raw: Object) -> Validated:
    """Return a graph of the cluster as the model, or None with everything wrong with it."""
    found, model = validate(GraphDeployment, manifest_of(raw))
    problems = tuple(Problem(path=dotted(path), message=message) for path, message in found)
    return (model if isinstance(model, GraphDeployment) else None), problems


def manifest_of(raw: Object) -> Object:
    """Return the user-written part of a cluster's object, for validation."""
    metadata = {key: raw["metadata"][key] for key in ("name", "namespace")}
    return {**{key: raw[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata}
