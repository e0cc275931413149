"""What pydantic found wrong, as one line; those who read JSON of users, files and peers show it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from penstock.core.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)


def findings(error: ValidationError, *, root: str, most: int | None = None, with_values: bool = False) -> str:
    """Return findings as ``key: what is wrong``, joined by semicolons, or as ``key: value: what is wrong``."""
    found = []
    for each in error.errors(include_url=False)[:most]:
        is_shown = with_values and each["type"] not in {"missing", "json_invalid"}
        value = f"{each['input']!r}: " if is_shown else ""
        found.append(f"{'.'.join(map(str, each['loc'])) or root}: {value}{each['msg']}")
    return "; ".join(found)


def read_json_flag(model: type[_Model], text: str, flag: str) -> _Model:
    """Return what the JSON of a command line's flag says."""
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise ConfigError(f"{flag}: {findings(exc, root='JSON')}") from exc
