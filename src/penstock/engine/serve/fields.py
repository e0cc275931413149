"""Holds a request's JSON against a model of its fields; what does not fit is a `RequestError`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.core.errors import PenstockError
from penstock.core.http.messages import error_body

_OBJECT_ERRORS = frozenset({"dict_type", "model_type"})


class RequestError(PenstockError):
    """A request that is refused.

    Attributes:
        kind: vLLM's error type, ``BadRequestError`` and so on.
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
        return error_body(str(self), kind=self.kind, code=self.status, param=self.param)


class Fields(BaseModel):
    """Fields of a request: their JSON types, nothing converted; other fields are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


_Model = TypeVar("_Model", bound=Fields)


def read_fields(model: type[_Model], given: Mapping[str, Any]) -> _Model:
    """Return the fields of a request; null counts as missing.

    Raises:
        RequestError: the first field whose type or range is wrong.
    """
    try:
        return model.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    bounds: Mapping[str, Any] = first.get("ctx", {})
    if first["type"] == "greater_than_equal":
        raise too_small(name, first["input"], bounds["ge"])
    if first["type"] == "less_than_equal":
        raise RequestError(f"{name} must be at most {bounds['le']}, got {first['input']}.", param=name)
    if first["type"] in _OBJECT_ERRORS:
        raise RequestError(f"{name} must be an object.", param=name)
    raise RequestError(f"{name}: {first['msg']}.", param=name)


def too_small(name: str, value: float, lowest: float = 1) -> RequestError:
    """Return the refusal of a number below its bound."""
    message = f"{name} must be at least {lowest}, got {value}. (parameter={name}, value={value})"
    return RequestError(message, param=name)


def refuse(given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse fields that a simulated worker cannot follow, unless they ask for nothing.

    Args:
        given: The request.
        reasons: What to do instead, by field.

    Raises:
        RequestError: one of them asks for something.
    """
    for name in given.keys() & reasons.keys():
        value = given[name]
        if value is not None and value is not False and value not in ("", []):
            message = f"{name} is not supported by a simulated worker: {reasons[name]}"
            raise RequestError(message, param=name)
