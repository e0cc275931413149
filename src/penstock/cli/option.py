"""Options that several commands take, each spelt, bounded and explained once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from penstock.api import AdmissionConfig, AdmissionMode
from penstock.api.fields import bounds, is_duration, kind_of
from penstock.core.closest import did_you_mean
from penstock.core.durations import duration_text
from penstock.core.errors import ConfigError
from penstock.core.flags import flag_of

F = TypeVar("F", bound=Callable[..., Any])


class Option(Protocol):
    """What adds one or more options to a command's function, and returns it."""

    def __call__(self, function: F, /) -> F:
        """Add them."""


class Choice(click.Choice[str]):
    """A choice that says which one a wrong word is close to."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return why a word is refused."""
        refusal = super().get_invalid_choice_message(value, ctx)
        return f"{refusal.removesuffix('.')}{did_you_mean(str(value), self.choices)}"


def choice(values: Iterable[Enum]) -> Choice:
    """Return a choice of an enum's values, taken as text."""
    return Choice([value.value for value in values])


def group(*options: Option) -> Option:
    """Return what adds options to a command, so that its help lists them in this order."""

    def add(function: F) -> F:
        for each in reversed(options):
            function = each(function)
        return function

    return add


def secret(name: str, variable: str, what: str) -> Option:
    """Return ``--NAME-file``, which fills ``name`` with a file's only line or the variable; arguments show in ``ps``."""
    flag = f"--{name}-file"

    def read(_context: click.Context, _parameter: click.Parameter, file: Path | None) -> str | None:
        if file is None:
            return os.environ.get(variable) or None
        try:
            lines = file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(
                f"{flag} {file}: cannot be read: {exc}; name a text file that holds the key"
            ) from exc
        if len(lines) != 1:
            raise ConfigError(f"{flag} {file}: {len(lines)} words; write one key, which has no spaces")
        return lines[0]

    return click.option(
        flag,
        name.replace("-", "_"),
        type=click.Path(path_type=Path),
        callback=read,
        help=f"{what}  [default: the variable {variable}]",
    )


def as_json(what: str) -> Option:
    """Return ``--json``, which fills ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=what)


def admission(*, without: Collection[str] = ()) -> Option:
    """Return the flags of a router's admission section; unset ones stay None."""
    fields = {name: field for name, field in AdmissionConfig.model_fields.items() if name not in without}

    def shape(name: str, field: FieldInfo) -> tuple[str, dict[str, Any]]:
        return "--admission-control" if name == "mode" else flag_of(name), {
            "type": choices_of(field) or span(kind_of(field), bounds(field))
        }

    return of_settings(fields, None, shape, or_else="the graph's, or ")


def admission_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the flags of `admission` out of a command's options; return those that were given, by field."""
    taken = {name: options.pop(name, None) for name in AdmissionConfig.model_fields}
    if taken["mode"] is not None:
        taken["mode"] = AdmissionMode(taken["mode"])
    return {name: value for name, value in taken.items() if value is not None}


def choices_of(field: FieldInfo) -> Choice | None:
    """Return the values of a field that is an enum or a literal; None for any other."""
    kind = kind_of(field)
    if get_origin(kind) is Literal:
        return Choice(list(get_args(kind)))
    return choice(kind) if isinstance(kind, type) and issubclass(kind, Enum) else None


def span(kind: type, found: Mapping[str, float]) -> click.IntRange | click.FloatRange:
    """Return a number's type with its bounds by ``gt``, ``ge``, ``lt`` and ``le``."""
    made = click.IntRange if issubclass(kind, int) else click.FloatRange
    return made(
        found.get("ge", found.get("gt")),  # type: ignore[arg-type]  # an integer's are integers
        found.get("le", found.get("lt")),  # type: ignore[arg-type]
        min_open="gt" in found,
        max_open="lt" in found,
    )


def of_settings(
    fields: Mapping[str, FieldInfo],
    prefix: str | None,
    shape: Callable[[str, FieldInfo], tuple[str, dict[str, Any]]],
    *,
    or_else: str = "",
) -> Option:
    """Return what adds one option per setting of a model, with its environment variable; unset ones stay None.

    Args:
        fields: The model's.
        prefix: Of the environment variables, such as ``PENSTOCK_OPERATOR``; None: there are none.
        shape: Gives a setting's flag and what click must know of its values.
        or_else: Where a value comes from before the model's default, as the help says it.
    """

    def made(name: str, field: FieldInfo) -> Option:
        flag, details = shape(name, field)
        default = getattr(field.default, "value", field.default)
        if is_duration(field) and default is not None:
            default = duration_text(default)
        shown = "none" if default is None else str(default).lower() if isinstance(default, bool) else default
        return click.option(
            flag,
            name,
            default=None,
            envvar=None if prefix is None else f"{prefix}_{name.upper()}",
            show_envvar=prefix is not None,
            help=f"{field.description}  [default: {or_else}{shown}]",
            **details,
        )

    return group(*(made(name, field) for name, field in fields.items()))
