"""Suggests the known word that a misspelt one was probably meant to be. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean WORD?`` with the known word that is most similar; an empty string if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
