"""Reads a decision's input from a file people write: pulls with plain numbers, options by their names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from penstock_api import Role
from penstock_core.errors import ConfigError, InvalidSpecError
from penstock_planner.decide.codec import config_from, state_from, window_from
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.observation import Observation, PoolCounts, Window, summarise
from penstock_planner.decide.reading import Reading, judge
from penstock_planner.decide.state import PlannerState
from penstock_planner.options import PlannerOptions, refuse_contradictions

EXAMPLE = """\
# penstock planner decide FILE: what would the planner do? Every key but observations may be left out.
config:                      # the planner's options by their names; documented defaults
  mode: load                 # the thresholds; mode adaptive needs demand, which only a ledger's record holds
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

_POOLS = (
    frozenset({Role.PREFILL, Role.DECODE}),
    frozenset({Role.PREFILL}),
    frozenset({Role.DECODE}),
    frozenset({Role.AGGREGATED}),
)
"""Roles that a planner scales together."""

MAX_AGE_S = 10.0
"""Simulated seconds; the default of --metrics-max-age."""


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
            recorded = _checked(window_from(data["window"]))
            return recorded, state_from(data["before"]), config_from(data["config"])
        window = _checked(_window(data))
        pools = window.pulls[-1].pools if window.pulls else {}
        return window, state_from(data.get("state") or {}), _config(data.get("config") or {}, pools)
    except InvalidSpecError as exc:
        problem = exc.problems[0]
        raise ConfigError(f"{name}: config.{problem.path.removeprefix('--')}: {problem.message}") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"{name}: config.{first['loc'][0]}: {first['msg'].lower()}") from exc
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exc:
        raise ConfigError(f"{name}: {type(exc).__name__}: {exc}; print a valid one with --example") from exc


def _config(plain: Mapping[str, Any], pools: Collection[Role]) -> DecideConfig:
    # The file has no demand at the door, without which mode adaptive holds.
    options = PlannerOptions.model_validate({"mode": Mode.LOAD.value, **plain})
    refuse_contradictions(options, is_aggregated=Role.AGGREGATED in pools)
    return options.decide_config()


def _checked(window: Window) -> Window:
    """Return a window that a running planner could have seen.

    Raises:
        ValueError: a time that is none or goes back, pools that no graph has, or replicas that cannot be counted.
    """
    at_s = window.start_s
    for pull in window.pulls:
        if not (math.isfinite(pull.at_s) and pull.at_s > at_s):
            raise ValueError(f"at_s {pull.at_s:g} must be a number above {at_s:g}, the time before it")
        at_s = pull.at_s
        if pull.pools.keys() not in _POOLS:
            names = ", ".join(sorted(role.value for role in pull.pools)) or "none"
            raise ValueError(f"pools {names}: must be prefill and decode, one of them, or aggregated")
        for role, counts in pull.pools.items():
            for name, count in dataclasses.asdict(counts).items():
                if type(count) is not int or count < 0:
                    raise ValueError(f"pools.{role.value}.{name} {count!r} must be a whole number, 0 or more")
    if not (math.isfinite(window.start_s) and math.isfinite(window.end_s) and window.end_s >= at_s):
        raise ValueError(f"start_s {window.start_s:g} to end_s {window.end_s:g} must hold every observation")
    return window


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
