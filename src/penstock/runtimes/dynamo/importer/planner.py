"""Dynamo's planner component becomes the graph's planner section."""

from __future__ import annotations

import json
from typing import Any

from penstock.api.base import KeyPath
from penstock.runtimes.dynamo.importer.command import Command, parse_command
from penstock.runtimes.dynamo.importer.source import ManifestSource

_NUMBERS = {
    "--adjustment-interval": "adjustmentIntervalSeconds",
    "--metric-pulling-interval": "metricPullingIntervalSeconds",
    "--max-gpu-budget": "maxGpuBudget",
    "--min-gpu-budget": "minGpuBudget",
    "--decode-kv-scale-up-threshold": "decodeKvScaleUpThreshold",
    "--decode-kv-scale-down-threshold": "decodeKvScaleDownThreshold",
    "--prefill-queue-scale-up-threshold": "prefillQueueScaleUpThreshold",
    "--prefill-queue-scale-down-threshold": "prefillQueueScaleDownThreshold",
    "--decode-engine-num-gpu": "decodeEngineNumGpu",
    "--prefill-engine-num-gpu": "prefillEngineNumGpu",
}
_SLA_MILLISECONDS = {"--ttft": "ttftSeconds", "--itl": "itlSeconds"}
_SLA_PROFILE = "--profile-results-dir"
_CONFIG_NUMBERS = {
    "throughput_adjustment_interval": "adjustmentIntervalSeconds",
    "throughput_adjustment_interval_seconds": "adjustmentIntervalSeconds",
    "max_gpu_budget": "maxGpuBudget",
    "min_gpu_budget": "minGpuBudget",
    "decode_engine_num_gpu": "decodeEngineNumGpu",
    "prefill_engine_num_gpu": "prefillEngineNumGpu",
}
"""Settings of Dynamo's planner since 1.1; the first by an older name."""

_CONFIG_MILLISECONDS = {
    "ttft": "ttftSeconds",
    "ttft_ms": "ttftSeconds",
    "itl": "itlSeconds",
    "itl_ms": "itlSeconds",
}
"""Targets, by their older names and those of 1.6."""

_CONFIG_PROFILE = "profile_results_dir"
_CONFIG_TARGET = "optimization_target"
_SAID_BY_GRAPH = ("--environment", "--backend", "--namespace")
_HIERARCHY = "global-planner"
_OWN_PLANNER = "belongs to Dynamo's planner; Penstock's own runs in its place"
_UNLIMITED_BELOW = 0


def read_planner(source: ManifestSource, path: KeyPath) -> dict[str, Any]:
    """Return the planner section; every other flag and setting of the component is noted.

    Args:
        source: The manifest.
        path: Of the planner component.
    """
    source.take((*path, "componentType"))
    container = (*path, "extraPodSpec", "mainContainer")
    words = [str(each) for key in ("command", "args") for each in source.take_list((*container, key))]
    command = parse_command(words)
    if command is None:
        for key in source.keys(container):
            if key in {"command", "args"}:
                source.note((*container, key), "is no plain Python command; set spec.planner by hand")
        return {}
    planner = _carry_options(source, container, command)
    for flag in _SAID_BY_GRAPH:
        command.pop_value(flag)
    for word in command.words:
        source.note((*container, "args"), "is no option of this planner", word)
    for each in (container, (*path, "extraPodSpec"), path):
        source.note_keys(each, _OWN_PLANNER)
    return planner


def _carry_options(source: ManifestSource, container: KeyPath, command: Command) -> dict[str, Any]:
    planner: dict[str, Any] = {}
    for flag, key in _NUMBERS.items():
        _carry_number(source, container, planner, key, command.pop_value(flag))
    targets: dict[str, Any] = {}
    for flag, key in _SLA_MILLISECONDS.items():
        _carry_number(source, container, targets, key, command.pop_value(flag), factor=0.001)
    config = _read_config(source, container, command)
    _carry_config(source, container, config, planner, targets)
    is_sla = bool(targets) or config.pop(_CONFIG_TARGET, None) == "sla"
    is_sla = is_sla or (command.module or "").endswith("planner_sla")
    profile = config.pop(_CONFIG_PROFILE, None) if is_sla else None
    profile = command.pop_value(_SLA_PROFILE) if is_sla and profile is None else profile
    _note_settings(source, container, config)
    if profile is not None:
        planner["mode"] = "sla"
        targets["profile"] = profile
        source.note(
            (*container, "args"), "holds a profile: check that planner.sla.profile names it here", profile
        )
    elif is_sla:
        source.note(
            (*container, "args"),
            f"plans by targets and names no profile ({_SLA_PROFILE}): mode adaptive; run `penstock profile`, then set"
            " planner.mode: sla and planner.sla.profile",
        )
    if targets:
        planner["sla"] = targets
    if command.pop_flag("--no-operation"):
        planner["noOperation"] = True
    return planner


def _read_config(source: ManifestSource, container: KeyPath, command: Command) -> dict[str, Any]:
    """Return ``--config``, the one JSON object that Dynamo's planner takes since 1.1; empty without it."""
    text = command.pop_value("--config")
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        source.note((*container, "args"), "is no JSON object; set spec.planner by hand", text)
        return {}
    return {str(key): value for key, value in config.items()}


def _carry_config(
    source: ManifestSource,
    container: KeyPath,
    config: dict[str, Any],
    planner: dict[str, Any],
    targets: dict[str, Any],
) -> None:
    """Move the numbers of ``--config`` to the planner section and its targets."""
    for key, own in _CONFIG_NUMBERS.items():
        if key in config:
            _carry_number(source, container, planner, own, str(config.pop(key)))
    for key, own in _CONFIG_MILLISECONDS.items():
        if key in config:
            _carry_number(source, container, targets, own, str(config.pop(key)), factor=0.001)


def _note_settings(source: ManifestSource, container: KeyPath, config: dict[str, Any]) -> None:
    """Report the settings of ``--config`` that are not carried."""
    said = {flag.removeprefix("--") for flag in _SAID_BY_GRAPH}
    for key, value in config.items():
        if value == _HIERARCHY:
            source.note((*container, "args"), f"{key}: this graph's planner decides alone", value)
        elif key not in said:
            source.note((*container, "args"), f"{key} is no option of this planner", json.dumps(value))


def _carry_number(
    source: ManifestSource,
    container: KeyPath,
    section: dict[str, Any],
    key: str,
    text: str | None,
    *,
    factor: float = 1,
) -> None:
    if text is None:
        return
    try:
        number = float(text) * factor
    except ValueError:
        source.note((*container, "args"), f"is no number for {key}", text)
        return
    if key in {"minGpuBudget", "maxGpuBudget"} and number < _UNLIMITED_BELOW:
        section[key] = 0 if key == "minGpuBudget" else None
        return
    section[key] = int(number) if number.is_integer() else number
