"""Manifests are read and validated: every problem of every document at once, each with its line.

Called by the command line and by every process that takes a graph file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.api.base import SpecModel
from penstock.api.graph import API_VERSION, GraphDeployment, ScalingAdapter
from penstock.api.manifests.nodes import Document, ParseFinding, read_documents, read_text
from penstock.api.manifests.validation import shown, template_of, validate
from penstock.api.profile_request import ProfileRequest
from penstock.api.rule import dotted
from penstock.core.errors import InvalidSpecError, Problem

_Kind = GraphDeployment | ProfileRequest | ScalingAdapter

_KINDS: dict[str, type[_Kind]] = {
    "GraphDeployment": GraphDeployment,
    "ScalingAdapter": ScalingAdapter,
    "ProfileRequest": ProfileRequest,
}


@dataclass(frozen=True, slots=True)
class Manifests:
    """The valid objects of one or more files, in their order."""

    graphs: tuple[GraphDeployment, ...]
    adapters: tuple[ScalingAdapter, ...]
    profile_requests: tuple[ProfileRequest, ...] = ()


def load_graph(source: Path | str, *, name: str | None = None) -> GraphDeployment:
    """Return the one GraphDeployment of a file or text.

    Args:
        source: A path; a string that holds a line break is taken as the manifest itself.
        name: Which graph, where there are several.

    Raises:
        InvalidSpecError: With every problem found, also where there is no graph or more than one.
    """
    file, manifests = _load(source)
    graphs = [each for each in manifests.graphs if name is None or each.name == name]
    if len(graphs) == 1:
        return graphs[0]
    names = ", ".join(each.name for each in manifests.graphs) or "none"
    if not graphs:
        missing = "GraphDeployment" if name is None else f"GraphDeployment {name!r}"
        message = f"no {missing} here (found: {names}); add one or give another file"
    else:
        message = f"{len(graphs)} GraphDeployments ({names}) where one is needed; split the file or name one"
    raise InvalidSpecError([Problem(path="", message=message, file=file)])


def load_manifests(source: Path | str) -> Manifests:
    """Return every object of a file or text.

    Args:
        source: A path; a string that holds a line break is taken as the manifest itself.

    Raises:
        InvalidSpecError: With every problem found.
    """
    return _load(source)[1]


def parse_manifests(text: str, file: str | None = None) -> tuple[Manifests, list[Problem]]:
    """Return the valid objects of ``text`` and every problem, sorted by line."""
    documents, findings = read_documents(text)
    problems = [_from_finding(each, file) for each in findings]
    if not documents and not findings:
        problems.append(Problem(path="", message="holds no manifest; add a GraphDeployment", file=file))
    graphs: list[GraphDeployment] = []
    adapters: list[ScalingAdapter] = []
    requests: list[ProfileRequest] = []
    for document in documents:
        found, model = _validate(document, file)
        problems += found
        if isinstance(model, GraphDeployment):
            problems += _duplicate(model, graphs, document, file)
            graphs.append(model)
        elif isinstance(model, ScalingAdapter):
            problems += _duplicate(model, adapters, document, file)
            problems += _dangling(model, graphs, document, file)
            adapters.append(model)
        elif isinstance(model, ProfileRequest):
            problems += _duplicate(model, requests, document, file)
            problems += _template(model, document, file)
            requests.append(model)
    problems.sort(key=lambda each: each.line or 0)
    return Manifests(tuple(graphs), tuple(adapters), tuple(requests)), problems


def _load(source: Path | str) -> tuple[str | None, Manifests]:
    if isinstance(source, str) and "\n" in source:
        file, text = None, source
    else:
        file, text = str(source), read_text(Path(source))
    manifests, problems = parse_manifests(text, file)
    if problems:
        raise InvalidSpecError(problems)
    return file, manifests


def _validate(document: Document, file: str | None) -> tuple[list[Problem], SpecModel | None]:
    problems = [_from_finding(each, file) for each in document.findings]
    value = document.value
    if not isinstance(value, dict):
        message = f"{shown(value)} where a map with apiVersion, kind, metadata and spec is needed"
        return [*problems, Problem(path="", message=message, file=file, line=document.line_of(()))], None
    model_type = _KINDS.get(str(value.get("kind")))
    if model_type is None:
        return [*problems, _wrong_kind(document, file)], None
    problems += [
        Problem(path=key, message=f"missing; add {key}: {expected}", file=file, line=document.line_of(()))
        for key, expected in (("apiVersion", API_VERSION),)
        if key not in value
    ]
    found, model = validate(model_type, document.value)
    problems += [
        Problem(path=dotted(path), message=message, file=file, line=document.line_of(path))
        for path, message in found
    ]
    return problems, (model if not problems else None)


def _wrong_kind(document: Document, file: str | None) -> Problem:
    kind = document.value.get("kind")
    if kind is None:
        message = "missing; add kind: GraphDeployment"
    elif kind == "DynamoGraphDeployment":
        message = f"{kind} is NVIDIA's; convert it with `penstock import`"
    else:
        message = f"{shown(kind)} is not one of {', '.join(_KINDS)}; correct it"
    return Problem(path="kind", message=message, file=file, line=document.line_of(("kind",)))


def _duplicate(
    model: _Kind,
    earlier: Sequence[_Kind],
    document: Document,
    file: str | None,
) -> list[Problem]:
    identity = (model.metadata.namespace, model.metadata.name)
    if identity not in {(each.metadata.namespace, each.metadata.name) for each in earlier}:
        return []
    message = f"a second {model.kind} {model.metadata.name!r}; rename or remove one"
    line = document.line_of(("metadata", "name"))
    return [Problem(path="metadata.name", message=message, file=file, line=line)]


def _dangling(
    adapter: ScalingAdapter, graphs: Sequence[GraphDeployment], document: Document, file: str | None
) -> list[Problem]:
    """An adapter may come alone; with its graph it must name one of the graph's services."""
    graph = next((each for each in graphs if each.name == adapter.spec.graph), None)
    if graph is None or adapter.spec.service in graph.spec.services:
        return []
    known = ", ".join(graph.spec.services)
    message = f"{adapter.spec.service!r} is no service of graph {graph.name} ({known}); choose one of them"
    line = document.line_of(("spec", "service"))
    return [Problem(path="spec.service", message=message, file=file, line=line)]


def _template(request: ProfileRequest, document: Document, file: str | None) -> list[Problem]:
    """Return what is wrong with the graph that a request describes."""
    found, _ = template_of(request)
    return [
        Problem(path=dotted(path), message=message, file=file, line=document.line_of(path))
        for path, message in found
    ]


def _from_finding(finding: ParseFinding, file: str | None) -> Problem:
    return Problem(path=dotted(finding.path), message=finding.message, file=file, line=finding.line)
