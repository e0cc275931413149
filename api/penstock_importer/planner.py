"""Dynamo's planner component becomes the graph's planner section."""

from __future__ import annotations

import json
from typing import Any

from penstock_api.base import KeyPath
from penstock_importer.command import Command, parse_command
from penstock_importer.source import ManifestSource

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
    "throughput_adjustment_interval_seconds": "adjustmentIntervalSeconds",
    "max_gpu_budget": "maxGpuBudget",
    "min_gpu_budget": "minGpuBudget",
}
_CONFIG_MILLISECONDS = {"ttft": "ttftSeconds", "itl": "itlSeconds"}
_SAID_BY_GRAPH = ("--environment", "--backend", "--namespace")
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
    command = parse_command([], words)
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
    return planner


def _carry_options(source: ManifestSource, container: KeyPath, command: Command) -> dict[str, Any]:
    planner: dict[str, Any] = {}
    for flag, key in _NUMBERS.items():
        _carry_number(source, container, planner, key, command.pop_value(flag))
    targets: dict[str, Any] = {}
    for flag, key in _SLA_MILLISECONDS.items():
        _carry_number(source, container, targets, key, command.pop_value(flag), factor=0.001)
    _carry_config(source, container, command, planner, targets)
    is_sla = bool(targets) or (command.module or "").endswith("planner_sla")
    profile = command.pop_value(_SLA_PROFILE) if is_sla else None
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


def _carry_config(
    source: ManifestSource,
    container: KeyPath,
    command: Command,
    planner: dict[str, Any],
    targets: dict[str, Any],
) -> None:
    """Read ``--config``, the one JSON object that Dynamo's planner takes since 1.1."""
    text = command.pop_value("--config")
    if text is None:
        return
    args = (*container, "args")
    try:
        config = json.loads(text)
        settings = {str(key): value for key, value in config.items()}
    except (ValueError, AttributeError):
        source.note(args, "is no JSON object; set spec.planner by hand", text)
        return
    for key, own in _CONFIG_NUMBERS.items():
        if key in settings:
            _carry_number(source, container, planner, own, str(settings.pop(key)))
    for key, own in _CONFIG_MILLISECONDS.items():
        if key in settings:
            _carry_number(source, container, targets, own, str(settings.pop(key)), factor=0.001)
    for key, value in settings.items():
        if key not in {flag.removeprefix("--") for flag in _SAID_BY_GRAPH}:
            source.note(args, f"{key} is no option of this planner", json.dumps(value))


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
