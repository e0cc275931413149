"""Text that came from files and peers, as a terminal may get it. Pure."""

from __future__ import annotations

import re
from typing import Final, TypeVar

_Plain = TypeVar("_Plain")

_HIDDEN: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, which move the cursor or begin a sequence, and marks that turn the text's direction."""


_HIDDEN_IN_LINES: Final = re.compile(r"(?![\n\t])" + _HIDDEN.pattern)
_HIDDEN_IN_JSON: Final = re.compile(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What an encoder leaves as it is."""


def printable_lines(text: str) -> str:
    r"""Return text whose control characters but line ends and tabs are shown by their escapes, such as ``\x1b``."""
    return _HIDDEN_IN_LINES.sub(_escaped, text)


def printable_json(text: str) -> str:
    r"""Return a JSON text that says the same, control characters by its own escapes, such as ``\u009b``."""
    return _HIDDEN_IN_JSON.sub(lambda each: f"\\u{ord(each[0]):04x}", text)


def _escaped(each: re.Match[str]) -> str:
    return each[0].encode("unicode_escape").decode()


def printable(value: _Plain) -> _Plain:
    r"""Return plain data whose strings, keys included, show control characters by their escapes, such as ``\x1b``."""
    found: object = value
    if isinstance(value, str):
        found = _HIDDEN.sub(_escaped, value)
    elif isinstance(value, dict):
        found = {printable(key): printable(each) for key, each in value.items()}
    elif isinstance(value, list):
        found = [printable(each) for each in value]
    return found  # type: ignore[return-value]  # of the type that was given
