"""The flags of Dynamo's workers and frontends go where a graph keeps them; the rest stay arguments."""

from __future__ import annotations

from typing import Any

from penstock.api.enums import Role
from penstock.api.rule import KeyPath
from penstock.api.runtimes import DYNAMO_FRONTEND
from penstock.runtimes.dynamo.importer.command import Command
from penstock.runtimes.dynamo.importer.connector import read_connector
from penstock.runtimes.dynamo.importer.left_out import drop_owned_flags
from penstock.runtimes.dynamo.importer.services import Component, number_of
from penstock.runtimes.dynamo.importer.source import ManifestSource

DEFAULT_ROUTER_MODE = "round-robin"
"""Of Dynamo's frontend, 1.6."""

_POLICIES = {mode: policy for policy, mode in DYNAMO_FRONTEND.policies.items()}
_ADMISSION = {
    "--active-decode-blocks-threshold": "activeDecodeBlocksThreshold",
    "--active-prefill-tokens-threshold": "activePrefillTokensThreshold",
    "--active-prefill-tokens-threshold-frac": "activePrefillTokensThresholdFrac",
}
_DATA_PARALLEL = frozenset({"--data-parallel-size", "--data_parallel_size", "-dp"})
"""Engines beside each other in one replica: its GPUs are theirs, not one engine's."""

_MEMORY_SERVICE = "gms"
"""Load format of weights that Dynamo's GPU memory service holds, a container that its operator adds."""


def read_worker_flags(source: ManifestSource, component: Component, spec: dict[str, Any]) -> None:
    """Move a worker's flags to the graph's model and engine; the rest stay the service's arguments."""
    command = component.command
    if command is None:
        return
    args_path = _args_path(component)
    model = spec["model"]
    _share(source, args_path, model, "name", command.pop_value("--model", "--model-path"))
    _share(source, args_path, model, "servedName", command.pop_value("--served-model-name", "--model-name"))
    _share_context(model, command)
    speedup = command.pop_value("--speedup-ratio")
    if speedup is not None and number_of(speedup) != 1:
        source.note(args_path, "is a matter of the run, not of the graph; use --speed", speedup)
    drop_owned_flags(source, args_path, command)
    _drop_memory_service(source, args_path, command)
    _keep_parallelism(component, command)
    has_own = component.role is not Role.AGGREGATED
    device = read_connector(source, args_path, command, has_own=has_own)
    if device is not None:
        _share(source, args_path, spec.setdefault("engine", {}), "kvBufferDevice", device.value)
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
    args_path = _args_path(component)
    if mode in _POLICIES:
        router["policy"] = _POLICIES[mode]
    else:
        source.note(args_path, f"is no router mode known here; choose {', '.join(_POLICIES)}", mode)
    admission = _admission(command)
    if admission:
        router["admission"] = admission
    drop_owned_flags(source, args_path, command)
    if command.words:
        component.service["args"] = command.words
    return router


def _args_path(component: Component) -> KeyPath:
    return (*component.path, "extraPodSpec", "mainContainer", "args")


def _share(
    source: ManifestSource, args_path: KeyPath, section: dict[str, Any], key: str, value: object
) -> None:
    """Set what the graph states once for all workers; report a worker that differs."""
    if value is not None and section.setdefault(key, value) != value:
        source.note(args_path, f"differs between workers; the graph keeps {section[key]!r}", value)


def _share_context(model: dict[str, Any], command: Command) -> None:
    """Set the graph's context length; a worker with another one keeps its flag, which stands after the graph's."""
    text = command.pop_value("--max-model-len")
    if text is not None and model.setdefault("contextTokens", number_of(text)) != number_of(text):
        command.words += ["--max-model-len", text]


def _drop_memory_service(source: ManifestSource, args_path: KeyPath, command: Command) -> None:
    load_format = command.pop_value("--load-format")
    if load_format == _MEMORY_SERVICE:
        source.note(
            args_path, "--load-format needs Dynamo's GPU memory service; weights come from files", load_format
        )
    elif load_format is not None:
        command.words += ["--load-format", load_format]


def _admission(command: Command) -> dict[str, Any]:
    thresholds: dict[str, Any] = {}
    for flag, key in _ADMISSION.items():
        text = command.pop_value(flag)
        if text is not None:
            thresholds[key] = number_of(text)
    mode = command.pop_value("--admission-control")
    if not thresholds:
        return {}
    unset = {key: None for key in _ADMISSION.values() if key not in thresholds}
    return {"mode": mode or "token-capacity", **unset, **thresholds}


def _keep_parallelism(component: Component, command: Command) -> None:
    """Keep a split over GPUs that differs from the graph's own: one node's GPUs in parallel."""
    tensor = command.pop_value("--tensor-parallel-size", "-tp")
    pipeline = command.pop_value("--pipeline-parallel-size", "-pp")
    over_data = any(word.partition("=")[0] in _DATA_PARALLEL for word in command.words)
    if tensor is None and pipeline is None and not over_data:
        return
    own = (str(component.gpus // component.nodes), str(component.nodes))
    if (tensor or "1", pipeline or "1") != own:
        command.words += [
            "--tensor-parallel-size",
            tensor or "1",
            "--pipeline-parallel-size",
            pipeline or "1",
        ]
