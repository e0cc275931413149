"""What pydantic found wrong, as one line; those who read JSON of users, files and peers show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.core.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)
_Made = TypeVar("_Made")


def findings(error: ValidationError, *, root: str, most: int | None = None, with_values: bool = False) -> str:
    """Return findings as ``key: what is wrong``, joined by semicolons, or as ``key: value: what is wrong``."""
    found = []
    for each in error.errors(include_url=False)[:most]:
        is_shown = with_values and each["type"] not in {"missing", "json_invalid"}
        value = f"{each['input']!r}: " if is_shown else ""
        found.append(f"{'.'.join(map(str, each['loc'])) or root}: {value}{each['msg']}")
    return "; ".join(found)


def read_parameters(
    model: type[_Made],
    given: Mapping[str, Any],
    *,
    key: str,
    policy: str,
    own: Mapping[str, Any] | None = None,
) -> _Made:
    """Return a policy's parameters as its model reads them.

    Args:
        model: A dataclass or pydantic model; its fields turn plain values into what they are.
        given: By the names of the fields.
        key: Of the manifest, for messages.
        policy: Its name, for messages.
        own: Fields that other keys set, and ``given`` may not.

    Raises:
        ConfigError: there is no such parameter, or its value does not fit.
    """
    own = own or {}
    adapter = TypeAdapter(model)
    known = sorted(adapter.json_schema()["properties"].keys() - own.keys())
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"{key}: {', '.join(unknown)}: policy {policy} has {', '.join(known) or 'none'}")
    try:
        return adapter.validate_python({**given, **own})
    except ValidationError as exc:
        wrong = "; ".join(f"{each['loc'][0]} {each['input']!r}: {each['msg']}" for each in exc.errors())
        raise ConfigError(f"{key}: {wrong}") from exc


def read_json_flag(model: type[_Model], text: str, flag: str) -> _Model:
    """Return what the JSON of a command line's flag says."""
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise ConfigError(f"{flag}: {findings(exc, root='JSON')}") from exc
