"""Conversion between dataclasses and plain data (JSON types). Used by the ledger, replay and `penstock planner decide FILE`.

Numbers survive a round trip unchanged: JSON writes the shortest text that parses to the same float, and an int stays
an int.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from types import NoneType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

MadeT = TypeVar("MadeT")


def to_plain(value: Any) -> Any:
    """Return the value as plain data: dataclasses and mappings as dictionaries, enums as their values, and tuples as lists."""
    kind: Any = type(value)
    # Most values are of these types; checking each of them for the other types took a tenth of a simulation.
    if kind in _ATOMS:
        return value
    if (fields := _fields(kind)) is not None:
        return {f.name: to_plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def to_short(value: Any) -> Any:
    """Return the value as plain data, without dataclass fields that equal their default.

    Dataclasses and mappings become dictionaries, enums their values, and tuples lists.
    """
    kind: Any = type(value)
    if (fields := _fields(kind)) is not None:
        pairs = [(f, getattr(value, f.name)) for f in fields]
        return {f.name: to_short(each) for f, each in pairs if each != f.default}
    if isinstance(value, Mapping):
        return {key: to_short(item) for key, item in value.items()}
    return value


_ATOMS: Final = frozenset((bool, float, int, str, NoneType))


@cache
def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...] | None:
    """Return the fields of a dataclass, or None if the type is not a dataclass."""
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else None


def from_plain(kind: Callable[..., MadeT], plain: Mapping[str, Any], *, skips_unknown: bool = False) -> MadeT:
    """Return the dataclass instance from which `to_plain` made ``plain``. Absent keys take the field's default.

    Args:
        kind: A dataclass. Its annotations determine how each field is parsed.
        plain: Values of its fields by name.
        skips_unknown: Whether to ignore keys that the dataclass, or a dataclass nested in it, does not have; otherwise
            such keys raise TypeError.

    Raises:
        AttributeError, TypeError, ValueError: The data does not fit the dataclass.
    """
    made: MadeT = _reader(kind, skips_unknown=skips_unknown)(plain)
    return made


Reader = Callable[[Any], Any]
"""Function that parses a plain value into the value of a field."""
_SCALARS: Final[Mapping[Any, tuple[type, ...]]] = {
    bool: (bool,),
    int: (int, float),
    float: (float, int),
    str: (str,),
}
"""Accepted Python types by annotation. int and float are accepted for each other, because JSON does not distinguish
them."""


@cache
def _reader(hint: Any, *, skips_unknown: bool) -> Reader:
    """Return the function that parses a value of this annotation."""
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        readers = {
            each.name: _reader(hints[each.name], skips_unknown=skips_unknown)
            for each in dataclasses.fields(hint)
        }
        return partial(_dataclass, hint, readers, skips_unknown=skips_unknown)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    origin, arguments = get_origin(hint), get_args(hint)
    inner = [_reader(each, skips_unknown=skips_unknown) for each in arguments]
    if origin is tuple:
        return _items_reader(arguments[0], inner[0])
    if origin is Mapping:
        return partial(_mapping, inner[0], inner[1])
    if len(arguments) == 2 and arguments[1] is NoneType and inner[0] is not _unchanged:
        return partial(_optional, inner[0])
    return partial(_scalar, _SCALARS[hint]) if hint in _SCALARS else _unchanged


def _items_reader(hint: Any, read: Reader) -> Reader:
    if hint in _SCALARS:
        return partial(_scalars, frozenset(_SCALARS[hint]))
    return tuple if read is _unchanged else partial(_items, read)


def _dataclass(
    kind: Any, readers: Mapping[str, Reader], plain: Mapping[str, Any], *, skips_unknown: bool
) -> Any:
    values = {name: plain[name] for name in readers if name in plain} if skips_unknown else dict(plain)
    for name, read in readers.items():
        if read is not _unchanged and name in values:
            values[name] = read(values[name])
    return kind(**values)


def _scalar(kinds: tuple[type, ...], plain: Any) -> Any:
    if not isinstance(plain, kinds):
        raise TypeError(f"{str(plain)[:40]} is not of type {kinds[0].__name__}")
    return plain


def _scalars(kinds: frozenset[type], plain: Sequence[Any]) -> tuple[Any, ...]:
    values = tuple(plain)
    if wrong := set(map(type, values)) - kinds:
        raise TypeError(f"{', '.join(sorted(each.__name__ for each in wrong))} among numbers or texts")
    return values


def _items(read: Reader, plain: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([read(each) for each in plain])


def _mapping(key: Reader, read: Reader, plain: Mapping[str, Any]) -> dict[Any, Any]:
    return {key(name): read(each) for name, each in plain.items()}


def _optional(read: Reader, plain: Any) -> Any:
    return None if plain is None else read(plain)


def _unchanged(plain: Any) -> Any:
    return plain
