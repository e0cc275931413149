"""A foreign manifest that remembers which of its values were carried; what is not read is reported, never dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from penstock.api.manifests.importing import Unconverted
from penstock.api.manifests.nodes import Document
from penstock.api.manifests.validation import shown
from penstock.api.rule import KeyPath, dotted
from penstock.core.errors import ManifestProblem

_Kind = TypeVar("_Kind", dict[str, Any], list[Any])


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """One document, or the part of it at ``base``, and what has been taken from it so far; parts share the latter.

    Attributes:
        taken: Paths that were carried, from the root.
        notes: What was not carried.
        problems: Why it cannot be converted at all.
    """

    document: Document
    base: KeyPath = ()
    taken: set[KeyPath] = field(default_factory=set)
    notes: list[Unconverted] = field(default_factory=list)
    problems: list[ManifestProblem] = field(default_factory=list)

    def at(self, *keys: str | int) -> ManifestSource:
        """Return the part below ``keys``."""
        return replace(self, base=(*self.base, *keys))

    def peek(self, *keys: str | int) -> Any:
        """Return the value without taking it; None if there is none."""
        value: Any = self.document.value
        for key in (*self.base, *keys):
            if isinstance(value, dict):
                value = value.get(str(key))
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return None
        return value

    def take(self, *keys: str | int) -> Any:
        """Return the value and count all of it as carried."""
        self.taken.add((*self.base, *keys))
        return self.peek(*keys)

    def take_map(self, *keys: str | int) -> dict[str, Any]:
        """Return the map, carried; empty if there is none, noted if it is not a map."""
        return _taken(self.at(*keys), {}, "a map")

    def take_list(self, *keys: str | int) -> list[Any]:
        """Return the list, carried; empty if there is none, noted if it is not a list."""
        return _taken(self.at(*keys), [], "a list")

    def word(self, *keys: str | int) -> str | None:
        """Return the text without taking it; None if there is none, or no text."""
        value = self.peek(*keys)
        return value if isinstance(value, str) else None

    def elements(self, *keys: str | int) -> list[ManifestSource]:
        """Return the elements of the list; none if there is no list."""
        value = self.peek(*keys)
        return [self.at(*keys, index) for index in range(len(value) if isinstance(value, list) else 0)]

    def names(self, *keys: str | int) -> list[str]:
        """Return the keys of the map."""
        value = self.peek(*keys)
        return list(value) if isinstance(value, dict) else []

    def note(self, why: str, value: object = None) -> None:
        """Report this part as not carried, and count it as dealt with."""
        self.taken.add(self.base)
        text = shown(self.peek() if value is None else value)
        self.notes.append(Unconverted(dotted(self.base), text, why, self.document.line_of(self.base)))

    def note_given(self, reasons: Mapping[str, str]) -> None:
        """Report each of these keys that is set, dotted below this part, with its reason."""
        for key, why in reasons.items():
            part = self.at(*key.split("."))
            if part.peek() is not None:
                part.note(why)

    def note_keys(self, why: str) -> None:
        """Report each key of this map that is neither carried nor reported yet."""
        for key in self.names():
            path = (*self.base, key)
            if not any(path == taken[: len(path)] for taken in self.taken):
                self.at(key).note(why)

    def refuse(self, message: str) -> None:
        """Report this part as what no graph can express."""
        self.problems.append(self.document.problem(self.base, message))

    def note_rest(self) -> None:
        """Report every value that was not read; null is a key that is not set."""
        for path, value in leaves(self.document.value):
            if value is not None and not any(path[:length] in self.taken for length in range(len(path) + 1)):
                self.at(*path).note("has no counterpart here", value)


def _taken(part: ManifestSource, empty: _Kind, name: str) -> _Kind:
    value = part.take()
    if value is None or isinstance(value, type(empty)):
        return empty if value is None else value
    part.note(f"is not {name}, so it was left out")
    return empty


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each value that is not a map and no list, or an empty one, with its path."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value
