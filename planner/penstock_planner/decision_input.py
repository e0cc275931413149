"""Reads the input of a decision from a file that a user has written, with metrics as plain numbers and options by their names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import orjson
import yaml
from pydantic import ValidationError

from penstock.api import PlannerMode, Role
from penstock.core.errors import ConfigError, InvalidSpecError
from penstock.performance.profile import PerformanceProfile, read_profile
from penstock_planner.core.older_names import with_present_names
from penstock_planner.core.records import MALFORMED
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.config import DecideConfig, Mode, config_from
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, summarise
from penstock_planner.decide.demand.reading import Reading, assess
from penstock_planner.decide.state import PlannerState
from penstock_planner.options import PlannerOptions, refuse_contradictions

_POOLS = (
    frozenset({Role.PREFILL, Role.DECODE}),
    frozenset({Role.PREFILL}),
    frozenset({Role.DECODE}),
    frozenset({Role.AGGREGATED}),
)
"""Sets of roles that a planner scales together."""

MAX_AGE_S = 10.0
"""Age in simulated seconds above which a reading is stale; the default of ``--metrics-max-age``."""


ReadProfile = Callable[[str], PerformanceProfile]
"""Function that reads the performance profile with a name or path; it raises `ConfigError` if it cannot."""


def parse(
    text: str, *, name: str, read: ReadProfile, profile: str | None = None
) -> tuple[Window, PlannerState, DecideConfig]:
    """Return the inputs of a decision: (metrics scrapes of the interval, state of the planner, configuration).

    Args:
        text: YAML or JSON in the form of the files in ``examples``, or a decision record of a ledger (the planner's
            decision log), also as a list of one.
        name: Name of the input for error messages.
        read: Function that reads a performance profile.
        profile: Name or path of a performance profile that replaces the one in the file; None keeps the one in the
            file.

    Raises:
        ConfigError: the input is invalid; the message names ``name`` and the key.
    """
    data = with_present_names(_loaded(text, name))
    try:
        if "window" in data:
            recorded = _checked(from_plain(Window, data["window"]))
            return (
                recorded,
                from_plain(PlannerState, data["before"]),
                _recorded(config_from(data["config"]), profile, read),
            )
        window = _checked(_window(data))
        pools = window.pulls[-1].pools if window.pulls else {}
        return window, from_plain(PlannerState, data.get("state") or {}), _config(data, pools, profile, read)
    except InvalidSpecError as exc:
        problem = exc.problems[0]
        raise ConfigError(f"{name}: config.{problem.path.removeprefix('--')}: {problem.message}") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"{name}: config.{first['loc'][0]}: {first['msg'].lower()}") from exc
    except MALFORMED as exc:
        raise ConfigError(f"{name}: {type(exc).__name__}: {exc}; print a valid one with --example") from exc


def _loaded(text: str, name: str) -> Mapping[str, Any]:
    try:
        data = orjson.loads(text)  # YAML would take a number such as 1e-05 for a text
    except orjson.JSONDecodeError:
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            raise ConfigError(f"{name}: neither YAML nor JSON: {exc}") from exc
    if isinstance(data, list) and len(data) == 1:
        (data,) = data
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: expected a map, or a list of one; print one with --example")
    return data


def _recorded(config: DecideConfig, named: str | None, read: ReadProfile) -> DecideConfig:
    """Return a record's configuration with its profile; a ledger stores the profile in the header, not in each record."""
    if named is not None:
        _refuse_profile_beside(config.mode)
        return replace(config, performance=read(named))
    if config.mode == Mode.SLA and config.performance is None:
        raise ConfigError(
            "the record is of mode sla and lacks the performance profile, which is in the ledger's "
            "header; print the record with `penstock planner explain --id ID --json`, or give "
            "--profile"
        )
    return config


def _config(
    data: Mapping[str, Any], pools: Collection[Role], profile: str | None, read: ReadProfile
) -> DecideConfig:
    # The default is mode load, which needs no demand at the frontend and therefore the shortest file.
    options = PlannerOptions.model_validate({"mode": Mode.LOAD.value, **(data.get("config") or {})})
    refuse_contradictions(options, is_aggregated=Role.AGGREGATED in pools)
    named, inline = profile or options.profile, data.get("performance")
    if options.mode != PlannerMode.SLA:
        if named is not None or inline is not None:
            _refuse_profile_beside(options.mode)
        return options.decide_config()
    if named is not None:
        return options.decide_config(performance=read(named))
    if inline is None:
        raise ConfigError(
            "mode sla needs a performance profile: give it as `performance:`, its file as "
            "config.profile, or --profile"
        )
    return options.decide_config(
        performance=read_profile(orjson.dumps(inline).decode(), origin="performance")
    )


def _refuse_profile_beside(mode: str) -> None:
    if mode != Mode.SLA:
        raise ConfigError(
            f"a performance profile has no effect in mode {mode}; leave it out, or set mode: sla"
        )


def _checked(window: Window) -> Window:
    """Return the window if a running planner could have observed it.

    Raises:
        ValueError: its times are not in order, or its roles or counts are not possible.
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
    unknown = set(data) - {"config", "state", "start_s", "end_s", "observations", "performance"}
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r}")
    pulls = tuple(_pull(each) for each in data["observations"])
    end_s = float(data.get("end_s", pulls[-1].at_s if pulls else 0.0))
    return Window(float(data.get("start_s", 0.0)), end_s, pulls)


def _pull(data: Mapping[str, Any]) -> Pull:
    pools = {Role(role): PoolCounts(**counts) for role, counts in data["pools"].items()}
    queue = _reading(data.get("queue"), None) if Role.PREFILL in pools else None
    kv = {name: _reading(value, 1.0) for name, value in (data.get("kv") or {}).items()}
    demand = data.get("demand")
    return summarise(
        float(data["at_s"]), pools, kv=kv, queue=queue, demand=None if demand is None else _demand(demand)
    )


def _demand(data: Mapping[str, Any]) -> Demand:
    """Return the demand at the frontend; every number in it must be finite and at least 0."""
    demand = from_plain(Demand, data)
    numbers = dataclasses.asdict(demand)
    for key in ("in_flight", "unserved"):
        numbers |= {f"{key}.{role.value}": count for role, count in numbers.pop(key).items()}
    for key, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"demand.{key} {value!r} must be a number, 0 or more")
    if demand.period_s == 0:
        raise ValueError("demand.period_s 0 must be above 0 seconds")
    return demand


def _reading(raw: Any, upper: float | None) -> Reading:
    value, age_s, source = raw, 0.0, "file"
    if isinstance(raw, dict):
        value, age_s, source = raw.get("value"), float(raw.get("age_s", 0.0)), str(raw.get("source", source))
    number = None if value is None else float(value)
    return assess(number, age_s=age_s, max_age_s=MAX_AGE_S, source=source, upper=upper)
