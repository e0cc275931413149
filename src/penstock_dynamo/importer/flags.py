"""The flags of Dynamo's workers and frontends go where a graph keeps them; the rest stay the service's arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api.enums import KvBufferDevice, Role
from penstock.api.manifests.foreign import ManifestSource
from penstock.api.runtimes import DYNAMO_FRONTEND
from penstock_dynamo.importer.command import CONNECTOR_FLAG, Command
from penstock_dynamo.importer.component import MOCKER_MODULE, Component, number_of

_OWNED = (
    "--discovery-backend",
    "--event-plane",
    "--http-host",
    "--http-port",
    "--namespace",
    "--request-plane",
    "--store-kv",
)
"""Flags that the runtime gives itself; the last is an older one for the discovery's store."""

_ROLES = frozenset({"kv_both", "kv_producer", "kv_consumer"})
_PLAIN = frozenset({"nixl", "none", "null"})
"""Values of ``--connector`` that add nothing to the runtime's own."""
_OVERRIDES = (
    "stands after the runtime's own connector and replaces it: spec.lease does not reach it; write kv_lease_duration into"
    " its kv_connector_extra_config"
)

DEFAULT_ROUTER_MODE = "round-robin"
"""Default of Dynamo's frontend 1.6."""

_POLICIES = {mode: policy for policy, mode in DYNAMO_FRONTEND.policies.items()}
_ADMISSION = {
    "--active-decode-blocks-threshold": "activeDecodeBlocksThreshold",
    "--active-prefill-tokens-threshold": "activePrefillTokensThreshold",
    "--active-prefill-tokens-threshold-frac": "activePrefillTokensThresholdFrac",
}
_DATA_PARALLEL = frozenset({"--data-parallel-size", "--data_parallel_size", "-dp"})
"""Several engines in one replica: its GPUs are theirs, not one engine's."""

_MEMORY_SERVICE = "gms"
"""Load format of weights that Dynamo's GPU memory service holds, a container that its operator adds."""

_NAMES = frozenset({"name", "servedName"})
_SECTIONS = {
    **dict.fromkeys((*_NAMES, "contextTokens"), "model"),
    **dict.fromkeys(("blockTokens", "maxRunningRequests", "maxBatchTokens"), "engine"),
}
"""Section of a graph with each key that it states once for all workers."""


def read_worker_flags(component: Component, spec: dict[str, Any]) -> None:
    """Move a worker's flags to the graph's model and engine."""
    command = component.command
    if command is None:
        return
    args, model = component.args, spec["model"]
    share(args, model, "name", command.pop_value("--model", "--model-path"))
    share(args, model, "servedName", command.pop_value("--served-model-name", "--model-name"))
    context = command.pop_value("--max-model-len")
    if context is not None and model.setdefault("contextTokens", number_of(context)) != number_of(context):
        command.words += ["--max-model-len", context]  # comes after the graph's
    speedup = command.pop_value("--speedup-ratio")
    if speedup is not None and number_of(speedup) != 1:
        args.note("is a matter of the run, not of the graph; use --speed", speedup)
    _drop_owned(args, command)
    load_format = command.pop_value("--load-format")
    if load_format == _MEMORY_SERVICE:
        args.note("--load-format needs Dynamo's GPU memory service; weights come from files", load_format)
    elif load_format is not None:
        command.words += ["--load-format", load_format]
    _keep_parallelism(component, command)
    device = _read_connector(args, command, has_own=component.role is not Role.AGGREGATED)
    if device:
        share(args, spec.setdefault("engine", {}), "kvBufferDevice", device)
    if command.words:
        component.service["args"] = command.words
    if command.module == MOCKER_MODULE:
        spec.setdefault("engine", {})["mocker"] = True


def _read_connector(args: ManifestSource, command: Command, *, has_own: bool) -> str | None:
    """Leave out the plain NIXL connector, which the runtime adds with the graph's lease; any other stays an argument.

    Returns:
        Where the plain connector keeps its buffer, which a graph states for all workers; None or empty: it does not say.
    """
    names = command.pop_values("--connector")
    if not _PLAIN.issuperset(names):
        args.note("--connector is refused by Dynamo 1.6; write its --kv-transfer-config", " ".join(names))
    text = command.pop_value(CONNECTOR_FLAG)
    device = None if text is None else _own_device(text)
    if text is not None and device is None:
        command.words += [CONNECTOR_FLAG, text]
        if has_own:
            args.note(_OVERRIDES, text)
    return device


def _own_device(text: str) -> str | None:
    """Return the buffer's device of a plain NIXL connector, empty if it names none; None for any other connector."""
    try:
        config = json.loads(text)
    except ValueError:
        return None
    if not isinstance(config, dict) or config.pop("kv_connector", None) != "NixlConnector":
        return None
    if config.pop("kv_role", None) not in _ROLES:
        return None
    device = config.pop("kv_buffer_device", "")
    return device if not config and device in {"", *KvBufferDevice} else None


def read_router_flags(component: Component, env: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the router section that a frontend's flags and variables describe."""
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
        args.note(f"is not a router mode known here; choose {', '.join(_POLICIES)}", mode)
    thresholds = {key: command.pop_value(flag) for flag, key in _ADMISSION.items()}
    admission = command.pop_value("--admission-control") or "token-capacity"
    if any(text is not None for text in thresholds.values()):
        given = {key: None if text is None else number_of(text) for key, text in thresholds.items()}
        router["admission"] = {"mode": admission, **given}
    _drop_owned(args, command)
    if command.words:
        component.service["args"] = command.words
    return router


def _drop_owned(args: ManifestSource, command: Command) -> None:
    for flag in _OWNED:
        value = command.pop_value(flag)
        if value is not None:
            args.note(f"{flag} is chosen by the runtime", value)


def share(args: ManifestSource, section: dict[str, Any], key: str, value: object) -> None:
    """Set what the graph states once for all workers; report a worker that differs."""
    if value is not None and section.setdefault(key, value) != value:
        args.note(f"differs between workers; the graph keeps {section[key]!r}", value)


def share_flags(
    component: Component, command: Command, spec: dict[str, Any], flags: Mapping[str, Sequence[str]]
) -> None:
    """Move to the graph what it states once for all workers.

    Args:
        component: The worker.
        command: Its command, which loses the flags.
        spec: The graph's spec so far.
        flags: By key of a graph's model or engine: the worker's flags for it, the usual one first.
    """
    for key, spellings in flags.items():
        text = command.pop_value(*spellings)
        if text is not None:
            value = text if key in _NAMES else number_of(text)
            share(component.args, spec.setdefault(_SECTIONS[key], {}), key, value)


def _keep_parallelism(component: Component, command: Command) -> None:
    """Keep a split over GPUs that differs from the graph's own: one node's GPUs in parallel."""
    tensor = command.pop_value("--tensor-parallel-size", "-tp")
    pipeline = command.pop_value("--pipeline-parallel-size", "-pp")
    over_data = any(word.partition("=")[0] in _DATA_PARALLEL for word in command.words)
    split = (tensor or "1", pipeline or "1")
    own = (str(component.gpus // component.nodes), str(component.nodes))
    if (tensor or pipeline or over_data) and split != own:
        command.words += ["--tensor-parallel-size", split[0], "--pipeline-parallel-size", split[1]]
