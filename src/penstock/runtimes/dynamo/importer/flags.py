"""The flags of Dynamo's workers and frontends go where a graph keeps them; the rest stay arguments."""

from __future__ import annotations

import json
from typing import Any

from penstock.api.enums import KvBufferDevice, Role
from penstock.api.runtimes import DYNAMO_FRONTEND
from penstock.runtimes.dynamo.importer.command import CONNECTOR_FLAG, Command
from penstock.runtimes.dynamo.importer.left_out import drop_owned_flags
from penstock.runtimes.dynamo.importer.services import Component, number_of
from penstock.runtimes.dynamo.importer.source import ManifestSource

_NIXL = "NixlConnector"
_ROLES = frozenset({"kv_both", "kv_producer", "kv_consumer"})
_DYNAMO_MODULE = "kvbm.vllm_integration.connector"
_LEGACY: dict[str, dict[str, Any]] = {
    "nixl": {"kv_connector": _NIXL, "kv_role": "kv_both"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "flexkv": {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"},
    "kvbm": {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": _DYNAMO_MODULE,
        "kv_role": "kv_both",
    },
}
"""What the names of ``--connector`` stand for."""

_NONE = frozenset({"none", "null"})
_OVERRIDES = (
    "stands after the runtime's own connector and replaces it: spec.lease does not reach it; write kv_lease_duration into"
    " its kv_connector_extra_config"
)


def read_connector(args: ManifestSource, command: Command, *, has_own: bool) -> KvBufferDevice | None:
    """Leave out the plain NIXL connector, which the runtime adds with the graph's lease; any other stays an argument.

    Args:
        args: The worker's arguments, where losses are reported.
        command: The worker's.
        has_own: Whether the runtime gives the worker a connector: it transfers KV.

    Returns:
        Where the plain connector keeps its buffer, which a graph states for all workers; None: it does not say.
    """
    text = command.pop_value(CONNECTOR_FLAG)
    names = [each.lower() for each in command.pop_values("--connector")]
    if text is None and names and not set(names) <= _NONE:
        text = _from_names(args, names)
    if text is None:
        return None
    device = _own_device(text)
    if device is not None:
        return KvBufferDevice(device) if device else None
    command.words += [CONNECTOR_FLAG, text]
    if has_own:
        args.note(_OVERRIDES, text)
    return None


def _from_names(args: ManifestSource, names: list[str]) -> str | None:
    unknown = [each for each in names if each not in _LEGACY]
    if unknown:
        args.note(f"--connector knows {', '.join(_LEGACY)}; it is left out", " ".join(names))
        return None
    found = [_LEGACY[each] for each in names]
    if len(found) == 1:
        return json.dumps(found[0])
    return json.dumps(
        {
            "kv_connector": "PdConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": found},
            "kv_connector_module_path": _DYNAMO_MODULE,
        }
    )


def _own_device(text: str) -> str | None:
    """Return the buffer's device of a plain NIXL connector, empty if it names none; None for any other connector."""
    try:
        config = json.loads(text)
    except ValueError:
        return None
    if not isinstance(config, dict) or config.pop("kv_connector", None) != _NIXL:
        return None
    if config.pop("kv_role", None) not in _ROLES:
        return None
    device = config.pop("kv_buffer_device", "")
    return device if not config and device in {"", *KvBufferDevice} else None


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


def read_worker_flags(component: Component, spec: dict[str, Any]) -> None:
    """Move a worker's flags to the graph's model and engine; the rest stay the service's arguments."""
    command = component.command
    if command is None:
        return
    args, model = component.args, spec["model"]
    _share(args, model, "name", command.pop_value("--model", "--model-path"))
    _share(args, model, "servedName", command.pop_value("--served-model-name", "--model-name"))
    _share_context(model, command)
    speedup = command.pop_value("--speedup-ratio")
    if speedup is not None and number_of(speedup) != 1:
        args.note("is a matter of the run, not of the graph; use --speed", speedup)
    drop_owned_flags(component, command)
    _drop_memory_service(args, command)
    _keep_parallelism(component, command)
    has_own = component.role is not Role.AGGREGATED
    device = read_connector(args, command, has_own=has_own)
    if device is not None:
        _share(args, spec.setdefault("engine", {}), "kvBufferDevice", device.value)
    if command.words:
        component.service["args"] = command.words


def read_router_flags(component: Component, env: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the router section that a frontend's flags and variables describe; the rest stay arguments."""
    args, router = component.args, dict[str, Any]()
    command = component.command or Command(module=None)
    mode = command.pop_value("--router-mode")
    for variable in [each for each in env if each["name"] == "DYN_ROUTER_MODE"]:
        env.remove(variable)
        mode = mode or variable.get("value")
    mode = mode or DEFAULT_ROUTER_MODE
    if mode in _POLICIES:
        router["policy"] = _POLICIES[mode]
    else:
        args.note(f"is no router mode known here; choose {', '.join(_POLICIES)}", mode)
    admission = _admission(command)
    if admission:
        router["admission"] = admission
    drop_owned_flags(component, command)
    if command.words:
        component.service["args"] = command.words
    return router


def _share(args: ManifestSource, section: dict[str, Any], key: str, value: object) -> None:
    """Set what the graph states once for all workers; report a worker that differs."""
    if value is not None and section.setdefault(key, value) != value:
        args.note(f"differs between workers; the graph keeps {section[key]!r}", value)


def _share_context(model: dict[str, Any], command: Command) -> None:
    """Set the graph's context length; a worker with another one keeps its flag, which stands after the graph's."""
    text = command.pop_value("--max-model-len")
    if text is not None and model.setdefault("contextTokens", number_of(text)) != number_of(text):
        command.words += ["--max-model-len", text]


def _drop_memory_service(args: ManifestSource, command: Command) -> None:
    load_format = command.pop_value("--load-format")
    if load_format == _MEMORY_SERVICE:
        args.note("--load-format needs Dynamo's GPU memory service; weights come from files", load_format)
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
