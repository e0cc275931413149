"""Dynamo's components become services: role, GPUs, image and scaling."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from penstock.api.enums import Role
from penstock.api.rule import KeyPath
from penstock.runtimes.dynamo.importer.command import SCRIPT_AT, Command, parse_command
from penstock.runtimes.dynamo.importer.source import ManifestSource

MOCKER_MODULE = "dynamo.mocker"
WORKER_MODULES = frozenset({"dynamo.vllm", MOCKER_MODULE, "dynamo.vllm.unified_main"})
FRONTEND_MODULE = "dynamo.frontend"

_FRONTENDS = frozenset({"frontend", "main"})
_WORKERS = frozenset({"worker", "prefill", "decode"})
_ROLE_WORDS = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "agg": Role.AGGREGATED,
    "aggregated": Role.AGGREGATED,
}
_MODE_FLAGS = {
    "--is-prefill-worker": "prefill",
    "--is-decode-worker": "decode",
    "--multimodal-decode-worker": "decode",
    "--multimodal-encode-worker": "encode",
    "--multimodal-processor": "processor",
}
"""Older flags, and the words of ``--disaggregation-mode`` that they stand for."""

_STAGES = frozenset({"encode", "processor"})
"""Stages of multimodal serving beside prefill and decode; a worker with ``--enable-multimodal`` does without them."""

_GPU_SUFFIX = "/gpu"


@dataclass(slots=True)
class Component:
    """One component on its way to a service.

    Attributes:
        path: In the foreign manifest.
        name: Service's name here.
        role: None while it depends on the other components.
        command: What its container runs; None if that could not be read.
        gpus: GPUs of one replica over all its nodes.
        nodes: Nodes of one replica.
        service: The service in manifest form, filled step by step.
    """

    path: KeyPath
    name: str
    role: Role | None
    command: Command | None
    gpus: int = 1
    nodes: int = 1
    service: dict[str, Any] = field(default_factory=dict)


def service_name(key: str) -> str:
    """Return ``vllm-decode-worker`` for ``VllmDecodeWorker``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", key)
    return re.sub(r"[^a-z0-9]+", "-", spaced.lower()).strip("-") or "service"


def component_kind(source: ManifestSource, path: KeyPath) -> str | None:
    """Return ``router``, ``worker`` or ``planner``, or None for a kind that graphs do not have."""
    kind = source.word((*path, "componentType"))
    if kind in _FRONTENDS:
        return "router"
    if kind in _WORKERS:
        return "worker"
    return "planner" if kind == "planner" else None


def container_words(source: ManifestSource, container: KeyPath) -> list[str]:
    """Return a container's command and arguments in one list, without counting them as carried."""
    found = [source.peek((*container, key)) for key in ("command", "args")]
    return [str(word) for words in found if isinstance(words, list) for word in words]


def read_command(source: ManifestSource, path: KeyPath) -> Command | None:
    """Return what a component's container runs, without counting it as carried."""
    words = container_words(source, (*path, "extraPodSpec", "mainContainer"))
    return parse_command(words, _variables(source, path))


def stage_of(command: Command | None) -> str | None:
    """Return the stage of multimodal serving that a worker is, which graphs have no role for; else None."""
    if command is None:
        return None
    mode = Command(None, list(command.words)).pop_value("--disaggregation-mode")
    named = [_MODE_FLAGS.get(word, "") for word in command.words]
    return next((each for each in (*named, mode) if each in _STAGES), None)


def read_component(source: ManifestSource, path: KeyPath) -> Component:
    """Read role, size and command of a frontend or worker."""
    kind = str(source.take((*path, "componentType")))
    container = (*path, "extraPodSpec", "mainContainer")
    command = read_command(source, path)
    for key in ("command", "args"):
        source.take_list((*container, key))
    if command is None:
        source.note(
            (*container, "command"), "runs something else than a Dynamo module; the runtime's own is used"
        )
    else:
        head = source.peek((*container, "command"))
        script = "command" if isinstance(head, list) and len(head) > SCRIPT_AT else "args"
        for text, why in command.left_out:
            source.note((*container, script), why, text)
    component = Component(path, service_name(str(path[-1])), None, command)
    if kind in _FRONTENDS:
        component.role = Role.ROUTER
    else:
        component.role = _worker_role(source, path, kind, command)
        _read_size(source, component)
    replicas = source.take((*path, "replicas"))
    if isinstance(replicas, int):
        component.service["replicas"] = replicas
    image = source.take((*container, "image"))
    if isinstance(image, str):
        component.service["image"] = image
    _read_scaling(source, component)
    return component


def _variables(source: ManifestSource, path: KeyPath) -> dict[str, str]:
    """Return the literal variables of a component's container; a later place wins, as in Dynamo's operator."""
    found: dict[str, str] = {}
    for place in (("spec", "envs"), (*path, "envs"), (*path, "extraPodSpec", "mainContainer", "env")):
        listed = source.peek(place)
        for each in listed if isinstance(listed, list) else ():
            if isinstance(each, dict) and isinstance(each.get("value"), str):
                found[str(each.get("name"))] = each["value"]
    return found


def number_of(text: str) -> float | int | str:
    """Return the number that ``text`` is; else the text, which the graph's own rules refuse by its key."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _worker_role(source: ManifestSource, path: KeyPath, kind: str, command: Command | None) -> Role | None:
    word = source.word((*path, "subComponentType"))
    if word is not None:
        source.take((*path, "subComponentType"))
    flagged = None
    if command is not None:
        flagged = command.pop_value("--disaggregation-mode")
        for flag, mode in _MODE_FLAGS.items():
            flagged = mode if command.pop_flag(flag) else flagged
        command.pop_flag("--multimodal-worker")
    for candidate in (word, flagged, kind):
        if candidate in _ROLE_WORDS:
            return _ROLE_WORDS[candidate]
    return None


def _read_size(source: ManifestSource, component: Component) -> None:
    path = component.path
    limit = source.take((*path, "resources", "limits", "gpu"))
    request = source.take((*path, "resources", "requests", "gpu"))
    count = next((each for each in (limit, request, _device_gpus(source, path)) if each is not None), None)
    nodes = source.take((*path, "multinode", "nodeCount"))
    component.nodes = nodes if isinstance(nodes, int) and nodes > 0 else 1
    stated = number_of(str(count))
    per_node = stated if isinstance(stated, int) and stated > 0 else 1
    if count is not None and stated != per_node:
        source.note((*path, "resources", "limits", "gpu"), "is no number of whole GPUs; 1 is used")
    component.gpus = per_node * component.nodes
    if component.gpus != 1:
        component.service["gpusPerReplica"] = component.gpus
    if component.nodes != 1:
        component.service["nodesPerReplica"] = component.nodes


def _device_gpus(source: ManifestSource, path: KeyPath) -> Any:
    """Return the GPUs among a component's ``device.resources``, which `penstock.runtimes.dynamo.importer.pods` reads the rest of."""
    for key in source.keys((*path, "device", "resources")):
        if key.endswith(_GPU_SUFFIX):
            return source.take((*path, "device", "resources", key))
    return None


def _read_scaling(source: ManifestSource, component: Component) -> None:
    path = component.path
    scaling: dict[str, Any] = {}
    for key in ("minReplicas", "maxReplicas"):
        value = source.take((*path, "autoscaling", key))
        if isinstance(value, int):
            scaling[key] = value
    enabled = [source.take((*path, key, "enabled")) for key in ("scalingAdapter", "autoscaling")]
    if any(enabled) and component.role is not Role.ROUTER:
        component.service["scaling"] = scaling
