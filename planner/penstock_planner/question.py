"""Reads a decision's input from a file people write: pulls with plain numbers, options by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from penstock_core.errors import ConfigError
from penstock_graph.models import Role
from penstock_planner.decide.codec import config_from, state_from, window_from
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.observation import Observation, PoolCounts, Window, summarise
from penstock_planner.decide.reading import Reading, judge
from penstock_planner.decide.state import PlannerState
from penstock_planner.options import PlannerOptions

EXAMPLE = """\
# penstock planner decide FILE: what would the planner do? Every key but observations may be left out.
config:                      # the planner's options by their names; documented defaults
  max-gpu-budget: 8
  decode-kv-scale-up-threshold: 0.9
state:                       # what the last decision left
  sequence: 11
  roles:
    decode: {seen: 2, grace: 0}
start_s: 330                 # the interval is (start_s, last observation]
observations:                # one per pull; null, .nan or a value out of range is an unknown one
  - at_s: 345
    pools:
      prefill: {ready: 1, gpus: 1}
      decode: {ready: 2, starting: 0, draining: 0, gpus: 1}
    kv: {llama_decode: 0.95, llama_decode_1: 0.91}
    queue: 0.0               # requests waiting for prefill in the whole graph
  - at_s: 360
    pools:
      prefill: {ready: 1, gpus: 1}
      decode: {ready: 2, gpus: 1}
    kv: {llama_decode: {value: 0.96, age_s: 2}, llama_decode_1: 0.92}
    queue: 1
"""

MAX_AGE_S = 10.0
"""Modelled seconds; the default of --metrics-max-age."""


def parse(text: str, *, name: str) -> tuple[Window, PlannerState, DecideConfig]:
    """Return a decision's inputs.

    Args:
        text: YAML or JSON in the form of `EXAMPLE`, or a ledger's decision record.
        name: For messages.

    Raises:
        ConfigError: it cannot be read; the message names the key.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{name}: neither YAML nor JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: expected a map; print one with --example")
    try:
        if "window" in data:
            return window_from(data["window"]), state_from(data["before"]), config_from(data["config"])
        return _window(data), state_from(data.get("state") or {}), _config(data.get("config") or {})
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"{name}: config.{first['loc'][0]}: {first['msg'].lower()}") from exc
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        raise ConfigError(f"{name}: {type(exc).__name__}: {exc}; print a valid one with --example") from exc


def _config(plain: Mapping[str, Any]) -> DecideConfig:
    return PlannerOptions.model_validate(plain).decide_config()


def _window(data: Mapping[str, Any]) -> Window:
    unknown = set(data) - {"config", "state", "start_s", "end_s", "observations"}
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r}")
    pulls = tuple(summarise(_observation(each)) for each in data["observations"])
    end_s = float(data.get("end_s", pulls[-1].at_s if pulls else 0.0))
    return Window(float(data.get("start_s", 0.0)), end_s, pulls)


def _observation(data: Mapping[str, Any]) -> Observation:
    pools = {Role(role): PoolCounts(**counts) for role, counts in data["pools"].items()}
    queue = _reading(data.get("queue"), None) if Role.PREFILL in pools else None
    kv = {name: _reading(value, 1.0) for name, value in (data.get("kv") or {}).items()}
    return Observation(float(data["at_s"]), pools, kv, queue)


def _reading(raw: Any, upper: float | None) -> Reading:
    value, age_s, source = raw, 0.0, "file"
    if isinstance(raw, dict):
        value, age_s, source = raw.get("value"), float(raw.get("age_s", 0.0)), str(raw.get("source", source))
    number = None if value is None else float(value)
    return judge(number, age_s=age_s, max_age_s=MAX_AGE_S, source=source, upper=upper)
