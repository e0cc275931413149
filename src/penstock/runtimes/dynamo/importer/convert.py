"""NVIDIA's DynamoGraphDeployment (v1alpha1 or v1beta1) becomes a GraphDeployment.

What cannot be carried is listed with its line and the reason; nothing is dropped in silence. The result
is validated by the API's own rules before it is returned. Pure.

Source of the foreign form: ai-dynamo/dynamo, deploy/operator/api/v1alpha1 and examples/backends/vllm/deploy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from penstock.api.enums import Role
from penstock.api.graph import API_VERSION, GraphDeployment
from penstock.api.graph_rules import MAX_CHILD_NAME
from penstock.api.manifests.nodes import Document, read_documents
from penstock.api.manifests.validation import validate
from penstock.api.rule import dotted
from penstock.core.errors import InvalidSpecError, Problem
from penstock.runtimes.dynamo.importer.flags import read_planner, read_router_flags, read_worker_flags
from penstock.runtimes.dynamo.importer.left_out import (
    FOREIGN_GROUP,
    SERVICES,
    drop_foreign_marks,
    is_owned_variable,
    note_unused_keys,
    other_object,
    placeholders,
    refuse_missing_model,
    refuse_what_no_graph_runs,
    why_left_out,
)
from penstock.runtimes.dynamo.importer.pods import read_env, read_pod
from penstock.runtimes.dynamo.importer.services import (
    MOCKER_MODULE,
    Component,
    component_kind,
    read_component,
)
from penstock.runtimes.dynamo.importer.source import ManifestSource, Places, Unconverted, as_alpha

FOREIGN_KIND = "DynamoGraphDeployment"
ALPHA = FOREIGN_GROUP + "v1alpha1"
BETA = FOREIGN_GROUP + "v1beta1"
DEFAULT_BUDGET = 8
"""The planner document's max-gpu-budget."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """A converted graph.

    Attributes:
        graph: Valid by the API's rules.
        unconverted: What it does not carry, in the order of lines.
    """

    graph: GraphDeployment
    unconverted: tuple[Unconverted, ...]


def import_dgd(text: str, file: str | None = None, *, name: str | None = None) -> ImportResult:
    """Convert one DynamoGraphDeployment of ``text``.

    Args:
        text: YAML; other objects in it are reported, since a graph does not hold them.
        file: Name to put into problems.
        name: Of the deployment, where there are several; None: there is one.

    Raises:
        InvalidSpecError: Not a DynamoGraphDeployment of a known version, or one that no graph can express.
    """
    document, others = _only_document(text, file, name)
    value, places = (
        as_alpha(document.value) if document.value["apiVersion"] == BETA else (document.value, Places())
    )
    source = ManifestSource(document, value, places, file)
    refuse_what_no_graph_runs(source)
    manifest = _convert(source)
    if source.problems:
        raise InvalidSpecError(source.problems)
    source.note_rest()
    problems, model = validate(GraphDeployment, manifest)
    if not isinstance(model, GraphDeployment):
        raise InvalidSpecError(
            [
                Problem(path=f"(converted) {dotted(path)}", message=message, file=file)
                for path, message in problems
            ]
        )
    notes = [*source.notes, *map(other_object, others), *placeholders(manifest)]
    return ImportResult(model, tuple(sorted(notes, key=lambda each: (each.line or 0, each.path))))


def _only_document(text: str, file: str | None, name: str | None) -> tuple[Document, list[Document]]:
    documents, findings = read_documents(text)
    findings = [*findings, *(finding for each in documents for finding in each.findings)]
    problems = [Problem(dotted(each.path), each.message, file, each.line) for each in findings]
    named = [
        (_name_of(each), each)
        for each in documents
        if isinstance(each.value, dict) and each.value.get("kind") == FOREIGN_KIND
    ]
    found = [each for own, each in named if name in (None, own)]
    if not problems and len(found) != 1:
        message = f"{len(found)} {FOREIGN_KIND} documents where one is needed; give a file with one"
        if named:
            message += f", or one's name: {', '.join(own or '(none)' for own, _ in named)}"
        problems.append(Problem("", message, file))
    if not problems and found[0].value.get("apiVersion") not in (ALPHA, BETA):
        version = found[0].value.get("apiVersion")
        message = f"{version} is neither {ALPHA} nor {BETA}, the versions that can be converted"
        problems.append(Problem("apiVersion", message, file, found[0].line_of(("apiVersion",))))
    if problems:
        raise InvalidSpecError(problems)
    return found[0], [each for each in documents if each is not found[0]]


def _name_of(document: Document) -> str | None:
    metadata = document.value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None


def _convert(source: ManifestSource) -> dict[str, Any]:
    source.taken.update({("apiVersion",), ("kind",), ("spec", "backendFramework")})
    if source.peek("status") is not None:
        source.at("status").note("is written by the cluster")
    spec: dict[str, Any] = {"model": {}, "runtime": "dynamo", "services": {}}
    metadata = _metadata(source.at("metadata"))
    planner: dict[str, Any] = {"enabled": False}
    components: list[Component] = []
    every = [source.at(*SERVICES, key) for key in source.names(*SERVICES)]
    for each in every:
        why = why_left_out(each, [other for other in every if other is not each])
        if why is not None:
            each.note(why)
        elif component_kind(each) == "planner":
            planner = read_planner(each)
        else:
            components.append(read_component(each))
    _settle_roles(components)
    _settle_names(components, str(metadata.get("name", "")))
    _fill(source, spec, components)
    workers = [each for each in components if each.role is not Role.ROUTER]
    refuse_missing_model(source, spec, workers)
    if planner != {"enabled": False}:
        _open_scaling(workers)
        _settle_budget(source, planner, workers)
    spec["services"] = {each.name: {"role": str(each.role), **each.service} for each in components}
    _share_image(spec)
    spec["planner"] = planner
    return {"apiVersion": API_VERSION, "kind": "GraphDeployment", "metadata": metadata, "spec": spec}


def _metadata(source: ManifestSource) -> dict[str, Any]:
    metadata = {}
    for key in ("name", "namespace", "labels", "annotations"):
        value = source.take(key)
        if isinstance(value, dict):
            value = drop_foreign_marks(source.at(key), value) or None
        if value is not None:
            metadata[key] = value
    return metadata


def _settle_roles(components: list[Component]) -> None:
    """A worker without a role is what the others leave: decode beside prefill, else aggregated.

    So is a decode worker that no prefill worker stands beside: under Dynamo it computes its prompts itself.
    """
    rest = Role.DECODE if Role.PREFILL in {each.role for each in components} else Role.AGGREGATED
    for component in components:
        if component.role in {None, Role.DECODE}:
            component.role = rest


def _settle_names(components: list[Component], graph: str) -> None:
    """Fall back to the role where a name would be too long or taken."""
    taken: set[str] = set()
    for component in components:
        too_long = len(graph) + len(component.name) + 1 > MAX_CHILD_NAME
        if too_long or component.name in taken:
            component.name = str(component.role)
        taken.add(component.name)


def _fill(source: ManifestSource, spec: dict[str, Any], components: list[Component]) -> None:
    """Fill each component's service, and the sections of the graph that follow from them."""
    env = read_env(source.at("spec", "envs"))
    if env:
        spec["env"] = env
    claims = _claims(source)
    pools: dict[str, Any] = {}
    for component in components:
        parts = read_pod(component.source, claims)
        parts.env += _script_env(component)
        if component.role is Role.ROUTER:
            parts.env = [*({**each} for each in env), *parts.env]
            router = read_router_flags(component, parts.env)
            if router:
                spec["router"] = router
        else:
            read_worker_flags(component, spec)
            if component.command is not None and component.command.module == MOCKER_MODULE:
                spec.setdefault("engine", {})["mocker"] = True
        component.service.update(parts.service_fields(pools))
        note_unused_keys(component.source)
    if pools:
        spec["nodePools"] = pools


