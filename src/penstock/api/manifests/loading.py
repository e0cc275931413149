"""Manifests are read and validated: every problem of every document at once, each with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.api.gpu_pool import ClusterGpuPool, GpuPool, PoolObject
from penstock.api.graph import API_VERSION, GraphDeployment, ScalingAdapter
from penstock.api.manifests.importing import is_importable
from penstock.api.manifests.nodes import Document, read_documents, read_text
from penstock.api.manifests.validation import problems_outside_pools, shown, template_of, validate
from penstock.api.pool_rules import as_pool_member, pool_problems
from penstock.api.profile_request import ProfileRequest
from penstock.api.rule import KeyPath
from penstock.core.errors import InvalidSpecError, ManifestProblem

_Kind = PoolObject | GraphDeployment | ProfileRequest | ScalingAdapter

_Finding = tuple[KeyPath, str]

Check = Callable[[_Kind], Iterable[_Finding]]

_KINDS: dict[str, type[_Kind]] = {
    "GraphDeployment": GraphDeployment,
    "ScalingAdapter": ScalingAdapter,
    "ProfileRequest": ProfileRequest,
    "GpuPool": GpuPool,
    "ClusterGpuPool": ClusterGpuPool,
}


@dataclass(frozen=True, slots=True)
class Manifests:
    """The valid objects of one or more files, in their order."""

    graphs: tuple[GraphDeployment, ...]
    adapters: tuple[ScalingAdapter, ...]
    profile_requests: tuple[ProfileRequest, ...] = ()
    gpu_pools: tuple[PoolObject, ...] = ()


def load_graph(source: Path | str, *, name: str | None = None, draws: bool = False) -> GraphDeployment:
    """Return the one GraphDeployment of a file or text, or the one called ``name``.

    Args:
        source: A path; a string that holds a line break is taken as the manifest itself.
        name: Which graph, where there are several.
        draws: It draws from a GPU pool, or another budget takes the place of its default: none counts that it does not write.

    Raises:
        InvalidSpecError: With every problem found, also where there is no graph or more than one.
    """
    file, manifests = _load(source, draws=draws)
    graphs = [each for each in manifests.graphs if name is None or each.name == name]
    if len(graphs) == 1:
        return as_pool_member(graphs[0]) if draws else graphs[0]
    names = ", ".join(each.name for each in manifests.graphs) or "none"
    if not graphs:
        missing = "GraphDeployment" if name is None else f"GraphDeployment {name!r}"
        message = f"no {missing} here (found: {names}); add one or give another file"
    else:
        message = f"{len(graphs)} GraphDeployments ({names}) where one is needed; split the file or name one"
    raise InvalidSpecError([ManifestProblem(path="", message=message, file=file)])


def load_pool(source: Path | str) -> PoolObject:
    """Return the one GpuPool or ClusterGpuPool of a file or text, as `load_graph` takes them.

    Raises:
        InvalidSpecError: With every problem found, also where there is no pool or more than one.
    """
    file, manifests = _load(source)
    if len(manifests.gpu_pools) == 1:
        return manifests.gpu_pools[0]
    message = f"{len(manifests.gpu_pools)} GpuPools where one is needed; give a file with one"
    raise InvalidSpecError([ManifestProblem(path="", message=message, file=file)])


def load_manifests(source: Path | str) -> Manifests:
    """Return every object of a file or text, as `load_graph` takes them.

    Raises:
        InvalidSpecError: With every problem found.
    """
    return _load(source)[1]


def parse_manifests(
    text: str, file: str | None = None, *, check: Check | None = None, draws: bool = False
) -> tuple[Manifests, list[ManifestProblem]]:
    """Return the valid objects of ``text`` and every problem, sorted by line.

    Args:
        text: The manifests.
        file: Its name.
        check: Looks for more in a valid object.
        draws: Every graph draws from a GPU pool, not those alone that one in ``text`` matches.
    """
    documents, problems = read_documents(text, file)
    if not documents and not problems:
        problems.append(
            ManifestProblem(path="", message="holds no manifest; add a GraphDeployment", file=file)
        )
    models: list[_Kind] = []
    places: list[tuple[GraphDeployment, Document]] = []
    for document in documents:
        problems += document.findings
        found, model = _validate(document)
        if model is not None:
            found = [*_beside(model, models), *found, *(() if check is None else check(model))]
        problems += [document.problem(path, message) for path, message in found]
        if model is not None and not document.findings:
            models.append(model)
            if isinstance(model, GraphDeployment) and not draws:
                places.append((model, document))
    pools = tuple(each for each in models if isinstance(each, PoolObject))
    for graph, document in places:
        at = (graph.name, graph.metadata.labels, graph.metadata.namespace)
        if not any(entry.match.may_cover(*at) for pool in pools for entry in pool.spec.graphs):
            problems += [document.problem(path, message) for path, message in problems_outside_pools(graph)]
    problems.sort(key=lambda each: each.line or 0)
    graphs = tuple(each for each in models if isinstance(each, GraphDeployment))
    adapters = tuple(each for each in models if isinstance(each, ScalingAdapter))
    requests = tuple(each for each in models if isinstance(each, ProfileRequest))
    return Manifests(graphs, adapters, requests, pools), problems


def _load(source: Path | str, *, draws: bool = False) -> tuple[str | None, Manifests]:
    if isinstance(source, str) and "\n" in source:
        file, text = None, source
    else:
        file, text = str(source), read_text(Path(source))
    manifests, problems = parse_manifests(text, file, draws=draws)
    if problems:
        raise InvalidSpecError(problems)
    return file, manifests


def _validate(document: Document) -> tuple[list[_Finding], _Kind | None]:
    value = document.value
    if not isinstance(value, dict):
        return [((), f"{shown(value)} where a map with apiVersion, kind, metadata and spec is needed")], None
    kind = value.get("kind")
    model_type = _KINDS.get(str(kind))
    if model_type is None:
        if kind is None:
            message = "missing; add kind: GraphDeployment"
        elif is_importable(kind):
            message = f"{kind} is not a kind of Penstock's; convert it with `penstock import`"
        else:
            message = f"{shown(kind)} is not one of {', '.join(_KINDS)}; correct it"
        return [(("kind",), message)], None
    found, model = validate(model_type, value)
    if "apiVersion" not in value:
        return [(("apiVersion",), f"missing; add apiVersion: {API_VERSION}"), *found], None
    return found, model


def _beside(model: _Kind, earlier: Sequence[_Kind]) -> Iterator[_Finding]:
    """Yield what is wrong with an object alongside those before it, and with the graph that a request describes."""
    identity = (type(model), model.metadata.namespace, model.name)
    if identity in {(type(each), each.metadata.namespace, each.name) for each in earlier}:
        yield ("metadata", "name"), f"a second {model.kind} {model.name!r}; rename or remove one"
    if isinstance(model, ScalingAdapter):  # it may come alone
        graphs = [
            each for each in earlier if isinstance(each, GraphDeployment) and each.name == model.spec.graph
        ]
        if graphs and model.spec.service not in graphs[0].spec.services:
            known = ", ".join(graphs[0].spec.services)
            message = f"{model.spec.service!r} is not a service of graph {graphs[0].name} ({known}); choose one of them"
            yield ("spec", "service"), message
    if isinstance(model, PoolObject):
        yield from pool_problems(model, [each for each in earlier if isinstance(each, GraphDeployment)])
    if isinstance(model, ProfileRequest):
        yield from template_of(model)[0]
