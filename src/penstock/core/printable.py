"""Text that came from files and peers, as a terminal may get it. Pure."""

from __future__ import annotations

import re
from typing import Final, TypeVar

_Plain = TypeVar("_Plain")

_HIDDEN: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, which move the cursor or begin a sequence, and marks that turn the text's direction."""


def printable(value: _Plain) -> _Plain:
    r"""Return plain data whose strings, keys included, show control characters by their escapes, such as ``\x1b``."""
    found: object = value
    if isinstance(value, str):
        found = _HIDDEN.sub(lambda each: each[0].encode("unicode_escape").decode(), value)
    elif isinstance(value, dict):
        found = {printable(key): printable(each) for key, each in value.items()}
    elif isinstance(value, list):
        found = [printable(each) for each in value]
    return found  # type: ignore[return-value]  # of the type that was given
