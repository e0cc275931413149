"""Dynamo's components become services: role, GPUs, image and arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from penstock_api.base import KeyPath
from penstock_api.enums import Role
from penstock_api.graph_rules import DYNAMO_POLICIES
from penstock_importer.command import Command, parse_command
from penstock_importer.source import ManifestSource

WORKER_MODULES = frozenset({"dynamo.vllm", "dynamo.mocker", "dynamo.vllm.unified_main"})
MOCKER_MODULE = "dynamo.mocker"
DEFAULT_ROUTER_MODE = "round-robin"
"""Of Dynamo's frontend, 1.6."""

_FRONTENDS = frozenset({"frontend", "main"})
_ROLE_WORDS = {"prefill": Role.PREFILL, "decode": Role.DECODE, "agg": Role.AGGREGATED}
_POLICIES = {mode: policy for policy, mode in DYNAMO_POLICIES.items()}
_ADMISSION = {
    "--active-decode-blocks-threshold": "activeDecodeBlocksThreshold",
    "--active-prefill-tokens-threshold": "activePrefillTokensThreshold",
    "--active-prefill-tokens-threshold-frac": "activePrefillTokensThresholdFrac",
}


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
    if kind in {"worker", "prefill", "decode"}:
        return "worker"
    return "planner" if kind == "planner" else None


def read_component(source: ManifestSource, path: KeyPath) -> Component:
    """Read role, size and command of a frontend or worker."""
    kind = str(source.take((*path, "componentType")))
    container = (*path, "extraPodSpec", "mainContainer")
    raw = {key: [str(each) for each in source.take_list((*container, key))] for key in ("command", "args")}
    command = parse_command(raw["command"], raw["args"], _variables(source, path))
    if command is None:
        source.note(
            (*container, "command"), "runs something else than a Dynamo module; the runtime's own is used"
        )
        if raw["args"]:
            source.note((*container, "args"), "belong to that command")
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
        for each in source.peek(place) or ():
            if isinstance(each, dict) and isinstance(each.get("value"), str):
                found[str(each.get("name"))] = each["value"]
    return found


def read_worker_flags(source: ManifestSource, component: Component, model: dict[str, Any]) -> None:
    """Move a worker's flags to where a graph keeps them; the rest stay arguments."""
    command = component.command
    if command is None:
        return
    args_path = (*component.path, "extraPodSpec", "mainContainer", "args")
    values = {
        "name": command.pop_value("--model", "--model-path"),
        "servedName": command.pop_value("--served-model-name", "--model-name"),
        "contextTokens": command.pop_value("--max-model-len"),
    }
    for key, text in values.items():
        value: Any = _number(text) if text and key == "contextTokens" else text
        if value is not None and model.setdefault(key, value) != value:
            source.note(args_path, f"differs between workers; the graph keeps {model[key]!r}", value)
    speedup = command.pop_value("--speedup-ratio")
    if speedup is not None:
        source.note(args_path, "is a matter of the run, not of the graph; use --speed", speedup)
    _keep_parallelism(component, command)
    _drop_own_transfer(command)
    if command.words:
        component.service["args"] = command.words


def read_router_flags(
    source: ManifestSource, component: Component, env: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the router section that a frontend's flags and variables describe; the rest stay arguments."""
    router: dict[str, Any] = {}
    command = component.command or Command(module=None)
    mode = command.pop_value("--router-mode")
    for variable in [each for each in env if each["name"] == "DYN_ROUTER_MODE"]:
        env.remove(variable)
        mode = mode or variable.get("value")
    mode = mode or DEFAULT_ROUTER_MODE
    args_path = (*component.path, "extraPodSpec", "mainContainer", "args")
    if mode in _POLICIES:
        router["policy"] = _POLICIES[mode].value
    else:
        source.note(args_path, f"is no router mode known here; choose {', '.join(_POLICIES)}", mode)
    admission = _admission(command)
    if admission:
        router["admission"] = admission
    port = command.pop_value("--http-port")
    if port is not None:
        source.note(args_path, "is chosen by the backend", port)
    if command.words:
        component.service["args"] = command.words
    return router


def _admission(command: Command) -> dict[str, Any]:
    thresholds: dict[str, Any] = {}
    for flag, key in _ADMISSION.items():
        text = command.pop_value(flag)
        if text is not None:
            thresholds[key] = _number(text)
    mode = command.pop_value("--admission-control")
    if not thresholds:
        return {}
    unset = {key: None for key in _ADMISSION.values() if key not in thresholds}
    return {"mode": mode or "token-capacity", **unset, **thresholds}


def _number(text: str) -> float | int | str:
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
        for flag, mode in (("--is-prefill-worker", "prefill"), ("--is-decode-worker", "decode")):
            flagged = mode if command.pop_flag(flag) else flagged
    for candidate in (word, flagged, kind):
        if candidate in _ROLE_WORDS:
            return _ROLE_WORDS[candidate]
    return None


def _read_size(source: ManifestSource, component: Component) -> None:
    path = component.path
    limit = source.take((*path, "resources", "limits", "gpu"))
    request = source.take((*path, "resources", "requests", "gpu"))
    count = limit if limit is not None else request
    nodes = source.take((*path, "multinode", "nodeCount"))
    component.nodes = nodes if isinstance(nodes, int) and nodes > 0 else 1
    stated = _number(str(count))
    per_node = stated if isinstance(stated, int) and stated > 0 else 1
    if count is not None and stated != per_node:
        source.note((*path, "resources", "limits", "gpu"), "is no number of whole GPUs; 1 is used")
    component.gpus = per_node * component.nodes
    if component.gpus != 1:
        component.service["gpusPerReplica"] = component.gpus
    if component.nodes != 1:
        component.service["nodesPerReplica"] = component.nodes


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


def _drop_own_transfer(command: Command) -> None:
    """Leave out the plain NIXL connector, which the runtime adds itself, with the graph's lease."""
    text = command.pop_value("--kv-transfer-config")
    if text is None:
        return
    try:
        is_own = json.loads(text) == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    except ValueError:
        is_own = False
    if not is_own:
        command.words += ["--kv-transfer-config", text]


def _keep_parallelism(component: Component, command: Command) -> None:
    """Keep a split over GPUs that differs from the graph's own: one node's GPUs in parallel."""
    tensor = command.pop_value("--tensor-parallel-size", "-tp")
    pipeline = command.pop_value("--pipeline-parallel-size", "-pp")
    if tensor is None and pipeline is None:
        return
    own = (str(component.gpus // component.nodes), str(component.nodes))
    if (tensor or "1", pipeline or "1") != own:
        command.words += [
            "--tensor-parallel-size",
            tensor or "1",
            "--pipeline-parallel-size",
            pipeline or "1",
        ]
