"""Formats pydantic's validation errors as one line, for readers of JSON from users, files and peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.core.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)
_Made = TypeVar("_Made")


def findings(error: ValidationError, *, root: str, most: int | None = None, with_values: bool = False) -> str:
    """Return validation errors as ``key: message`` or, with values, ``key: value: message``, joined by semicolons.

    Args:
        error: The validation error.
        root: Key to show for an error that concerns the entire input.
        most: Maximum number of errors to show; None shows all.
        with_values: Whether to show the invalid values.
    """
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
    """Return a policy's parameters, validated by its model.

    Args:
        model: Dataclass or pydantic model of the parameters.
        given: Values from the manifest, by field name.
        key: Key in the manifest, for messages.
        policy: Name of the policy, for messages.
        own: Values of fields that are set by other manifest keys than ``key``; ``given`` must not contain these fields.
            None means that there are none.

    Raises:
        ConfigError: A parameter does not exist, or its value is invalid.
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
    """Return the validated model from the JSON value of a command-line flag.

    Args:
        model: Pydantic model of the value.
        text: JSON text.
        flag: Name of the flag, for messages.

    Raises:
        ConfigError: The value is not valid.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise ConfigError(f"{flag}: {findings(exc, root='JSON')}") from exc
