"""Makes text from files and peers safe to print on a terminal. Pure."""

from __future__ import annotations

import re
from typing import Final, TypeVar

_Plain = TypeVar("_Plain")

_HIDDEN: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Matches control characters, which move the cursor or start an escape sequence, and marks that change the text
direction."""


_HIDDEN_IN_LINES: Final = re.compile(r"(?![\n\t])" + _HIDDEN.pattern)
_HIDDEN_IN_JSON: Final = re.compile(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Matches the characters of `_HIDDEN` that a JSON encoder does not escape."""


def printable_lines(text: str) -> str:
    r"""Return ``text`` with control characters, except line ends and tabs, replaced by escapes such as ``\x1b``."""
    return _HIDDEN_IN_LINES.sub(_escaped, text)


def printable_json(text: str) -> str:
    r"""Return an equivalent JSON text in which control characters are escaped, such as ``\u009b``."""
    return _HIDDEN_IN_JSON.sub(lambda each: f"\\u{ord(each[0]):04x}", text)


def _escaped(each: re.Match[str]) -> str:
    return each[0].encode("unicode_escape").decode()


def printable(value: _Plain) -> _Plain:
    r"""Return a copy of plain data in which the control characters of all strings, including keys, are escaped, such as ``\x1b``."""
    found: object = value
    if isinstance(value, str):
        found = _HIDDEN.sub(_escaped, value)
    elif isinstance(value, dict):
        found = {printable(key): printable(each) for key, each in value.items()}
    elif isinstance(value, list):
        found = [printable(each) for each in value]
    return found  # type: ignore[return-value]  # same type as the argument
