"""How the statefile reads and writes as JSON; `store` and the arbiter's start use it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock_core.errors import ConfigError
from penstock_core.local_state import ARBITER_KEY, EntryState
from penstock_graph.runtimes import PORT
from penstock_local.statefile import ArbiterInfo, Entry, StateFile


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """Return one entry as the file spells it; a stopped one carries no resources, as documented."""
    data: dict[str, Any] = {
        "service": entry.service,
        "role": entry.role,
        "cmd": list(entry.cmd),
        "env": dict(entry.env),
        "url": entry.url,
        "port": entry.port,
        "ports": dict(entry.ports),
        "placeholders": list(entry.placeholders),
        "health_path": entry.health_path,
        "pid": entry.pid,
        "create_time": entry.create_time,
        "state": entry.state.value,
        "resources": {"gpus": list(entry.gpus)},
        "served": entry.served,
        "restarts": entry.restarts,
        "reason": entry.reason,
        "gpus_per_replica": entry.gpus_per_replica,
        "grace_s": entry.grace_s,
        "startup_s": entry.startup_s,
        "order": entry.order,
    }
    if entry.state is EntryState.STOPPED:
        del data["resources"]
    return data


def to_json(state: StateFile) -> dict[str, Any]:
    """Return the whole file as JSON data, the arbiter first."""
    arbiter = state.arbiter
    data: dict[str, Any] = {
        ARBITER_KEY: {name: getattr(arbiter, name) for name in ArbiterInfo.__dataclass_fields__}
    }
    data.update((name, entry_to_json(entry)) for name, entry in state.entries.items())
    return data


def from_json(data: object, *, source: str) -> StateFile:
    """Read the file; unknown keys are ignored and missing ones get their defaults.

    Args:
        data: Parsed JSON.
        source: File name, for messages.

    Raises:
        ConfigError: the file is not a statefile; the message says what is wrong and how to go on.
    """
    if not isinstance(data, dict) or not isinstance(data.get(ARBITER_KEY), dict):
        raise ConfigError(
            f"{source}: not a statefile: key {ARBITER_KEY!r} is missing; delete the file and run `penstock up`"
        )
    arbiter = _arbiter(data[ARBITER_KEY], source)
    entries = {}
    for name, fields in data.items():
        if name == ARBITER_KEY:
            continue
        entries[name] = _entry(fields, f"{source}: {name}")
    return StateFile(arbiter, entries)


def _arbiter(fields: Mapping[str, Any], source: str) -> ArbiterInfo:
    defaults: dict[str, Any] = {
        "pid": 0,
        "create_time": 0.0,
        "endpoint": "",
        "pubsub_endpoint": "",
        "namespace": source.rsplit("/", 1)[-1].removesuffix(".json"),
        "graph": "",
        "model": "",
        "speed": 1.0,
        "log_dir": "",
        "gpus": 0,
        "router_url": "",
    }
    known = {key: value for key, value in fields.items() if key in ArbiterInfo.__dataclass_fields__}
    merged = {**defaults, **known}
    merged.setdefault("budget", merged["gpus"])
    speed = merged["speed"]
    if not isinstance(speed, int | float) or not (math.isfinite(speed) and speed > 0):
        raise ConfigError(f"{source}: arbiter.speed: {speed!r} must be a finite number above 0")
    return ArbiterInfo(**merged)


def _entry(fields: object, place: str) -> Entry:
    remedy = "run `penstock down --now`, or delete the file when nothing runs"
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be an object, not {type(fields).__name__}; {remedy}")
    try:
        state = EntryState(fields.get("state", EntryState.REQUESTED))
    except ValueError:
        known = ", ".join(EntryState)
        raise ConfigError(f"{place}.state: {fields['state']!r} is none of {known}; {remedy}") from None
    for key in ("service", "role"):
        if not isinstance(fields.get(key), str):
            raise ConfigError(f"{place}.{key}: missing; {remedy}")
    resources = fields.get("resources")
    gpus = resources.get("gpus", ()) if isinstance(resources, dict) else ()
    kept = {key: fields[key] for key in _PLAIN_FIELDS if key in fields}
    return Entry(
        service=fields["service"],
        role=fields["role"],
        cmd=tuple(_texts(fields.get("cmd", ()))),
        env=dict(fields.get("env") or {}),
        ports=_ports(fields),
        placeholders=tuple(_texts(fields.get("placeholders", ()))),
        state=state,
        gpus=tuple(gpus),
        **kept,
    )


def _ports(fields: Mapping[str, Any]) -> dict[str, int]:
    ports = fields.get("ports")
    if isinstance(ports, dict):
        return dict(ports)
    return {PORT: fields["port"]} if isinstance(fields.get("port"), int) else {}


def _texts(values: Iterable[object]) -> Iterable[str]:
    return (str(value) for value in values)


_PLAIN_FIELDS: Final = (
    "url",
    "health_path",
    "pid",
    "create_time",
    "gpus_per_replica",
    "grace_s",
    "startup_s",
    "served",
    "restarts",
    "reason",
    "order",
)