def _script_env(component: Component) -> list[dict[str, Any]]:
    """Return the variables that a component's script sets for its command."""
    found = component.command.env if component.command is not None else {}
    command = component.source.at("extraPodSpec", "mainContainer", "command")
    for name in filter(is_owned_variable, found):
        command.note(f"{name} is set by the runtime", found[name])
    return [{"name": name, "value": value} for name, value in found.items() if not is_owned_variable(name)]


def _claims(source: ManifestSource) -> dict[str, str]:
    """Return the graph's claims by name; their size and class are set where they are created."""
    claims = {}
    for claim in source.elements("spec", "pvcs"):
        name = claim.take("name")
        if isinstance(name, str):
            claims[name] = name
        if claim.peek("create") is False:
            claim.take("create")
        claim.note_keys("claims are not created by a graph; create it first")
    return claims


def _open_scaling(workers: list[Component]) -> None:
    """Beside a planner every worker scales, within bounds that hold its starting number."""
    for component in workers:
        scaling = component.service.setdefault("scaling", {})
        start = component.service.get("replicas", 1)
        scaling.setdefault("minReplicas", min(1, start))
        scaling.setdefault("maxReplicas", max(DEFAULT_BUDGET, start))


def _settle_budget(source: ManifestSource, planner: dict[str, Any], workers: list[Component]) -> None:
    start = sum(each.gpus * each.service.get("replicas", 1) for each in workers)
    if "maxGpuBudget" not in planner and start > DEFAULT_BUDGET:
        planner["maxGpuBudget"] = None
        why = f"start with {start} GPUs, above the planner's default budget; no ceiling is set"
        source.at(*SERVICES).note(why, start)


def _share_image(spec: dict[str, Any]) -> None:
    """Move the most common image of the services up to the graph."""
    images = Counter(each["image"] for each in spec["services"].values() if "image" in each)
    if not images or any("image" not in each for each in spec["services"].values()):
        return
    spec["image"] = images.most_common(1)[0][0]
    for service in spec["services"].values():
        if service["image"] == spec["image"]:
            del service["image"]
