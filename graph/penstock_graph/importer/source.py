"""A foreign manifest that remembers which of its values were carried over.

What nobody took is reported at the end, so no key can be dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock_graph.loading.messages import shown
from penstock_graph.loading.nodes import Document
from penstock_graph.models.base import KeyPath, dotted

_Kind = TypeVar("_Kind", dict[str, Any], list[Any])

NO_COUNTERPART = "has no counterpart here"


@dataclass(frozen=True, slots=True)
class Unconverted:
    """A value that the conversion could not carry, or not as it stood.

    Attributes:
        path: Key path in the foreign manifest.
        value: The value, shortened.
        why: The reason, and what to do about it.
        line: 1-based, or None when unknown.
    """

    path: str
    value: str
    why: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        return f"{place}{self.path}: {self.value}: {self.why}"


@dataclass(slots=True)
class Source:
    """One document, and what has been taken from it so far."""

    document: Document
    taken: set[KeyPath] = field(default_factory=set)
    notes: list[Unconverted] = field(default_factory=list)

    def look(self, path: KeyPath) -> Any:
        """Return the value at ``path`` without taking it; None if there is none."""
        value: Any = self.document.value
        for key in path:
            if isinstance(value, dict):
                value = value.get(str(key))
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return None
        return value

    def take(self, path: KeyPath) -> Any:
        """Return the value at ``path`` and count all of it as carried."""
        self.taken.add(path)
        return self.look(path)

    def take_map(self, path: KeyPath) -> dict[str, Any]:
        """Return the map at ``path``, carried; empty if there is none, noted if it is no map."""
        return self._take_kind(path, {}, "a map")

    def take_list(self, path: KeyPath) -> list[Any]:
        """Return the list at ``path``, carried; empty if there is none, noted if it is no list."""
        return self._take_kind(path, [], "a list")

    def keys(self, path: KeyPath) -> list[str]:
        """Return the keys of the map at ``path``."""
        value = self.look(path)
        return list(value) if isinstance(value, dict) else []

    def note(self, path: KeyPath, why: str, value: object = None) -> None:
        """Report the value at ``path`` as not carried, and count it as dealt with."""
        self.taken.add(path)
        text = shown(self.look(path) if value is None else value)
        self.notes.append(Unconverted(dotted(path), text, why, self.document.line_of(path)))

    def note_rest(self) -> None:
        """Report every value that nobody took."""
        for path, value in _leaves(self.document.value, ()):
            if not any(path[:length] in self.taken for length in range(len(path) + 1)):
                self.note(path, NO_COUNTERPART, value)

    def _take_kind(self, path: KeyPath, empty: _Kind, name: str) -> _Kind:
        value = self.look(path)
        if value is None:
            self.taken.add(path)
            return empty
        if not isinstance(value, type(empty)):
            self.note(path, f"is not {name}, so it was left out")
            return empty
        self.taken.add(path)
        return value


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
