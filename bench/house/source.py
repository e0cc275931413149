"""Counts of the source: lines, settings-like and namesake classes, import circles, long files and functions, and more."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

PRODUCT = ("src", "operator", "planner")
"""The folders of import packages; each is on the import path of an editable installation."""

SETTINGS = re.compile(r"(Config|Settings|Spec|Options|Plan|Facts)$")
DECLARATIONS = {
    "field of an API model": ("entry",),
    "field of a dataclass": ("flag", "time_scale"),
    "field of the planner's options": ("_declared",),
    "field of another model": ("Field",),
    "option of a command": ("option", "argument"),
}
"""The ways to declare a setting, each with the functions that do; those of click are a decorator's."""

FILE_LINES = 500
FUNCTION_LINES = 61


class Source:
    """The Python files below the folders of one checkout."""

    def __init__(self, root: Path, *folders: str) -> None:
        self.root = root
        self._paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        """Each file's syntax tree."""
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in self._paths}

    def lines(self, depth: int) -> dict[str, int]:
        """Return the lines below each folder, named by its first ``depth`` parts."""
        counted: Counter[str] = Counter()
        for path in self._paths:
            parts = path.relative_to(self.root).parent.parts[:depth]
            counted["/".join(parts)] += path.read_text(encoding="utf-8").count("\n")
        return dict(sorted(counted.items()))

    def classes(self, ending: re.Pattern[str]) -> list[str]:
        """Return ``file:class`` of the classes whose name ends so."""
        return [
            f"{path.relative_to(self.root)}:{node.name}"
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and ending.search(node.name)
        ]

    def declarations(self) -> dict[str, int]:
        """Return how many settings each way to declare one declares."""
        called = Counter(
            _called(node)
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
        )
        return {title: sum(called[name] for name in names) for title, names in DECLARATIONS.items()}

    def writes(self) -> list[str]:
        """Return ``file:line`` of assignments to an attribute of one of a function's parameters."""
        return [
            f"{path.relative_to(self.root)}:{target.lineno}"
            for path, tree in self.trees.items()
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AugAssign)
            for target in _targets(node)
            if isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id in _parameters(function)
        ]

    def namesakes(self) -> dict[str, int]:
        """Return the names that several classes have, and how many."""
        names = Counter(
            node.name
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        )
        return {name: count for name, count in sorted(names.items()) if count > 1}

    def backoffs(self) -> list[str]:
        """Return ``file:line`` of what doubles up to a limit: ``min`` of a power of two, or of twice a name."""
        return [
            f"{path.relative_to(self.root)}:{node.lineno}"
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and _called(node) == "min"
            and any(_doubles(each) for argument in node.args for each in ast.walk(argument))
        ]

    def long_files(self) -> list[str]:
        """Return the files of more than `FILE_LINES`."""
        return [
            str(path.relative_to(self.root))
            for path in self._paths
            if path.read_text(encoding="utf-8").count("\n") > FILE_LINES
        ]

    def long_functions(self) -> list[str]:
        """Return ``file:function`` of the functions of more than `FUNCTION_LINES`."""
        return [
            f"{path.relative_to(self.root)}:{node.name}"
            for path, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
        ]

    def pokes(self) -> int:
        """Return how often a private attribute of something other than ``self`` or ``cls`` is used."""
        return sum(_is_poke(node) for tree in self.trees.values() for node in ast.walk(tree))

    def sleeps(self) -> int:
        """Return the calls of a function named ``sleep`` with more than zero seconds."""
        return sum(_is_sleep(node) for tree in self.trees.values() for node in ast.walk(tree))

    def circles(self) -> list[list[str]]:
        """Return the groups of files that import each other, directly or by way of others."""
        names = {_module(path.relative_to(self.root)): path for path in self._paths}
        edges = {
            name: {each for each in _imports(self.trees[path], names) if each != name}
            for name, path in names.items()
        }
        return sorted(sorted(group) for group in components(edges) if len(group) > 1)


def _doubles(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp):
        return False
    if isinstance(node.op, ast.Pow):
        return isinstance(node.left, ast.Constant) and node.left.value == 2
    twice = isinstance(node.right, ast.Constant) and node.right.value == 2
    return isinstance(node.op, ast.Mult) and twice and isinstance(node.left, ast.Name)


def _targets(node: ast.Assign | ast.AugAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}


def _is_poke(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        owned = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        return _is_private(node.attr) and not owned
    return (
        isinstance(node, ast.Call)
        and _called(node) in {"setattr", "getattr", "delattr"}
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        and _is_private(str(node.args[1].value))
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_sleep(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and _called(node) == "sleep" and node.args):
        return False
    return not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")


def _imports(tree: ast.Module, names: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere; a name that is not a module counts for its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            for each in node.names:
                below = f"{node.module}.{each.name}"
                yield below if below in names else node.module


def components(edges: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components: nodes that reach each other. Source: Kosaraju's algorithm."""
    backwards: dict[str, set[str]] = {node: set() for node in edges}
    for node, targets in edges.items():
        for each in targets:
            backwards[each].add(node)
    order: list[str] = []
    left = set(edges)
    while left:
        order += _finished(next(iter(left)), edges, left)
    left = set(edges)
    return [set(_finished(node, backwards, left)) for node in reversed(order) if node in left]


def _finished(start: str, edges: dict[str, set[str]], left: set[str]) -> list[str]:
    """Return the nodes of ``left`` that are reached, each behind those that it reaches; take them out of ``left``."""
    found: list[str] = []
    left.discard(start)
    walk = [(start, iter(edges[start]))]
    while walk:
        node, targets = walk[-1]
        following = next((each for each in targets if each in left), None)
        if following is None:
            found.append(node)
            walk.pop()
        else:
            left.discard(following)
            walk.append((following, iter(edges[following])))
    return found
