"""YAML text becomes plain data that still knows the line of every key.

Bounded in size, depth and alias expansion; duplicate keys, foreign tags and keys that are not text are reported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.api.rule import KeyPath, dotted
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.core.files import open_file
from penstock.core.safe_yaml import LOADER

MAX_FILE_BYTES = 1 << 20
"""1 MiB; Kubernetes' own store refuses objects of more than 1.5 MiB."""


STDIN: Final = "-"
"""As a file's name: standard input."""


def read_text(path: Path) -> str:
    """Return the text of a manifest file, or of standard input for ``-``.

    Raises:
        InvalidSpecError: The file is missing, unreadable, a folder, too large or not UTF-8.
    """
    try:
        if str(path) == STDIN:
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with open_file(path) as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _refusal(path, "there is no such file; check the path") from None
    except IsADirectoryError:
        raise _refusal(path, "is a folder; name the manifest file in it") from None
    except (OSError, ValueError) as exc:
        raise _refusal(path, f"cannot be read: {exc}; check its name and permissions") from exc
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(path, f"is larger than {MAX_FILE_BYTES} bytes; no manifest needs that")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        message = f"byte {exc.start} (0x{data[exc.start]:02x}) is not UTF-8; save the file as UTF-8"
        raise InvalidSpecError(
            [ManifestProblem(path="", message=message, file=str(path), line=line)]
        ) from exc


def _refusal(path: Path, message: str) -> InvalidSpecError:
    return InvalidSpecError([ManifestProblem(path="", message=message, file=str(path))])


MAX_NODES = 100_000
"""Scalars, lists and maps of one file after expansion of aliases; a large real graph has about 500."""

MAX_DEPTH = 64
"""Nesting; the API's own depth is 7 and a pod template's below 20."""

_NULL_TAG = "tag:yaml.org,2002:null"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_STRING_TAG = "tag:yaml.org,2002:str"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document.

    Attributes:
        value: Plain data: dict, list, str, int, float, bool or None.
        lines: 1-based line of each key and list item, by path; the root's at ().
        findings: What is wrong with the text itself.
        file: Its name in problems.
    """

    value: Any
    lines: Mapping[KeyPath, int]
    findings: tuple[ManifestProblem, ...]
    file: str | None = None

    def line_of(self, path: KeyPath) -> int:
        """Return the line of ``path``, or of its nearest ancestor that the text holds."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def problem(self, path: KeyPath, message: str) -> ManifestProblem:
        """Return what is wrong at ``path``, with its place."""
        return ManifestProblem(dotted(path), message, self.file, self.line_of(path))


class _LimitError(Exception):
    """The document is larger than any manifest."""


def read_documents(text: str, file: str | None = None) -> tuple[list[Document], list[ManifestProblem]]:
    """Return the documents of ``text`` and what ended the reading early, if anything did.

    Documents before a syntax error are returned; empty documents are skipped.
    """
    documents: list[Document] = []
    try:
        _check_depth(text)
        documents.extend(  # what comes before an error stays
            _Builder(file).document(node)
            for node in yaml.compose_all(text, Loader=LOADER)
            if node.value or node.tag != _NULL_TAG
        )
    except _LimitError as exc:
        line, message = 1, str(exc)
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        message = f"malformed YAML: {exc.reason}; remove the character"
    except yaml.MarkedYAMLError as exc:
        mark: Any = exc.problem_mark  # PyYAML gives every such error one
        line = mark.line + 1
        # libyaml names the tab only where it breaks an indentation that is already known.
        before = text.split("\n")[mark.line : mark.line + 1]
        is_tab = "tab character" in str(exc.problem) or any(
            "\t" in each[: mark.column + 1] for each in before
        )
        remedy = "replace the tab by spaces" if is_tab else "check indentation, colons and quotes"
        what = f"{exc.problem}; {remedy}"
        message = f"malformed YAML at column {mark.column + 1}: {what}"
    else:
        return documents, []
    return documents, [ManifestProblem("", message, file, line)]


def _check_depth(text: str) -> None:
    depth = 0
    with contextlib.suppress(yaml.YAMLError):  # documents before it are read all the same
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise _LimitError(f"nested deeper than {MAX_DEPTH} levels; no manifest needs that")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1


@dataclass(slots=True)
class _Builder:
    file: str | None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    findings: list[ManifestProblem] = field(default_factory=list)
    nodes_left: int = MAX_NODES
    open_nodes: set[int] = field(default_factory=set)
    scalars: yaml.constructor.SafeConstructor = field(default_factory=yaml.constructor.SafeConstructor)

    def document(self, node: yaml.Node) -> Document:
        self.lines[()] = _line(node)
        value = self._build(node, ())
        return Document(value, self.lines, tuple(self.findings), self.file)

    def _build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise _LimitError(
                f"more than {MAX_NODES} values once aliases are expanded; no manifest needs that"
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open_nodes:
            message = "alias to a value that contains it; write the value out"
            self._find(node, path, message, line=self.lines.get(path))
            return None
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            self.lines |= {(*path, index): _line(child) for index, child in enumerate(node.value)}
            return [self._build(child, (*path, index)) for index, child in enumerate(node.value)]
        finally:
            self.open_nodes.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag == _TIMESTAMP_TAG:
            return node.value
        try:
            value = self.scalars.construct_object(node)
        except yaml.YAMLError:
            self._find(node, path, f"tag {node.tag} is not known; use plain values")
            return None
        except ValueError:
            self._find(
                node,
                path,
                f"{node.value!r} is not a valid {node.tag.rpartition(':')[2]}; correct or quote it",
            )
            return None
        if isinstance(value, bytes):
            self._find(node, path, "binary data has no place here; use text")
            return None
        return value

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        result: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                merged |= self._merge(value_node, path)
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            below = (*path, key)
            if key in first_lines:
                message = f"the key is there already at line {first_lines[key]}; remove one of the two"
                self._find(key_node, below, message)
                continue
            first_lines[key] = _line(key_node)
            self._forget(below)
            self.lines[below] = _line(key_node)
            result[key] = self._build(value_node, below)
        return {**merged, **result}

    def _merge(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in reversed(sources):
            if not isinstance(source, yaml.MappingNode):
                self._find(source, path, "`<<` merges maps only; give it an alias of a map")
                continue
            merged |= self._build(source, path) or {}  # none of an alias to what contains it
        return merged

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._find(node, path, "a key must be text, not a list or map")
            return None
        if node.tag != _STRING_TAG:
            self._find(node, (*path, node.value), f"the key {node.value} is not text to YAML; quote it")
        text: str = node.value
        return text

    def _forget(self, path: KeyPath) -> None:
        """Drop the lines of a merged value that an explicit key replaces."""
        if path in self.lines:
            for known in [each for each in self.lines if each[: len(path)] == path]:
                del self.lines[known]

    def _find(self, node: yaml.Node, path: KeyPath, message: str, *, line: int | None = None) -> None:
        self.findings.append(ManifestProblem(dotted(path), message, self.file, line or _line(node)))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
