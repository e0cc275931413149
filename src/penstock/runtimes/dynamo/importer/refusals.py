"""What no graph can run is refused by its place; a component that graphs have no role for is left out."""

from __future__ import annotations

import re
from typing import Any

from penstock.api.manifests.messages import shown
from penstock.api.rule import KeyPath
from penstock.runtimes.dynamo.importer.command import SHELLS, Command
from penstock.runtimes.dynamo.importer.services import (
    FRONTEND_MODULE,
    WORKER_MODULES,
    Component,
    component_kind,
    container_words,
    read_command,
    stage_of,
)
from penstock.runtimes.dynamo.importer.source import ManifestSource

SERVICES: KeyPath = ("spec", "services")

_OTHER_ENGINES = re.compile(r"\bdynamo\.(trtllm|sglang)\b|\b(tensorrtllm|trtllm|sglang)-runtime\b")
"""Modules and images of Dynamo's other workers."""

_REMEDY = (
    "graphs run vLLM, Dynamo's vLLM workers, or simulated ones; give the vLLM variant of this deployment"
)
_OWN_WORKERS = "graphs run python3 -m dynamo.vllm and python3 -m dynamo.mocker"


def refuse_what_no_graph_runs(source: ManifestSource) -> None:
    """Refuse workers of other engines and programs: their image would be started with vLLM's command."""
    if source.peek(("spec", "backendFramework")) not in (None, "vllm"):
        framework = shown(source.peek(("spec", "backendFramework")))
        source.refuse(("spec", "backendFramework"), f"names another engine than vLLM, {framework}; {_REMEDY}")
    for key in source.keys(SERVICES):
        path = (*SERVICES, key)
        if component_kind(source, path) == "worker":
            _refuse_worker(source, path)


def _refuse_worker(source: ManifestSource, path: KeyPath) -> None:
    container = (*path, "extraPodSpec", "mainContainer")
    named = [(*container, part) for part in ("image", "command", "args")]
    others = [(each, found) for each in named if (found := _OTHER_ENGINES.search(str(source.peek(each))))]
    for each, found in others:
        source.refuse(each, f"names another engine than vLLM, {found[0]}; {_REMEDY}")
    if others:
        return
    command = read_command(source, path)
    place = (*container, "command" if source.peek((*container, "command")) is not None else "args")
    if command is None:
        source.refuse(place, f"{_program(source, container)}; {_OWN_WORKERS}: start one of them")
    elif command.module is not None and command.module not in WORKER_MODULES:
        source.refuse(place, f"starts {command.module}; {_OWN_WORKERS}: start one of them")


def _program(source: ManifestSource, container: KeyPath) -> str:
    """Name what a container runs, where that is no command of Dynamo's."""
    words = container_words(source, container)
    if words[0] in SHELLS:
        return "is a script that starts Dynamo by no command, or by several"
    return f"runs {words[0]}"


def why_left_out(source: ManifestSource, path: KeyPath) -> str | None:
    """Return why a component becomes no service, or None if it becomes one."""
    kind = component_kind(source, path)
    named = source.peek((*path, "componentType"))
    if kind is None:
        return (
            "picks workers for a gateway; add a service with role router in its place"
            if named == "epp"
            else f"componentType {named!r} has no role in a graph"
        )
    command = read_command(source, path)
    if kind == "router" and not _is_frontend(command) and _has_other_frontend(source, path):
        return "is a frontend by its type but runs something else; deploy it by itself"
    stage = stage_of(command) if kind == "worker" else None
    if stage is not None:
        return (
            f"is the {stage} stage of multimodal serving; a worker with --enable-multimodal does without it"
        )
    return None


def _is_frontend(command: Command | None) -> bool:
    return command is not None and command.module in {None, FRONTEND_MODULE}


def _has_other_frontend(source: ManifestSource, path: KeyPath) -> bool:
    others = [(*SERVICES, key) for key in source.keys(SERVICES) if (*SERVICES, key) != path]
    return any(
        component_kind(source, each) == "router" and _is_frontend(read_command(source, each))
        for each in others
    )


def refuse_missing_model(source: ManifestSource, spec: dict[str, Any], workers: list[Component]) -> None:
    """Refuse a deployment that nothing names a model in, or that has no worker to run it."""
    if source.problems or "name" in spec["model"]:
        return
    if workers:
        place = (*workers[0].path, "extraPodSpec", "mainContainer", "args")
        source.refuse(place, "names no model, nor does another worker; add --model to its arguments")
    else:
        source.refuse(SERVICES, "hold no worker, so there is no model to serve; import the file that has one")
