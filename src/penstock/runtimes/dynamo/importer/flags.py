"""The flags of Dynamo's workers and frontends go where a graph keeps them; the rest stay arguments."""

from __future__ import annotations

import json
from typing import Any

from penstock.api.enums import KvBufferDevice, Role
from penstock.api.runtimes import DYNAMO_FRONTEND
from penstock.runtimes.dynamo.importer.command import CONNECTOR_FLAG, Command, parse_command
from penstock.runtimes.dynamo.importer.left_out import drop_owned_flags
from penstock.runtimes.dynamo.importer.services import Component, number_of
from penstock.runtimes.dynamo.importer.source import ManifestSource

_NIXL = "NixlConnector"
_ROLES = frozenset({"kv_both", "kv_producer", "kv_consumer"})
_PLAIN = frozenset({"nixl", "none", "null"})
"""Values of ``--connector`` that add nothing to the runtime's own."""
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
    names = command.pop_values("--connector")
    if not _PLAIN.issuperset(names):
        args.note("--connector is refused by Dynamo 1.6; write its --kv-transfer-config", " ".join(names))
    text = command.pop_value(CONNECTOR_FLAG)
    if text is None:
        return None
    device = _own_device(text)
    if device is not None:
        return KvBufferDevice(device) if device else None
    command.words += [CONNECTOR_FLAG, text]
    if has_own:
        args.note(_OVERRIDES, text)
    return None


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
"""Several engines in one replica: its GPUs are theirs, not one engine's."""

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
    """Set the graph's context length; a worker with another one keeps its flag, which comes after the graph's."""
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


_NUMBERS = {
    "adjustment_interval": "adjustmentIntervalSeconds",
    "throughput_adjustment_interval": "adjustmentIntervalSeconds",
    "throughput_adjustment_interval_seconds": "adjustmentIntervalSeconds",
    "metric_pulling_interval": "metricPullingIntervalSeconds",
    "max_gpu_budget": "maxGpuBudget",
    "min_gpu_budget": "minGpuBudget",
    "decode_kv_scale_up_threshold": "decodeKvScaleUpThreshold",
    "decode_kv_scale_down_threshold": "decodeKvScaleDownThreshold",
    "prefill_queue_scale_up_threshold": "prefillQueueScaleUpThreshold",
    "prefill_queue_scale_down_threshold": "prefillQueueScaleDownThreshold",
    "decode_engine_num_gpu": "decodeEngineNumGpu",
    "prefill_engine_num_gpu": "prefillEngineNumGpu",
}
"""A later one of the same key wins; the first two of an interval are older names."""

_MILLISECONDS = {
    "ttft": "ttftSeconds",
    "ttft_ms": "ttftSeconds",
    "itl": "itlSeconds",
    "itl_ms": "itlSeconds",
}
"""Targets, by their older names and those of 1.6."""

_PROFILE = "profile_results_dir"
_TARGET = "optimization_target"
_SAID_BY_GRAPH = ("environment", "backend", "namespace")
_HIERARCHY = "global-planner"
_OWN_PLANNER = "belongs to Dynamo's planner; Penstock's own runs in its place"


def read_planner(component: ManifestSource) -> dict[str, Any]:
    """Return the planner section; every other flag and setting of the component is noted."""
    component.take("componentType")
    container = component.at("extraPodSpec", "mainContainer")
    words = [str(each) for key in ("command", "args") for each in container.take_list(key)]
    command = parse_command(words)
    if command is None:
        for key in [each for each in ("command", "args") if each in container.names()]:
            container.at(key).note("is no plain Python command; set spec.planner by hand")
        return {}
    args = container.at("args")
    planner = _read_settings(args, command)
    for word in command.words:
        args.note("is no option of this planner", word)
    for each in (container, component.at("extraPodSpec"), component):
        each.note_keys(_OWN_PLANNER)
    return planner


def _read_settings(args: ManifestSource, command: Command) -> dict[str, Any]:
    config = _read_config(args, command)
    for name in (*_NUMBERS, *_MILLISECONDS, *_SAID_BY_GRAPH):
        value = command.pop_value(f"--{name.replace('_', '-')}")
        if value is not None:
            config.setdefault(name, value)
    planner = _numbers(args, config, _NUMBERS)
    for key, unlimited in (("minGpuBudget", 0), ("maxGpuBudget", None)):
        if planner.get(key, 0) < 0:
            planner[key] = unlimited
    targets = _numbers(args, config, _MILLISECONDS, factor=0.001)
    is_sla = config.pop(_TARGET, None) == "sla" or (command.module or "").endswith("planner_sla")
    if targets or is_sla:
        targets |= _read_profile(args, command, config)
        planner |= {"mode": "sla"} if "profile" in targets else {}
        planner |= {"sla": targets} if targets else {}
    if command.pop_flag("--no-operation"):
        planner["noOperation"] = True
    for key, value in config.items():
        if value == _HIERARCHY:
            args.note(f"{key}: this graph's planner decides alone", value)
        elif key not in _SAID_BY_GRAPH:
            args.note(f"{key} is no option of this planner", json.dumps(value))
    return planner


def _read_config(args: ManifestSource, command: Command) -> dict[str, Any]:
    text = command.pop_value("--config")
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        args.note("is no JSON object; set spec.planner by hand", text)
        return {}
    return {str(key): value for key, value in config.items()}


def _read_profile(args: ManifestSource, command: Command, config: dict[str, Any]) -> dict[str, Any]:
    """Return the folder of a profile, if the planner names one; take it from what is left."""
    flag = f"--{_PROFILE.replace('_', '-')}"
    profile = config.pop(_PROFILE, None) or command.pop_value(flag)
    if profile is not None:
        args.note("holds a profile: check that planner.sla.profile names it here", profile)
        return {"profile": profile}
    args.note(
        f"plans by targets and names no profile ({flag}): mode adaptive; run `penstock profile`, then set"
        " planner.mode: sla and planner.sla.profile",
    )
    return {}


def _numbers(
    args: ManifestSource,
    config: dict[str, Any],
    keys: dict[str, str],
    *,
    factor: float = 1,
) -> dict[str, Any]:
    """Take the numbers out of a planner's settings, by the keys that they have here."""
    found: dict[str, Any] = {}
    for name in [each for each in keys if each in config]:
        value = config.pop(name)
        try:
            number = float(str(value)) * factor
        except ValueError:
            args.note(f"is no number for {keys[name]}", value)
            continue
        found[keys[name]] = int(number) if number.is_integer() else number
    return found
