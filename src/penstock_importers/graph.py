"""What the importers of this package share: one document, its model, its services, and a graph that is valid or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api.graph import API_VERSION, GraphDeployment
from penstock.api.manifests.foreign import ManifestSource
from penstock.api.manifests.importing import ImportResult, Unconverted
from penstock.api.manifests.nodes import Document, read_documents
from penstock.api.manifests.validation import shown, validate
from penstock.api.rule import dotted
from penstock.core.errors import InvalidSpecError, ManifestProblem

_NAME_CHARACTERS: Final = 40
"""Chosen: a graph's name is the beginning of its pods' names, which have 63 characters."""
_HUGGING_FACE: Final = "hf://"
_CLAIM: Final = "pvc://"


@dataclass(slots=True)
class Draft:
    """A graph that is being put together, by the keys of its manifest.

    Attributes:
        router_replicas: Number of routers; None leaves the graph's default.
    """

    name: str = ""
    namespace: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    router_replicas: int | None = None

    def manifest(self) -> dict[str, Any]:
        """Return the graph as a manifest; nothing scales unless a service has bounds."""
        frontend: dict[str, Any] = {"role": "router"}
        if self.router_replicas is not None:
            frontend["replicas"] = self.router_replicas
        spec: dict[str, Any] = {
            "model": self.model,
            "runtime": "vllm",
            "services": {"frontend": frontend, **self.services},
        }
        spec |= {name: each for name, each in (("router", self.router), ("engine", self.engine)) if each}
        budget = sum(_most_replicas(each) * each["gpusPerReplica"] for each in self.services.values())
        is_scaled = any("scaling" in each for each in self.services.values())
        spec["planner"] = {"maxGpuBudget": budget} if is_scaled else {"enabled": False}
        metadata = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        return {"apiVersion": API_VERSION, "kind": "GraphDeployment", "metadata": metadata, "spec": spec}


def _most_replicas(service: Mapping[str, Any]) -> int:
    return int(service.get("scaling", {}).get("maxReplicas", service["replicas"]))


def graph_name(text: str) -> str:
    """Return a name that Kubernetes accepts, made of any text."""
    words = re.sub(r"[^a-z0-9]+", "-", text.rpartition("/")[2].lower())
    return words[:_NAME_CHARACTERS].strip("-") or "graph"


def read_model(draft: Draft, source: ManifestSource, uri: str, served: str | None) -> None:
    """Fill in the model of a URI, of Hugging Face or of a claim, and the name that clients use."""
    name = uri
    if uri.startswith(_HUGGING_FACE):
        name = uri.removeprefix(_HUGGING_FACE)
    elif uri.startswith(_CLAIM):
        claim, _, path = uri.removeprefix(_CLAIM).partition("/")
        name = f"/models/{path}"
        source.note(f"is read from {name} here; mount the claim {claim} at /models by podTemplate")
    elif "://" in uri:
        source.refuse(f"{uri} is not a model on Hugging Face or on a claim; give its files by a claim")
    draft.model["name"] = name
    if served is not None and served != name:
        draft.model["servedName"] = served


def read_service(source: ManifestSource, role: str, *, key: str = "replicas") -> dict[str, Any]:
    """Return a service with the source's number of replicas at ``key`` (1 if absent), and one GPU until its flags say otherwise."""
    replicas = source.take(key)
    return {"role": role, "replicas": 1 if replicas is None else replicas, "gpusPerReplica": 1}


def convert(
    text: str,
    file: str | None,
    *,
    is_own: Callable[[dict[str, Any]], bool],
    fill: Callable[[ManifestSource], Draft],
) -> ImportResult:
    """Convert the one document that is an importer's own.

    Args:
        text: YAML; other documents of it are listed as not carried.
        file: Name to put into problems.
        is_own: Tells the importer's documents from others.
        fill: Reads the document; what it neither takes nor notes is listed as not carried.

    Raises:
        InvalidSpecError: it is not one document, or no graph can express it.
    """
    documents, problems = read_documents(text, file)
    problems += [finding for each in documents for finding in each.findings]
    own = [each for each in documents if isinstance(each.value, dict) and is_own(each.value)]
    if not problems and len(own) != 1:
        problems = [ManifestProblem("", f"{len(own)} documents to convert where one is needed", file)]
    if problems:
        raise InvalidSpecError(problems)
    source = ManifestSource(own[0])
    draft = fill(source)
    if source.problems:
        raise InvalidSpecError(source.problems)
    source.note_rest()
    found, graph = validate(GraphDeployment, draft.manifest())
    if graph is None:
        raise InvalidSpecError(
            [ManifestProblem(f"(converted) {dotted(path)}", message, file) for path, message in found]
        )
    notes = [*source.notes, *(_other(each) for each in documents if each is not own[0])]
    return ImportResult(graph, tuple(sorted(notes, key=lambda each: (each.line or 0, each.path))))


def _other(document: Document) -> Unconverted:
    value = document.value if isinstance(document.value, dict) else {}
    why = "is not part of a graph; apply it by itself"
    return Unconverted("(another object)", shown(value.get("kind")), why, document.line_of(()))
