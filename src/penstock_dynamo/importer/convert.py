"""NVIDIA's DynamoGraphDeployment (v1alpha1 or v1beta1) becomes a GraphDeployment.

What cannot be carried is listed with its line and the reason. The result is validated by the API's own rules before it is
returned. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

from penstock.api.enums import Role
from penstock.api.graph import API_VERSION, GraphDeployment
from penstock.api.graph_rules import MAX_CHILD_NAME
from penstock.api.manifests.foreign import ManifestSource, leaves
from penstock.api.manifests.importing import ImportResult, Unconverted
from penstock.api.manifests.nodes import Document, read_documents
from penstock.api.manifests.validation import shown, validate
from penstock.api.rule import dotted
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock_dynamo.importer.component import (
    ALPHA,
    BETA,
    GROUP,
    Component,
    claimed_gpus,
    components_of,
    places_of,
    refuse_what_no_graph_runs,
    why_left_out,
)
from penstock_dynamo.importer.flags import read_router_flags, read_worker_flags
from penstock_dynamo.importer.planner import read_planner
from penstock_dynamo.importer.pods import (
    PROBE_REMEDY,
    drop_foreign_marks,
    is_owned_variable,
    read_env,
    read_pod,
)
from penstock_dynamo.importer.servers import OwnServers, servers_of, settle_frontend

FOREIGN_KIND = "DynamoGraphDeployment"
DEFAULT_BUDGET = 8
"""The planner document's max-gpu-budget."""

_WEIGHTS = "has no counterpart: each replica loads its weights from files"
_STANDBY = "has no counterpart: a failed replica is started again, with no standby alongside it"
_UNUSED = {
    "dynamoNamespace": "is the graph's own namespace and name here",
    "livenessProbe": PROBE_REMEDY,
    "readinessProbe": PROBE_REMEDY,
    "device": "is read by HAMi; write GPUs as gpusPerReplica, slices and placement into podTemplate",
    "ingress": "is not made by the operator; expose the router's Service yourself",
    "modelRef": "names the model to Dynamo's DynamoModel objects; load adapters by the worker's own API",
    "frontendSidecar": "is filled in by Dynamo's operator; a service with role router is in its place",
    "runtimeVersionOverride": "tells Dynamo's operator a version; here the image decides",
    "failover": _STANDBY,
    "gpuMemoryService": _WEIGHTS,
    "experimental.failover": _STANDBY,
    "experimental.gpuMemoryService": _WEIGHTS,
    "experimental.checkpoint": _WEIGHTS,
}
"""Keys of a component, and why a graph does without them."""

WRITTEN_FOR: Final = (1, 6)
"""The Dynamo whose flags the runtime gives."""
_DYNAMO_IMAGE = re.compile(r"(?:dynamo|/vllm-runtime)[^:@]*:v?(\d+)\.(\d+)")
"""Dynamo's images, and own ones that are named after it, with the version in their tag."""

_PLACEHOLDER = re.compile(r"\$\{[A-Za-z_]\w*\}")


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
    source = ManifestSource(document)
    components = list(components_of(source, _claim_templates(others)))
    refuse_what_no_graph_runs(source, components)
    manifest = _convert(source, components)
    if source.problems:
        raise InvalidSpecError(source.problems)
    source.note_rest()
    problems, model = validate(GraphDeployment, manifest)
    if model is None:
        raise InvalidSpecError(
            [ManifestProblem(f"(converted) {dotted(path)}", message, file) for path, message in problems]
        )
    notes = [*source.notes, *map(_other_object, others), *_placeholders(manifest)]
    return ImportResult(model, tuple(sorted(notes, key=lambda each: (each.line or 0, each.path))))


def _claim_templates(others: list[Document]) -> dict[str, int]:
    """Return the GPUs of each ResourceClaimTemplate of the file, by name."""
    found = {}
    for each in others:
        source = ManifestSource(each)
        name = source.word("metadata", "name")
        if source.peek("kind") == "ResourceClaimTemplate" and name is not None:
            found[name] = claimed_gpus(each.value)
    return found


def _only_document(text: str, file: str | None, name: str | None) -> tuple[Document, list[Document]]:
    documents, problems = read_documents(text, file)
    problems += [finding for each in documents for finding in each.findings]
    foreign = [each for each in documents if ManifestSource(each).peek("kind") == FOREIGN_KIND]
    names = [ManifestSource(each).word("metadata", "name") for each in foreign]
    found = [each for own, each in zip(names, foreign, strict=True) if name in (None, own)]
    if not problems and len(found) != 1:
        message = f"{len(found)} {FOREIGN_KIND} documents where one is needed; give a file with one"
        if foreign:
            message += f", or one's name: {', '.join(own or '(none)' for own in names)}"
        problems.append(ManifestProblem("", message, file))
    if not problems and found[0].value.get("apiVersion") not in (ALPHA, BETA):
        version = found[0].value.get("apiVersion")
        message = f"{version} is neither {ALPHA} nor {BETA}, the versions that can be converted"
        problems.append(found[0].problem(("apiVersion",), message))
    if problems:
        raise InvalidSpecError(problems)
    return found[0], [each for each in documents if each is not found[0]]


