"""A validation error becomes a sentence: value, bound and remedy.

Called by `penstock.api.manifests.loading`; pure.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sized
from typing import Any

from penstock.api.base import (
    DNS_LABEL_PATTERN,
    ENV_NAME_PATTERN,
    PROFILE_NAME_PATTERN,
    SERVED_NAME_PATTERN,
    SpecModel,
)
from penstock.api.fields import keys_of, model_at, walk
from penstock.api.rule import KeyPath

MAX_VALUE_CHARS = 60
"""A longer value is cut in a message."""

_PATTERNS = {
    DNS_LABEL_PATTERN: "lower-case letters, digits and inner hyphens (a DNS label)",
    ENV_NAME_PATTERN: "letters, digits and underscores, not starting with a digit",
    PROFILE_NAME_PATTERN: "lower-case letters, digits, dots, hyphens and underscores",
    SERVED_NAME_PATTERN: "letters, digits and . _ : / -, starting with a letter or digit",
    r"^https?://\S+$": "an address such as http://prometheus:9090",
    r"^/.*$": "an absolute path such as /models",
    r"^[A-Za-z0-9-]+$": "letters, digits and hyphens",
}

_SECTION = ("a map of keys", "indent its keys below it, or remove it for the defaults")
_INTEGER = ("a whole number", "write one such as 8, without quotes or fraction")
_WRONG_TYPES = {
    "int_type": _INTEGER,
    "int_from_float": _INTEGER,
    "float_type": ("a number", "write one such as 0.5, without quotes"),
    "bool_type": ("true or false", "write true or false, without quotes"),
    "string_type": ("text", "put it in quotes"),
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
    "dict_type": _SECTION,
    "tuple_type": ("a list", "write each item on a line that starts with a hyphen"),
}
"""What is needed and the remedy, by pydantic's type of error."""

_TEXTS = {
    "greater_than_equal": "{shown} is too small; it must be at least {ge:g}",
    "greater_than": "{shown} is too small; it must be above {gt:g}",
    "less_than_equal": "{shown} is too large; it must be at most {le:g}",
    "less_than": "{shown} is too large; it must be below {lt:g}",
    "finite_number": "{shown} is not finite; write an ordinary number",
    "string_too_long": "{shown} has {count} characters, at most {max_length} are allowed; shorten it",
    "string_too_short": "{shown} is too short, at least {min_length} is needed; write it out",
    "too_long": "{count} entries, at most {max_length} are allowed; remove some",
    "too_short": "{count} entries, at least {min_length} is needed; add one",
}
"""Sentences likewise."""


def shown(value: object) -> str:
    """Return ``value`` as a manifest would write it, shortened; never a whole section."""
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def message_of(error: Mapping[str, Any], root: type[SpecModel]) -> str:
    """Return the sentence for one of pydantic's errors."""
    kind: str = error["type"]
    path: KeyPath = error["loc"]
    if kind in {"missing", "extra_forbidden"}:
        return (_missing if kind == "missing" else _unknown)(path, root)
    value, ctx = error["input"], error.get("ctx", {})
    if kind in _WRONG_TYPES:
        expected, remedy = _WRONG_TYPES[kind]
        if kind == "string_type" and isinstance(value, dict | list):
            remedy = "write text"
        return f"{'nothing' if value is None else shown(value)} where {expected} is needed; {remedy}"
    if kind in _TEXTS:
        count = len(value) if isinstance(value, Sized) else 0
        return _TEXTS[kind].format(shown=shown(value), count=count, **ctx)
    if kind in {"enum", "literal_error"}:
        return _choice(value, ctx)
    what = f"{shown(value)}: {error['msg']}"
    if kind == "string_pattern_mismatch":
        pattern = ctx["pattern"]
        what = f"{shown(value)} does not fit; use {_PATTERNS.get(pattern, f'text that matches {pattern}')}"
    return what


def suggestion(word: str, known: list[str]) -> str | None:
    """Return the entry of ``known`` that ``word`` probably meant, or None."""
    by_bare = {_bare(each): each for each in known}
    close = difflib.get_close_matches(_bare(word), list(by_bare), n=1, cutoff=0.75)
    return by_bare[close[0]] if close else None


def _bare(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def _missing(path: KeyPath, root: type[SpecModel]) -> str:
    parent = model_at(root, path[:-1])
    info = keys_of(parent).get(str(path[-1])) if parent is not None else None
    description = f": {info.description}" if info is not None and info.description else ""
    return f"missing{description.rstrip('.')}; add it"


def _unknown(path: KeyPath, root: type[SpecModel]) -> str:
    key = str(path[-1])
    parent = model_at(root, path[:-1])
    known = list(keys_of(parent)) if parent is not None else []
    close = suggestion(key, known)
    if close is not None:
        return f"unknown key; did you mean {close}?"
    places = [entry.path for entry in walk(root) if entry.path.rpartition(".")[2].removesuffix("[]") == key]
    if places:
        return f"unknown key here; it belongs at {' or '.join(places[:3])}"
    return f"unknown key; remove it (known here: {', '.join(known)})"


def _choice(value: object, ctx: Mapping[str, Any]) -> str:
    allowed = [word.strip("'") for word in str(ctx["expected"]).replace(" or ", ", ").split(", ")]
    close = suggestion(value, allowed) if isinstance(value, str) else None
    remedy = f"did you mean {close}?" if close else "choose one of them"
    return f"{shown(value)} is not one of {', '.join(allowed)}; {remedy}"
