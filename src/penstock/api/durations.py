"""The type of a manifest's durations: text such as ``500ms`` in the file, seconds in the model. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from penstock.core.durations import MAX_CHARS, PATTERN, duration_text, examples_for, seconds_of

DURATION_ERROR: Final = "penstock_duration"
"""Type of the validation error of a duration; its message is complete."""

BOUNDS_KEY: Final = "x-penstock-duration"
"""Where a model's JSON schema holds the bounds of a duration, for the CRD's CEL."""


@dataclass(frozen=True, slots=True)
class DurationBounds:
    """Makes a float a duration of at least ``least`` and at most ``most``, both written as durations."""

    least: str
    most: str

    @property
    def cel(self) -> str:
        """The bounds as CEL; ``self`` is the text."""
        return f"duration(self) >= duration('{self.least}') && duration(self) <= duration('{self.most}')"

    def read(self, value: object) -> float:
        """Return the seconds of a manifest's value.

        Raises:
            PydanticCustomError: it is not a duration, or not within the bounds.
        """
        shown = json.dumps(value, default=str)
        if not isinstance(value, str):
            raise _refusal(f"{shown} is not a duration; write {examples_for(value)}")
        try:
            seconds = seconds_of(value)
        except ValueError:
            raise _refusal(f"{shown} is not a duration; write {examples_for(value)}") from None
        if seconds < seconds_of(self.least):
            raise _refusal(f"{shown} is too short; it must be at least {self.least}")
        if seconds > seconds_of(self.most):
            raise _refusal(f"{shown} is too long; it must be at most {self.most}")
        return seconds

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return how pydantic reads a duration, and writes it in JSON."""
        written = core_schema.plain_serializer_function_ser_schema(
            duration_text, when_used="json-unless-none"
        )
        return core_schema.no_info_plain_validator_function(self.read, serialization=written)

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema of the text."""
        bounds = [self.least, self.most]
        return {"type": "string", "pattern": PATTERN, "maxLength": MAX_CHARS, BOUNDS_KEY: bounds}


def _refusal(text: str) -> PydanticCustomError:
    return PydanticCustomError(DURATION_ERROR, "{text}", {"text": text})


Duration = Annotated[float, DurationBounds("1ms", "24h")]
"""A duration of a manifest; in the model, seconds."""
