"""What a conversion leaves out on purpose, and why, and what it refuses because no graph can run it.

What the runtime and the operator set themselves is among it: a foreign value would point processes at each other's ports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penstock.api.manifests.nodes import Document
from penstock.api.manifests.validation import shown
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
    "device": "is read by HAMi; write GPUs as gpusPerReplica, slices and placement into podTemplate",
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


def drop_owned_flags(component: Component, command: Command) -> None:
    """Remove the flags that the runtime gives itself."""
    for flag in _FLAGS:
        value = command.pop_value(flag)
        if value is not None:
            component.args.note(f"{flag} is chosen by the runtime", value)


def read_startup_seconds(container: ManifestSource) -> int | None:
    """Leave out a container's probes and ports; return how long its start may take, where its probe states that."""
    probe: Any = container.peek("startupProbe")
    for key, why in _CONTAINER.items():
        if container.peek(key) is not None:
            container.at(key).note(why)
    if not isinstance(probe, dict) or "failureThreshold" not in probe:
        return None
    period, failures = probe.get("periodSeconds", _PROBE_PERIOD_S), probe["failureThreshold"]
    delay = probe.get("initialDelaySeconds", 0)
    are_counts = all(isinstance(each, int) and each >= 0 for each in (delay, period, failures))
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


def drop_foreign_marks(source: ManifestSource, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the labels or annotations at ``source`` without those that only Dynamo's operator reads."""
    foreign = {key for key in metadata if _FOREIGN_LABEL.match(str(key))}
    for key in sorted(foreign):
        source.at(key).note("is read by Dynamo's operator alone")
    return {key: value for key, value in metadata.items() if key not in foreign}


def note_unused_keys(component: ManifestSource) -> None:
    """Report the keys of a component that are left out on purpose."""
    for key, why in _UNUSED.items():
        found = component.at(*key.split("."))
        if found.peek() is not None:
            found.note(why)


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
    framework = source.at("spec", "backendFramework")
    if framework.peek() not in (None, "vllm"):
        framework.refuse(f"names another engine than vLLM, {shown(framework.peek())}; {_REMEDY}")
    for key in source.names(*SERVICES):
        component = source.at(*SERVICES, key)
        if component_kind(component) == "worker":
            _refuse_worker(component)


def _refuse_worker(component: ManifestSource) -> None:
    container = component.at("extraPodSpec", "mainContainer")
    named = [container.at(part) for part in ("image", "command", "args")]
    others = [(each, found) for each in named if (found := _OTHER_ENGINES.search(str(each.peek())))]
    for each, found in others:
        each.refuse(f"names another engine than vLLM, {found[0]}; {_REMEDY}")
    if others:
        return
    command = read_command(component)
    place = container.at("command" if container.peek("command") is not None else "args")
    if command is None:
        words = container_words(container)
        is_script = words[0] in SHELLS
        program = (
            "is a script that starts Dynamo by no command, or by several" if is_script else f"runs {words[0]}"
        )
        place.refuse(f"{program}; {_OWN_WORKERS}: start one of them")
    elif command.module is not None and command.module not in WORKER_MODULES:
        place.refuse(f"starts {command.module}; {_OWN_WORKERS}: start one of them")


def why_left_out(component: ManifestSource, others: Sequence[ManifestSource]) -> str | None:
    """Return why a component becomes no service, or None if it becomes one.

    Args:
        component: Frontend, worker, planner or another kind.
        others: The deployment's other components.
    """
    kind, named = component_kind(component), component.peek("componentType")
    if kind is None and named == "epp":
        return "picks workers for a gateway; add a service with role router in its place"
    if kind is None:
        return f"componentType {named!r} has no role in a graph"
    if kind == "router" and not _is_frontend(component) and any(map(_is_frontend, others)):
        return "is a frontend by its type but runs something else; deploy it by itself"
    stage = stage_of(read_command(component)) if kind == "worker" else None
    if stage is not None:
        return (
            f"is the {stage} stage of multimodal serving; a worker with --enable-multimodal does without it"
        )
    return None


def _is_frontend(component: ManifestSource) -> bool:
    command = read_command(component)
    return (
        component_kind(component) == "router"
        and command is not None
        and command.module in {None, FRONTEND_MODULE}
    )


def refuse_missing_model(source: ManifestSource, spec: dict[str, Any], workers: list[Component]) -> None:
    """Refuse a deployment that nothing names a model in, or that has no worker to run it."""
    if source.problems or "name" in spec["model"]:
        return
    if workers:
        workers[0].args.refuse("names no model, nor does another worker; add --model to its arguments")
    else:
        source.at(*SERVICES).refuse(
            "hold no worker, so there is no model to serve; import the file that has one"
        )
