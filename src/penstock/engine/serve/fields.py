"""Reads single fields of a request's JSON with their types and bounds; what does not fit is a `RequestError`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from penstock.core.errors import PenstockError

Check = Callable[[str, Any], None]
"""Refuses a field's value, which is not null, where it does not fit."""


class RequestError(PenstockError):
    """A request that is refused.

    Attributes:
        status: HTTP status.
        kind: vLLM's error type, ``BadRequestError`` and so on.
        param: Field at fault, or None.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        self.status = status
        self.kind = kind
        self.param = param
        super().__init__(message)

    def body(self) -> bytes:
        """Return the JSON error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


def mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object; a missing one is empty."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object.", param=name)
    return value


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Return a boolean; a missing one is false."""
    value = fields.get(name)
    if value is not None:
        boolean(name, value)
    return bool(value)


def integer(fields: Mapping[str, Any], name: str, *, lowest: int | None = None) -> int | None:
    """Return a whole number >= ``lowest``, or None where it is missing."""
    value = fields.get(name)
    if value is None:
        return None
    whole(lowest)(name, value)
    return int(value)


def too_small(name: str, value: int, lowest: int = 1) -> RequestError:
    """Return the refusal of a number below its bound."""
    message = f"{name} must be at least {lowest}, got {value}. (parameter={name}, value={value})"
    return RequestError(message, param=name)


# -- checks ---------------------------------------------------------------------------------------


def boolean(name: str, value: Any) -> None:
    """Refuse what is not true or false."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false.", param=name)


def string(name: str, value: Any) -> None:
    """Refuse what is not a string."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string.", param=name)


def text(name: str, value: Any) -> None:
    """Refuse what is not a string with at least one character."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a string, not empty.", param=name)


def whole(lowest: int | None = None, highest: int | None = None) -> Check:
    """Return a check for whole numbers in [lowest, highest]; None: no bound."""

    def check(name: str, value: Any) -> None:
        if type(value) is not int:
            raise RequestError(f"{name} must be an integer.", param=name)
        if lowest is not None and value < lowest:
            raise too_small(name, value, lowest)
        if highest is not None and value > highest:
            raise RequestError(f"{name} must be at most {highest}, got {value}.", param=name)

    return check


def number(lowest: float = -math.inf, highest: float = math.inf, *, above: bool = False) -> Check:
    """Return a check for numbers in [lowest, highest], or (lowest, highest] with ``above``."""

    def check(name: str, value: Any) -> None:
        if type(value) not in {int, float} or not math.isfinite(value):
            raise RequestError(f"{name} must be a finite number.", param=name)
        if value < lowest or value > highest or (above and value == lowest):
            bounds = f"{'(' if above else '['}{lowest:g}, {highest:g}]"
            raise RequestError(f"{name} must be in {bounds}, got {value:g}.", param=name)

    return check


def strings(name: str, value: Any) -> None:
    """Refuse what is not an object of strings."""
    if not all(isinstance(each, str) for each in mapping({name: value}, name).values()):
        raise RequestError(f"{name} must be an object of strings.", param=name)


def json_object(name: str, value: Any) -> None:
    """Refuse what is not an object."""
    mapping({name: value}, name)


def one_of(*values: str) -> Check:
    """Return a check for a closed set of words."""

    def check(name: str, value: Any) -> None:
        if value not in values:
            raise RequestError(f"{name} must be one of {', '.join(values)}.", param=name)

    return check


def absent(why: str) -> Check:
    """Return a check that refuses whatever asks for something: all but false and empty lists."""

    def check(name: str, value: Any) -> None:
        if value is not False and value != []:
            raise RequestError(f"{name} is not supported by a simulated worker: {why}", param=name)

    return check