def _convert(source: ManifestSource, components: list[Component]) -> dict[str, Any]:
    source.taken.update({("apiVersion",), ("kind",), ("spec", "backendFramework")})
    if source.peek("status") is not None:
        source.at("status").note("is written by the cluster")
    spec: dict[str, Any] = {"model": {}, "runtime": "dynamo", "services": {}}
    metadata = _metadata(source.at("metadata"))
    planner: dict[str, Any] = {"enabled": False}
    kept: list[Component] = []
    for each in components:
        why = why_left_out(each, components)
        if why is not None:
            each.source.note(why)
        elif each.kind == "planner":
            planner, slo = read_planner(each)
            spec |= {"slo": slo} if slo else {}
        else:
            each.read()
            kept.append(each)
    servers = servers_of(kept)
    if servers is not None:
        spec["runtime"] = servers.runtime
    else:
        _note_old_images(kept)
    _settle_roles(kept)
    _settle_names(kept, str(metadata.get("name", "")))
    _fill(source, spec, kept, servers)
    workers = [each for each in kept if each.role is not Role.ROUTER]
    everything, _ = places_of(source)
    if not source.problems and "name" not in spec["model"]:
        if workers:
            workers[0].args.refuse(_why_no_model(workers))
        else:
            everything.refuse("hold no worker, so there is no model to serve; import the file that has one")
    if planner != {"enabled": False}:
        _open_scaling(workers)
        start = sum(each.gpus * each.service.get("replicas", 1) for each in workers)
        if "maxGpuBudget" not in planner and start > DEFAULT_BUDGET:
            planner["maxGpuBudget"] = None
            why = f"start with {start} GPUs, above the planner's default budget; no ceiling is set"
            everything.note(why, start)
    spec["services"] = {each.name: {"role": str(each.role), **each.service} for each in kept}
    _share_image(spec)
    spec["planner"] = planner
    return {"apiVersion": API_VERSION, "kind": "GraphDeployment", "metadata": metadata, "spec": spec}


def _why_no_model(workers: list[Component]) -> str:
    """Say what is missing, or which model only a shell or the cluster knows."""
    found = [text for each in workers if each.command for text, _ in each.command.left_out]
    computed = next((text for text in found if text.startswith(("--model ", "--model-path "))), None)
    if computed is not None:
        return (
            f"name a model that only the container's shell knows, {computed}; write its name after the flag"
        )
    return "names no model, nor does another worker; add --model to its arguments"


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
    """A worker without a role is what the others leave: decode alongside prefill, else aggregated.

    So is a decode worker that no prefill worker is alongside: under Dynamo it computes its prompts itself.
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


def _fill(
    source: ManifestSource, spec: dict[str, Any], components: list[Component], servers: OwnServers | None
) -> None:
    """Fill each component's service, and the sections of the graph that follow from them."""
    read_flags = read_worker_flags if servers is None else servers.read_worker_flags
    env = read_env(places_of(source)[1])
    if env:
        spec["env"] = env
    claims = _claims(source)
    pools: dict[str, Any] = {}
    for component in components:
        parts = read_pod(component, claims)
        if component.role is not Role.ROUTER:
            read_flags(component, spec)
        parts.env += _script_env(component)
        if component.role is Role.ROUTER:
            parts.env = [*({**each} for each in env), *parts.env]
            router = read_router_flags(component, parts.env)
            if router:
                spec["router"] = router
            if servers is not None:
                settle_frontend(component)
        component.service.update(parts.service_fields(pools))
        component.source.note_given(_UNUSED)
    if pools:
        spec["nodePools"] = pools


def _script_env(component: Component) -> list[dict[str, Any]]:
    """Return the variables that a component's script sets for its command."""
    found = component.command.env if component.command is not None else {}
    for name in filter(is_owned_variable, found):
        component.container.at("command").note(f"{name} is set by the runtime", found[name])
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
    """Alongside a planner every worker scales, within bounds that hold its starting number."""
    for component in workers:
        scaling = component.service.setdefault("scaling", {})
        start = component.service.get("replicas", 1)
        scaling.setdefault("minReplicas", min(1, start))
        scaling.setdefault("maxReplicas", max(DEFAULT_BUDGET, start))


def _note_old_images(components: list[Component]) -> None:
    """Report each image once that is older than the flags which its processes will be started with."""
    warned = set()
    for component in components:
        image = component.service.get("image", "")
        found = _DYNAMO_IMAGE.search(image)
        if found is None or image in warned or (int(found[1]), int(found[2])) >= WRITTEN_FOR:
            continue
        warned.add(image)
        component.container.at("image").note(
            f"is of Dynamo {found[1]}.{found[2]} by its tag; the runtime starts its processes with flags of"
            f" {'.'.join(map(str, WRITTEN_FOR))}, which an older one may refuse: use an image of that version or newer"
        )


def _share_image(spec: dict[str, Any]) -> None:
    """Move the most common image of the services up to the graph."""
    images = Counter(each["image"] for each in spec["services"].values() if "image" in each)
    if not images or any("image" not in each for each in spec["services"].values()):
        return
    spec["image"] = images.most_common(1)[0][0]
    for service in spec["services"].values():
        if service["image"] == spec["image"]:
            del service["image"]


def _other_object(document: Document) -> Unconverted:
    """Report another object of the same file."""
    value = document.value if isinstance(document.value, dict) else {}
    is_dynamos = str(value.get("apiVersion")).startswith(GROUP)
    why = "is read by Dynamo's operator alone" if is_dynamos else "is not part of a graph; apply it by itself"
    return Unconverted("(another object)", shown(value.get("kind")), why, document.line_of(()))


def _placeholders(manifest: dict[str, Any]) -> list[Unconverted]:
    """Report each ``${NAME}`` of a template, which is to be filled in before it is applied."""
    found: dict[str, str] = {}
    for path, value in leaves(manifest):
        for text in (*map(str, path), value):
            for name in _PLACEHOLDER.findall(text) if isinstance(text, str) else ():
                found.setdefault(name, dotted(path))
    why = "is filled in by envsubst; do that first, or write it into the graph"
    return [Unconverted(f"(converted) {path}", name, why) for name, path in found.items()]
