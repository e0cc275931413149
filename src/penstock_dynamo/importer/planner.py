"""Dynamo's planner component becomes the graph's planner section."""

from __future__ import annotations

import json
from typing import Any

from pydantic.alias_generators import to_camel

from penstock.api.manifests.foreign import ManifestSource
from penstock.core.durations import duration_text
from penstock_dynamo.importer.command import Command, parse_command
from penstock_dynamo.importer.component import Component

_SAME = (
    "max_gpu_budget",
    "min_gpu_budget",
    "decode_kv_scale_up_threshold",
    "decode_kv_scale_down_threshold",
    "prefill_queue_scale_up_threshold",
    "prefill_queue_scale_down_threshold",
)
"""Numbers that have the same name here."""

_NUMBERS = {
    "adjustment_interval": "adjustmentIntervalSeconds",
    "throughput_adjustment_interval": "adjustmentIntervalSeconds",
    "throughput_adjustment_interval_seconds": "adjustmentIntervalSeconds",
    "metric_pulling_interval": "metricPullingIntervalSeconds",
    **{name: to_camel(name) for name in _SAME},
}
"""A later one of the same key wins; the first two of an interval are older names."""

_MILLISECONDS = {f"{name}{unit}": name for name in ("ttft", "itl") for unit in ("", "_ms")}
"""Targets, by their older names and those of 1.6."""

_PROFILE = "profile_results_dir"
_SAID_BY_GRAPH = ("environment", "backend", "namespace", "decode_engine_num_gpu", "prefill_engine_num_gpu")
_OWN_PLANNER = "belongs to Dynamo's planner; Penstock's own runs in its place"


def read_planner(component: Component) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the planner section and the graph's ``slo``; every other flag and setting of the component is noted."""
    source, container = component.source, component.container
    source.take(component.type_key)
    for key in ("command", "args"):
        container.take_list(key)
    command = parse_command(component.words)
    if command is None:
        for key in [each for each in ("command", "args") if each in container.names()]:
            container.at(key).note("is not a plain Python command; set spec.planner by hand")
        return {}, {}
    planner, slo = _read_settings(component.args, command)
    for word in command.words:
        component.args.note("is not an option of this planner", word)
    for each in (container, component.pod, source):
        each.note_keys(_OWN_PLANNER)
    return planner, slo


def _read_settings(args: ManifestSource, command: Command) -> tuple[dict[str, Any], dict[str, Any]]:
    config = _read_config(args, command)
    for name in (*_NUMBERS, *_MILLISECONDS, *_SAID_BY_GRAPH):
        value = command.pop_value(f"--{name.replace('_', '-')}")
        if value is not None:
            config.setdefault(name, value)
    planner = _numbers(args, config, _NUMBERS)
    for key, unlimited in (("minGpuBudget", 0), ("maxGpuBudget", None)):
        if planner.get(key, 0) < 0:
            planner[key] = unlimited
    slo = {key: duration_text(ms / 1000) for key, ms in _numbers(args, config, _MILLISECONDS).items()}
    is_sla = config.pop("optimization_target", None) == "sla" or (command.module or "").endswith(
        "planner_sla"
    )
    if slo or is_sla:
        profile = _read_profile(args, command, config)
        planner |= {"mode": "sla", "sla": profile} if profile else {}
    if command.pop_flag("--no-operation"):
        planner["noOperation"] = True
    for key, value in config.items():
        if value == "global-planner":
            args.note(f"{key}: this graph's planner decides alone", value)
        elif key not in _SAID_BY_GRAPH:
            args.note(f"{key} is not an option of this planner", json.dumps(value))
    return planner, slo


def _read_config(args: ManifestSource, command: Command) -> dict[str, Any]:
    text = command.pop_value("--config")
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        args.note("is not a JSON object; set spec.planner by hand", text)
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


def _numbers(args: ManifestSource, config: dict[str, Any], keys: dict[str, str]) -> dict[str, Any]:
    """Take the numbers out of a planner's settings, by the keys that they have here."""
    found: dict[str, Any] = {}
    for name in [each for each in keys if each in config]:
        value = config.pop(name)
        try:
            number = float(str(value))
        except ValueError:
            args.note(f"is not a number for {keys[name]}", value)
            continue
        found[keys[name]] = int(number) if number.is_integer() else number
    return found
