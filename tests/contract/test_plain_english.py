"""Texts for people follow the rules of styles/Penstock, which Vale and editors read as well."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = [
    (re.compile(phrase, re.IGNORECASE if rule["ignorecase"] else 0), instead)
    for path in sorted((ROOT / "styles/Penstock").glob("*.yml"))
    for rule in [yaml.safe_load(path.read_text(encoding="utf-8"))]
    for phrase, instead in rule["swap"].items()
]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "operator/*.md", "planner/*.md", "charts/**/*.md")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def _literals(path: Path) -> Iterator[str]:
    """Yield the texts of a module: help, descriptions, messages and docstrings; values in f-strings become X."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in ast.walk(node)}
    for node in joined:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and " " in str(node.value) and id(node) not in parts:
            yield str(node.value)


@pytest.mark.parametrize("group", [*PAGES, "src/**/*.py", "operator/**/*.py", "planner/**/*.py"])
def test_texts_use_plain_phrases(group: str) -> None:
    """A phrase of the table is named with its place and with what to write instead."""
    found = []
    for path in sorted(ROOT.glob(group)):
        texts = _literals(path) if path.suffix == ".py" else [CODE.sub("", path.read_text(encoding="utf-8"))]
        for text in (" ".join(each.split()) for each in texts):
            for phrase, instead in RULES:
                found += [
                    f"{path.relative_to(ROOT)}: '{text[max(0, hit.start() - 30) : hit.end() + 20]}': write {instead}"
                    for hit in phrase.finditer(text)
                ]

    assert found == []


def test_the_rules_are_read_and_find_a_phrase() -> None:
    """Without the folder of rules, or of pages, nothing could ever be found."""
    assert [instead for phrase, instead in RULES if phrase.search("The stream goes on elsewhere.")]
    assert all(any(ROOT.glob(group)) for group in PAGES)
