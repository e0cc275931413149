"""What a conversion leaves out on purpose, and why.

What the runtime and the operator set themselves is among it: a foreign value would point processes at each other's ports.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.api.manifests.messages import shown
from penstock.api.manifests.nodes import Document
from penstock.api.rule import KeyPath, dotted
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
from penstock.runtimes.dynamo.importer.source import ManifestSource, Unconverted, leaves

_VARIABLES = frozenset(
    {
        "DYN_COMPONENT",
        "DYN_DISCOVERY_BACKEND",
        "DYN_EVENT_PLANE",
        "DYN_HTTP_HOST",
        "DYN_HTTP_PORT",
        "DYN_KUBE_DISCOVERY_MODE",
        "DYN_NAMESPACE",
        "DYN_REQUEST_PLANE",
        "DYN_STORE_KV",
        "DYN_SYSTEM_HOST",
        "DYN_SYSTEM_PORT",
        "DYNAMO_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)
"""Of `penstock.runtimes.dynamo`, and of how a process is found; a service's variable would win over the runtime's."""

_FLAGS = (
    "--discovery-backend",
    "--event-plane",
    "--http-host",
    "--http-port",
    "--namespace",
    "--request-plane",
    "--store-kv",
)
"""The last is an older flag for the discovery's store."""

_PROBE = "is set by the runtime; put another into podTemplate"
_CONTAINER = {
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "startupProbe": "is set by the runtime; its time is carried as startupTimeoutSeconds where it states one",
    "ports": "are chosen by the operator",
}
_PROBE_PERIOD_S = 10
"""Of Kubernetes, where a probe states none."""

_FOREIGN_LABEL = re.compile(r"\bnvidia\.com/dynamo|\bgrove\.io/")
"""Labels and annotations that only Dynamo's operator and its schedulers write and read."""

FOREIGN_SELECTION = (
    "goes by labels that Dynamo's operator puts on pods; write it with penstock.dev/graph, penstock.dev/service"
    " and penstock.dev/role"
)

FOREIGN_GROUP = "nvidia.com/"
"""API group of Dynamo's operator, before a version."""

_WEIGHTS = "has no counterpart: each replica loads its weights from files"
_STANDBY = "has no counterpart: a failed replica is started again, with no standby beside it"
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


def is_owned_variable(name: object) -> bool:
    """Say whether the runtime sets an environment variable itself."""
    return isinstance(name, str) and name in _VARIABLES


def drop_owned_flags(source: ManifestSource, args_path: KeyPath, command: Command) -> None:
    """Remove the flags that the runtime gives itself."""
    for flag in _FLAGS:
        value = command.pop_value(flag)
        if value is not None:
            source.note(args_path, f"{flag} is chosen by the runtime", value)


def read_startup_seconds(source: ManifestSource, container: KeyPath) -> int | None:
    """Leave out a container's probes and ports; return how long its start may take, where its probe states that."""
    probe: Any = source.peek((*container, "startupProbe"))
    for key, why in _CONTAINER.items():
        if source.peek((*container, key)) is not None:
            source.note((*container, key), why)
    if not isinstance(probe, dict) or "failureThreshold" not in probe:
        return None
    period, failures = probe.get("periodSeconds", _PROBE_PERIOD_S), probe["failureThreshold"]
    delay = probe.get("initialDelaySeconds", 0)
    numbers = [each for each in (delay, period, failures) if isinstance(each, int)]
    are_counts = len(numbers) == len((delay, period, failures)) and min(numbers) >= 0
    return delay + period * failures if are_counts else None


def selects_by_foreign_labels(value: object) -> bool:
    """Say whether a part of a pod refers to labels that only Dynamo's operator and its schedulers put on pods."""
    if isinstance(value, dict):
        return any(
            _FOREIGN_LABEL.search(str(key)) or selects_by_foreign_labels(each) for key, each in value.items()
        )
    if isinstance(value, list):
        return any(map(selects_by_foreign_labels, value))
    return isinstance(value, str) and _FOREIGN_LABEL.search(value) is not None


def drop_foreign_marks(source: ManifestSource, metadata: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """Return labels or annotations without those that only Dynamo's operator reads.

    Args:
        source: Where they are reported.
        metadata: Labels, or annotations.
        path: Theirs.
    """
    foreign = {key for key in metadata if _FOREIGN_LABEL.match(str(key))}
    for key in sorted(foreign):
        source.note((*path, key), "is read by Dynamo's operator alone")
    return {key: value for key, value in metadata.items() if key not in foreign}


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
