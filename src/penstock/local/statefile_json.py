"""How the statefile reads and writes as JSON; `store` and the arbiter's start use it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from penstock.core.errors import ConfigError
from penstock.core.local_state import ARBITER_KEY, EntryState
from penstock.local.statefile import ArbiterInfo, ProcessEntry, StateFile
from penstock.runtimes import PORT


def entry_to_json(entry: ProcessEntry) -> dict[str, Any]:
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
        "started": entry.started,
        "state": entry.state.value,
        "resources": {"gpus": list(entry.gpus)},
        "served": entry.served,
        "restarts": entry.restarts,
        "reason": entry.reason,
        "gpus_per_replica": entry.gpus_per_replica,
        "grace_s": entry.grace_s,
        "startup_s": entry.startup_s,
        "liveness_s": entry.liveness_s,
        "stall_s": entry.stall_s,
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
        "started": "",
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
    merged = {**defaults, **fields}
    merged.setdefault("budget", merged["gpus"])
    arbiter = _validated(_ARBITER, merged, f"{source}: {ARBITER_KEY}")
    if arbiter.speed <= 0:
        raise ConfigError(f"{source}: arbiter.speed: {arbiter.speed!r} must be a finite number above 0")
    return arbiter


def _entry(fields: object, place: str) -> ProcessEntry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be an object, not {type(fields).__name__}; {_REMEDY}")
    resources = fields.get("resources")
    gpus = resources.get("gpus", ()) if isinstance(resources, dict) else ()
    entry = _validated(_ENTRY, {"cmd": (), **fields, "ports": _ports(fields), "gpus": gpus}, place)
    for key, value, most in (("pid", entry.pid, _MAX_PID), *(_port_bounds(entry))):
        if value is not None and not 0 < value <= most:
            raise ConfigError(f"{place}.{key}: {value} must be 1 to {most}; {_REMEDY}")
    return entry


def _port_bounds(entry: ProcessEntry) -> Iterable[tuple[str, int, int]]:
    return ((f"ports.{name}", port, _MAX_PORT) for name, port in entry.ports.items())


def _ports(fields: Mapping[str, Any]) -> object:
    """Return the ports; of a file that knows one alone, that."""
    if "ports" in fields:
        return fields["ports"]
    return {} if fields.get("port") is None else {PORT: fields["port"]}


def _validated(adapter: TypeAdapter[_T], fields: Mapping[str, Any], place: str) -> _T:
    try:
        value = adapter.validate_python(fields)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = "missing" if first["type"] == "missing" else f"{first['input']!r}: {first['msg']}"
        raise ConfigError(f"{place}.{key}: {what}; {_REMEDY}") from exc
    for key in fields:
        number = getattr(value, key, None)
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{place}.{key}: {number!r} must be a finite number; {_REMEDY}")
    return value


_T = TypeVar("_T")
_ARBITER: Final = TypeAdapter(ArbiterInfo)
_ENTRY: Final = TypeAdapter(ProcessEntry)
_MAX_PID: Final = 2**22
"""Largest pid of 64-bit Linux (proc_sys_kernel(5)); 0 and below would signal whole groups."""
_MAX_PORT: Final = 65535
_REMEDY: Final = "run `penstock down --now`, or delete the file when nothing runs"
