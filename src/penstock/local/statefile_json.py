"""How the statefile reads and writes as JSON; `store` and the arbiter's start use it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from penstock.core.errors import ConfigError
from penstock.core.local_state import ARBITER_KEY, EntryState
from penstock.local.statefile import ArbiterInfo, ProcessEntry, StateFile

_T = TypeVar("_T")
_ARBITER: Final = TypeAdapter(ArbiterInfo)
_ENTRY: Final = TypeAdapter(ProcessEntry)
_REMEDY: Final = "run `penstock down --now`, or delete the file when nothing runs"


def entry_to_json(entry: ProcessEntry) -> dict[str, Any]:
    """Return one entry as the file spells it; a stopped one carries no resources, as documented."""
    data: dict[str, Any] = _ENTRY.dump_python(entry, mode="json")
    resources = {"gpus": data.pop("gpus")}
    data["port"] = entry.port
    return data if entry.state is EntryState.STOPPED else {**data, "resources": resources}


def to_json(state: StateFile) -> dict[str, Any]:
    """Return the whole file as JSON data, the arbiter first."""
    entries = {name: entry_to_json(entry) for name, entry in state.entries.items()}
    return {ARBITER_KEY: _ARBITER.dump_python(state.arbiter, mode="json"), **entries}


def from_json(data: object, *, source: str) -> StateFile:
    """Read the file; unknown keys are ignored and missing ones get their defaults.

    Raises:
        ConfigError: the file is not a statefile; the message says what is wrong and how to go on.
    """
    if not isinstance(data, dict) or not isinstance(data.get(ARBITER_KEY), dict):
        raise ConfigError(
            f"{source}: not a statefile: key {ARBITER_KEY!r} is missing; delete the file and run `penstock up`"
        )
    fields = {"namespace": source.rsplit("/", 1)[-1].removesuffix(".json"), **data[ARBITER_KEY]}
    fields.setdefault("budget", fields.get("gpus", 0))
    arbiter = _validated(_ARBITER, fields, f"{source}: {ARBITER_KEY}")
    entries = {
        name: _entry(value, f"{source}: {name}") for name, value in data.items() if name != ARBITER_KEY
    }
    return StateFile(arbiter, entries)


def _entry(fields: object, place: str) -> ProcessEntry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be an object, not {type(fields).__name__}; {_REMEDY}")
    resources = fields.get("resources")
    gpus = resources.get("gpus", ()) if isinstance(resources, dict) else ()
    return _validated(_ENTRY, {"cmd": (), **fields, "gpus": gpus}, place)


def _validated(adapter: TypeAdapter[_T], fields: Mapping[str, Any], place: str) -> _T:
    try:
        return adapter.validate_python(fields)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = "missing" if first["type"] == "missing" else f"{first['input']!r}: {first['msg']}"
        raise ConfigError(f"{place}.{key}: {what}; {_REMEDY}") from exc
