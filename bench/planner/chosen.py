"""The chosen values of mode adaptive: each number above a docstring that begins with "Chosen"; read from the source, with no copy.

What refers to another constant is derived, and none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

PACKAGES = tuple(f"penstock_planner.decide.{each}" for each in ("demand", "objective", "policies.adaptive"))
BESIDE = ("penstock_planner.decide.capacity.decoding", "penstock_planner.decide.capacity.observed")

_Assign: TypeAlias = ast.Assign | ast.AnnAssign


@dataclass(frozen=True, slots=True)
class Value:
    """One chosen number.

    Attributes:
        module: Its module's full name.
        name: Its constant.
        part: Its place or name within the constant; empty: it is all of it.
        number: As it is.
    """

    module: str
    name: str
    part: str
    number: float

    @property
    def label(self) -> str:
        """Return what a reader finds it by."""
        return self.name + (f".{self.part}" if self.part else "")

    def times(self, factor: float) -> float:
        """Return the number times a factor, in its range: a share is at most 1, a count whole and at least 1.

        What lies between 0 and 1 is a share, except for a number of standard errors.
        """
        number = self.number * factor
        if isinstance(self.number, int):
            return max(1, round(number))
        is_share = 0 < self.number < 1 and "SIGMAS" not in self.label.upper()
        return min(1.0, number) if is_share else number


def chosen_values() -> list[Value]:
    """Return all of them, by module and place, without importing the planner."""
    return [
        value
        for module, file in _modules()
        for value in values_in(file.read_text(encoding="utf-8"), module=module)
    ]


def values_in(source: str, *, module: str = "") -> list[Value]:
    """Return the chosen numbers of one module's source: each of a constant's, and those of constants directly above."""
    found = []
    for each in _constants(ast.parse(source)):
        target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
        for part, node in _numbers(each):
            number = eval(compile(ast.Expression(node), module, "eval"), {})
            found.append(Value(module, ast.unparse(target), part, number))
    return found


def with_number(source: str, value: Value, number: float) -> ast.Module:
    """Return a module's syntax with another number in the value's place."""
    tree = ast.parse(source)
    for each in _constants(tree):
        target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
        for part, node in _numbers(each):
            if (ast.unparse(target), part) == (value.name, value.part):
                return ast.fix_missing_locations(_Replaced(node, number).visit(tree))
    raise KeyError(value.label)


class _Replaced(ast.NodeTransformer):
    def __init__(self, node: ast.expr, number: float) -> None:
        self._node, self._number = node, number

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._node:
            return ast.Constant(self._number)
        return self.generic_visit(node)


def _modules() -> Iterator[tuple[str, Path]]:
    for name in PACKAGES:
        package = find_spec(name)
        assert package is not None, name
        for folder in package.submodule_search_locations or []:
            for file in sorted(Path(folder).glob("*.py")):
                yield f"{name}.{file.stem}", file
    for module in BESIDE:
        spec = find_spec(module)
        assert spec is not None, module
        assert spec.origin is not None, module
        yield module, Path(spec.origin)


def _constants(tree: ast.Module) -> Iterator[_Assign]:
    """Yield the constants that a docstring beginning with "Chosen" follows, those directly above them included."""
    above: list[_Assign] = []
    last = 0
    for node in tree.body:
        above = above if node.lineno == last + 1 else []
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.Assign | ast.AnnAssign):
            above.append(node)
            continue
        words = (
            node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
        )
        yield from above if str(words).startswith("Chosen") else []
        above = []


def _numbers(constant: _Assign) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parts of a constant that are numbers of their own."""
    for part, node in _parts(constant.value):
        if not any(isinstance(each, ast.Name) for each in ast.walk(node)):
            yield part, node


def _parts(value: ast.expr | None) -> Iterator[tuple[str, ast.expr]]:
    match value:
        case ast.Tuple(elts=elements):
            yield from ((str(place), each) for place, each in enumerate(elements))
        case ast.Dict(keys=keys, values=values):
            yield from (
                (ast.unparse(key) if key else "", each) for key, each in zip(keys, values, strict=True)
            )
        case ast.Call(keywords=keywords):
            yield from ((each.arg or "", each.value) for each in keywords)
        case ast.expr():
            yield "", value
