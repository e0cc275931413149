"""Dynamo's components become services: role, GPUs, image and scaling."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.api.enums import Role
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
"""Older flags, and the words of ``--disaggregation-mode`` that they mean."""

_STAGES = frozenset({"encode", "processor"})
"""Stages of multimodal serving other than prefill and decode; a worker with ``--enable-multimodal`` does without them."""


@dataclass(slots=True)
class Component:
    """One component on its way to a service.

    Attributes:
        source: In the foreign manifest.
        name: Service's name here.
        role: None while it depends on the other components.
        command: What its container runs; None if that could not be read.
        gpus: GPUs of one replica over all its nodes.
        nodes: Nodes of one replica.
        service: The service in manifest form, filled step by step.
    """

    source: ManifestSource
    name: str
    role: Role | None
    command: Command | None
    gpus: int = 1
    nodes: int = 1
    service: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> ManifestSource:
        """Its container's arguments."""
        return self.source.at("extraPodSpec", "mainContainer", "args")


def service_name(key: str) -> str:
    """Return ``vllm-decode-worker`` for ``VllmDecodeWorker``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", key)
    return re.sub(r"[^a-z0-9]+", "-", spaced.lower()).strip("-") or "service"


def component_kind(component: ManifestSource) -> str | None:
    """Return ``router``, ``worker`` or ``planner``, or None for a kind that graphs do not have."""
    kind = component.word("componentType")
    if kind in _FRONTENDS:
        return "router"
    if kind in _WORKERS:
        return "worker"
    return "planner" if kind == "planner" else None


def container_words(container: ManifestSource) -> list[str]:
    """Return a container's command and arguments in one list, without counting them as carried."""
    found = [container.peek(key) for key in ("command", "args")]
    return [str(word) for words in found if isinstance(words, list) for word in words]


def read_command(component: ManifestSource) -> Command | None:
    """Return what a component's container runs, without counting it as carried."""
    container = component.at("extraPodSpec", "mainContainer")
    variables: dict[str, str] = {}
    # A later place wins, as in Dynamo's operator.
    for listed in (replace(component, base=("spec", "envs")), component.at("envs"), container.at("env")):
        for each in listed.elements():
            if isinstance(each.peek("value"), str):
                variables[str(each.peek("name"))] = each.peek("value")
    return parse_command(container_words(container), variables)


def stage_of(command: Command | None) -> str | None:
    """Return the stage of multimodal serving that a worker is, which graphs have no role for; else None."""
    if command is None:
        return None
    mode = Command(None, list(command.words)).pop_value("--disaggregation-mode")
    named = [_MODE_FLAGS.get(word, "") for word in command.words]
    return next((each for each in (*named, mode) if each in _STAGES), None)


def read_component(source: ManifestSource) -> Component:
    """Read role, size and command of a frontend or worker."""
    kind = str(source.take("componentType"))
    container = source.at("extraPodSpec", "mainContainer")
    command = read_command(source)
    for key in ("command", "args"):
        container.take_list(key)
    if command is None:
        container.at("command").note("runs something else than a Dynamo module; the runtime's own is used")
    else:
        head = container.peek("command")
        script = "command" if isinstance(head, list) and len(head) > SCRIPT_AT else "args"
        for text, why in command.left_out:
            container.at(script).note(why, text)
    component = Component(source, service_name(str(source.base[-1])), None, command)
    if kind in _FRONTENDS:
        component.role = Role.ROUTER
    else:
        component.role = _worker_role(source, kind, command)
        _read_size(component)
    replicas, image = source.take("replicas"), container.take("image")
    if isinstance(replicas, int):
        component.service["replicas"] = replicas
    if isinstance(image, str):
        component.service["image"] = image
    _read_scaling(component)
    return component


def number_of(text: str) -> float | int | str:
    """Return the number that ``text`` is; else the text, which the graph's own rules refuse by its key."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _worker_role(source: ManifestSource, kind: str, command: Command | None) -> Role | None:
    word = source.word("subComponentType")
    if word is not None:
        source.take("subComponentType")
    flagged = None
    if command is not None:
        flagged = command.pop_value("--disaggregation-mode")
        for flag, mode in _MODE_FLAGS.items():
            flagged = mode if command.pop_flag(flag) else flagged
        command.pop_flag("--multimodal-worker")
    return next((_ROLE_WORDS[each] for each in (word, flagged, kind) if each in _ROLE_WORDS), None)


def _read_size(component: Component) -> None:
    source = component.source
    stated_gpus = [source.take("resources", kind, "gpu") for kind in ("limits", "requests")]
    count = next((each for each in stated_gpus if each is not None), None)
    nodes = source.take("multinode", "nodeCount")
    component.nodes = nodes if isinstance(nodes, int) and nodes > 0 else 1
    stated = number_of(str(count))
    per_node = stated if isinstance(stated, int) and stated > 0 else 1
    if count is not None and stated != per_node:
        source.at("resources", "limits", "gpu").note("is no number of whole GPUs; 1 is used")
    component.gpus = per_node * component.nodes
    if component.gpus != 1:
        component.service["gpusPerReplica"] = component.gpus
    if component.nodes != 1:
        component.service["nodesPerReplica"] = component.nodes


def _read_scaling(component: Component) -> None:
    source = component.source
    bounds = {key: source.take("autoscaling", key) for key in ("minReplicas", "maxReplicas")}
    enabled = [source.take(key, "enabled") for key in ("scalingAdapter", "autoscaling")]
    if any(enabled) and component.role is not Role.ROUTER:
        found = {key: value for key, value in bounds.items() if isinstance(value, int)}
        component.service["scaling"] = found
