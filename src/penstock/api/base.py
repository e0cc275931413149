"""What every model of the API shares: key style, strictness, bounded scalar types.

Keys are camelCase in manifests and snake_case in Python; unknown keys are refused; scalars are not
coerced (``"8"`` is not 8), because the API server would refuse them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from penstock.api.rule import Rule, dotted

RULE_ERROR = "penstock_rule"
"""Type of the validation error that carries broken cross-field rules."""

DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
PROFILE_NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
SERVED_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"


def _without_fraction(value: object) -> object:
    """Return 2.0 as 2, for JSON has one kind of number and an API server takes both; leave 2.5 to be refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_without_fraction)
"""Validator of an integer that a file may spell as 30.0; behind its bounds, which the schema else loses."""

DnsLabel = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]
OperatorClass = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=40)]
EnvName = Annotated[str, StringConstraints(pattern=ENV_NAME_PATTERN, max_length=253)]
ProfileText = Annotated[str, StringConstraints(pattern=PROFILE_NAME_PATTERN, max_length=253)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
IMAGE_PATTERN = r"^\S+$"
Image = Annotated[str, StringConstraints(pattern=IMAGE_PATTERN, max_length=4096)]
"""A container image; a space in it is a slip, and an engine would not start."""
DnsName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
SecretKey = Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
ServedName = Annotated[str, StringConstraints(pattern=SERVED_NAME_PATTERN, max_length=253)]
AdapterPath = Annotated[str, StringConstraints(pattern=r"^[^\s,={}]+$", max_length=1024)]
Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
Replicas = Annotated[int, Field(strict=True, ge=0, le=1000)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
EngineGpus = Annotated[int, Field(strict=True, ge=1, le=512)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
UnprivilegedPort = Annotated[int, Field(strict=True, ge=1024, le=65535)]
"""A port that a process without root may listen on."""
Seconds = Annotated[float, Field(strict=True, gt=0, le=86400)]
WholeSeconds = Annotated[int, Field(strict=True, ge=1, le=86400), WHOLE]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]


class SpecModel(BaseModel):
    """Base of the API's models: frozen, unknown keys refused, camelCase keys, rules between keys enforced.

    A model that breaks rules raises one `PydanticCustomError` of type `RULE_ERROR`, the violations in its context.
    """

    rules: ClassVar[tuple[Rule[Any], ...]] = ()

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def to_manifest(self) -> dict[str, Any]:
        """Return plain data with manifest keys, values at their default left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    @property
    def every_rule(self) -> tuple[Rule[Any], ...]:
        """The model's rules and those that its values bring with them, which no schema holds."""
        return self.rules

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        violations = tuple(each for rule in self.every_rule for each in rule.violations(self))
        if violations:
            text = "; ".join(f"{dotted(each.path)}: {each.message}" for each in violations)
            raise PydanticCustomError(RULE_ERROR, "{text}", {"text": text, "violations": violations})
        return self


def entry(default: Any, text: str, **bounds: Any) -> Any:
    """Return an optional key of a manifest: its default, its meaning with the unit, and pydantic's bounds of its values."""
    return Field(default, description=text, **bounds)


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Return what refuses text that is none of ``names``, which installed distributions may add to."""

    def check(value: str) -> str:
        known = tuple(names())
        if value not in known:
            raise PydanticCustomError("enum", "not one of {expected}", {"expected": ", ".join(known)})
        return value

    return AfterValidator(check)
