"""A foreign manifest that remembers which of its values were carried over.

What is not read is reported at the end, so no key can be dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.api.manifests.messages import shown
from penstock.api.manifests.nodes import Document
from penstock.api.rule import KeyPath, dotted
from penstock.core.errors import Problem

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
class Places:
    """Where the parts of a rearranged manifest stood in the user's own."""

    _moves: list[tuple[KeyPath, KeyPath]] = field(default_factory=list)

    def moved(self, new: KeyPath, old: KeyPath) -> None:
        """Record that what lies at or below ``new`` stood at or below ``old``."""
        self._moves.append((new, old))

    def origin(self, path: KeyPath) -> KeyPath:
        """Return where the value at ``path`` stood, by the longest part of the path that was moved."""
        fitting = [(new, old) for new, old in self._moves if path[: len(new)] == new]
        new, old = max(fitting, key=lambda each: len(each[0]), default=((), ()))
        return (*old, *path[len(new) :])


@dataclass(slots=True)
class ManifestSource:
    """One document, and what has been taken from it so far.

    Attributes:
        document: As the user wrote it.
        value: The manifest in the form that is read.
        places: Where its parts stand in the document.
        file: Its name in problems.
        taken: Paths that were carried.
        notes: What was not.
        problems: Why it cannot be converted at all.
    """

    document: Document
    value: Any
    places: Places = field(default_factory=Places)
    file: str | None = None
    taken: set[KeyPath] = field(default_factory=set)
    notes: list[Unconverted] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def peek(self, path: KeyPath) -> Any:
        """Return the value at ``path`` without taking it; None if there is none."""
        value: Any = self.value
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
        return self.peek(path)

    def take_map(self, path: KeyPath) -> dict[str, Any]:
        """Return the map at ``path``, carried; empty if there is none, noted if it is no map."""
        return self._take_kind(path, {}, "a map")

    def take_list(self, path: KeyPath) -> list[Any]:
        """Return the list at ``path``, carried; empty if there is none, noted if it is no list."""
        return self._take_kind(path, [], "a list")

    def word(self, path: KeyPath) -> str | None:
        """Return the text at ``path`` without taking it; None if there is none, or no text."""
        value = self.peek(path)
        return value if isinstance(value, str) else None

    def length(self, path: KeyPath) -> int:
        """Return the length of the list at ``path``; 0 if there is none, or no list."""
        value = self.peek(path)
        return len(value) if isinstance(value, list) else 0

    def keys(self, path: KeyPath) -> list[str]:
        """Return the keys of the map at ``path``."""
        value = self.peek(path)
        return list(value) if isinstance(value, dict) else []

    def note(self, path: KeyPath, why: str, value: object = None) -> None:
        """Report the value at ``path`` as not carried, and count it as dealt with."""
        self.taken.add(path)
        text = shown(self.peek(path) if value is None else value)
        origin = self.places.origin(path)
        self.notes.append(Unconverted(dotted(origin), text, why, self.document.line_of(origin)))

    def note_keys(self, path: KeyPath, why: str) -> None:
        """Report each key of the map at ``path`` that is neither carried nor reported yet."""
        for key in self.keys(path):
            if not any(path == taken[: len(path)] and key in taken[len(path) :][:1] for taken in self.taken):
                self.note((*path, key), why)

    def refuse(self, path: KeyPath, message: str) -> None:
        """Report the value at ``path`` as what no graph can express."""
        origin = self.places.origin(path)
        self.problems.append(Problem(dotted(origin), message, self.file, self.document.line_of(origin)))

    def note_rest(self) -> None:
        """Report every value that was not read; null is a key that is not set."""
        for path, value in leaves(self.value):
            if value is not None and not any(path[:length] in self.taken for length in range(len(path) + 1)):
                self.note(path, NO_COUNTERPART, value)

    def _take_kind(self, path: KeyPath, empty: _Kind, name: str) -> _Kind:
        value = self.peek(path)
        if value is None:
            self.taken.add(path)
            return empty
        if not isinstance(value, type(empty)):
            self.note(path, f"is not {name}, so it was left out")
            return empty
        self.taken.add(path)
        return value


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each value that is no map and no list, or an empty one, with its path."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value
