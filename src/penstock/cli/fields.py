"""Generates a command's options from a dataclass whose fields say their flags (`penstock.core.flags`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click

from penstock.cli.completion import OF_FLAG
from penstock.cli.option import Choice, Option, choice, group, secret, span
from penstock.core.errors import ConfigError
from penstock.core.flags import Flag, bounds_text, flag_of, flags, is_within

T = TypeVar("T")

_PATHS: dict[str | None, dict[str, bool]] = {
    None: {},
    "file": {"dir_okay": False},
    "existing file": {"dir_okay": False, "exists": True},
    "folder": {"file_okay": False},
}


def options(model: type[Any], /, *, several: Collection[str] = (), **defaults: Any) -> Option:
    """Return the options of a dataclass, in the order of its fields, with those of dataclasses in it.

    Args:
        model: Its fields, or those of its parts, say their flags.
        several: Fields whose flags may be repeated, so that the command gets a tuple of values, empty without any.
        defaults: Of this command, by field, as a user would give them; other fields have their own.
    """
    said, found = flags(model), []
    for each, hint in _hints(model):
        if each.name in said:
            default = defaults.get(each.name, each.default)
            found.append(_option(each, hint, said[each.name], default, is_several=each.name in several))
        elif _is_part(hint):
            found.append(options(hint, several=several, **defaults))
    return group(*found)


def take(model: type[T], given: dict[str, Any], /, **others: Any) -> T:
    """Take what `options` added to a command out of its arguments, and return it as the dataclass.

    Args:
        model: As it was given to `options`.
        given: The command's arguments by name; those of the model are removed.
        others: Values of fields that are not flags.
    """
    said, values = flags(model), dict(others)
    for each, hint in _hints(model):
        if each.name in said:
            values[each.name] = given.pop(each.name)
        elif _is_part(hint):
            values[each.name] = take(hint, given)
    return model(**values)


def refuse_given(*parts: Any, needs: str) -> None:
    """Refuse the flags of dataclasses that were given, because they have no effect without ``needs``."""
    for part in parts:
        for name in flags(part):
            if getattr(part, name):
                raise ConfigError(
                    f"{flag_of(name)}: has an effect only with {needs}; add that, or remove this flag"
                )


def _hints(model: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(model)
    return [(each, hints[each.name]) for each in dataclasses.fields(model)]


def _is_part(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint) and bool(flags(hint))


def _option(
    each: dataclasses.Field[Any], hint: Any, said: Flag, default: Any, *, is_several: bool = False
) -> Option:
    spelling = said.name or flag_of(each.name)
    if said.key_variable is not None:
        return secret(spelling.removeprefix("--"), said.key_variable, said.help)
    arms = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = next(arm for arm in arms if arm is not NoneType)
    is_many, has_no = get_origin(kind) in {tuple, Sequence}, "/" in spelling
    if is_many:
        kind = get_args(kind)[0]
    text = said.help if said.unset is None else f"{said.help}  [default: {said.unset}]"
    if is_several:
        text = text if default is None else f"{text}  [default: {_as_text(default)}]"
        is_many, default = True, None
    read = _reader(kind, said, spelling, default, is_many=is_many)
    details: dict[str, Any] = {"metavar": said.metavar, "envvar": said.variable, "callback": read}
    if default is dataclasses.MISSING:
        details["required"] = not is_many
    elif default is not None and default != () and (kind is not bool or has_no):
        details |= {"default": _as_text(default), "show_default": True}
    if kind is bool:
        details |= {} if has_no else {"is_flag": True}
    elif not said.is_separated:
        details |= {"type": _type(kind, said), "multiple": is_many}
    if spelling in OF_FLAG:
        details["shell_complete"] = OF_FLAG[spelling]
    if said.bare is not None:
        details |= {"is_flag": False, "flag_value": said.bare}
    return click.option(
        spelling, each.name, *said.short, help=text, show_envvar=said.variable is not None, **details
    )


def _reader(kind: Any, said: Flag, spelling: str, default: Any, *, is_many: bool) -> Callable[..., Any]:
    """Return click's callback, which makes the field's value of the flag's."""

    def read(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if kind is bool:  # ``--no-itl`` turns off what is on; ``--on/--off`` say it themselves
            return value if "/" in spelling else value is not (default is True)
        if said.is_separated:
            return default if value is None else _separated(value, kind, said)
        if is_many:
            return tuple(_converted(one, kind, said, spelling) for one in value)
        return None if value is None else _converted(value, kind, said, spelling)

    return read


def _type(kind: Any, said: Flag) -> Any:
    if said.choices:
        return Choice(said.choices)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return choice(kind)
    if kind is Path:
        return click.Path(path_type=Path, **_PATHS[said.path])
    if kind not in {int, float} or said.form is not None:
        return str
    bounds = {
        name: getattr(said, name) for name in ("ge", "gt", "le", "lt") if getattr(said, name) is not None
    }
    return span(kind, bounds) if bounds else kind


def _as_text(default: Any) -> Any:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return default.value if isinstance(default, Enum) else default


def _converted(value: Any, kind: Any, said: Flag, spelling: str) -> Any:
    if said.convert is None:
        return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value
    try:
        return said.convert(value)
    except ValueError as exc:
        raise ConfigError(f"{spelling} {value}: must be {said.form}") from exc


def _separated(text: str, kind: Any, said: Flag) -> tuple[Any, ...]:
    parts = [part for part in text.split(",") if part] if kind is str or not text else text.split(",")
    try:
        values = tuple(map(kind, parts))
    except ValueError as exc:
        what = "whole numbers" if kind is int else "numbers"
        raise click.BadParameter(f"{text!r}: must be {what} separated by commas") from exc
    for value in values:
        if kind is not str and not is_within(said, value):
            raise click.BadParameter(f"{value!r}: must be {bounds_text(said, value)}")
    return values
