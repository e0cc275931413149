"""Objects of the cluster, validated by the API's models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from penstock.api import ClusterGpuPool, GpuPool, GraphDeployment, ProfileRequest, dotted
from penstock.api.manifests.validation import validate
from penstock.core.errors import ManifestProblem
from penstock_operator.trim import Object

M = TypeVar("M", ClusterGpuPool, GpuPool, GraphDeployment, ProfileRequest)

ValidatedGraph = tuple[GraphDeployment | None, tuple[ManifestProblem, ...]]


def validated(model: type[M], raw: Object) -> tuple[M | None, tuple[ManifestProblem, ...]]:
    """Return the user-written part of an object of the cluster as its model, or None with everything wrong with it."""
    metadata = {key: raw["metadata"][key] for key in ("name", "namespace") if key in raw["metadata"]}
    manifest = {**{key: raw[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata}
    found, made = validate(model, manifest)
    problems = tuple(ManifestProblem(path=dotted(path), message=message) for path, message in found)
    return (made if isinstance(made, model) else None), problems


def message_of(problems: Iterable[ManifestProblem]) -> str:
    """Return problems as one line of a condition."""
    return "; ".join(f"{each.path}: {each.message}" if each.path else each.message for each in problems)
