"""Conversion of others' objects to graphs, by the importer that a distribution registers under their kind. Pure.

An entry point of group `GROUP` is named after the foreign ``kind`` or, for Helm values, which have none, after a top-level key that only
those values have. It is a function as of `Importer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast

from penstock.api.graph import GraphDeployment
from penstock.api.manifests.nodes import read_documents
from penstock.core.errors import ConfigError, InvalidSpecError, ManifestProblem
from penstock.core.plugins import load, registered

GROUP: Final = "penstock.importers"


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


@dataclass(frozen=True, slots=True)
class ImportResult:
    """A converted graph, valid by the API's rules, and what it does not carry, in the order of lines."""

    graph: GraphDeployment
    unconverted: tuple[Unconverted, ...]


class Importer(Protocol):
    """Converts the one object of its kind in a text, or the one of a name."""

    def __call__(self, text: str, file: str | None = None, *, name: str | None = None) -> ImportResult:
        """Return the graph; raise `InvalidSpecError` for what no graph can express."""
        ...


def is_importable(kind: object) -> bool:
    """Return whether an installed distribution converts objects of a kind."""
    return isinstance(kind, str) and kind in registered(GROUP)


def import_graph(text: str, file: str | None = None, *, name: str | None = None) -> ImportResult:
    """Convert the one object of ``text`` that an installed importer knows.

    Args:
        text: YAML; other objects in it are reported, since a graph does not hold them.
        file: Name to put into problems.
        name: Of the object, where there are several of its kind; None: there is one.

    Raises:
        ConfigError: no importer is installed, or one cannot be imported.
        InvalidSpecError: there is no object to convert, several kinds of them, or none that a graph can express.
    """
    known = tuple(registered(GROUP))
    if not known:
        raise ConfigError(f"{GROUP}: none is installed; install penstock again")
    documents, problems = read_documents(text, file)
    held = {mark for each in documents if isinstance(each.value, dict) for mark in _marks(each.value)}
    found = [kind for kind in known if kind in held]
    if not problems and len(found) != 1:
        message = f"holds {' and '.join(found) or 'no'} object that can be converted; give a file with one of {', '.join(known)}"
        problems = [ManifestProblem("", message, file)]
    if problems:
        raise InvalidSpecError(problems)
    return cast(Importer, load(GROUP, found[0], kind="importer"))(text, file, name=name)


def _marks(value: Mapping[str, object]) -> set[object]:
    """Return what an importer of a document is named after."""
    return {value["kind"]} if "kind" in value else set(value)
