"""A validation error becomes a sentence: value, bound and remedy.

Called by `penstock.api.manifests.loading`; pure.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sized
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
    if kind == "missing":
        return _missing(path, root)
    if kind == "extra_forbidden":
        return _unknown(path, root)
    writer = _WRITERS.get(kind)
    if writer is None:
        return f"{shown(error['input'])}: {error['msg']}"
    return writer(error["input"], error.get("ctx", {}))


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


def _least(value: object, ctx: Mapping[str, Any]) -> str:
    bound = f"at least {ctx['ge']:g}" if "ge" in ctx else f"above {ctx['gt']:g}"
    return f"{shown(value)} is too small; it must be {bound}"


def _most(value: object, ctx: Mapping[str, Any]) -> str:
    bound = f"at most {ctx['le']:g}" if "le" in ctx else f"below {ctx['lt']:g}"
    return f"{shown(value)} is too large; it must be {bound}"


def _integer(value: object, _: Mapping[str, Any]) -> str:
    return _wrong_type(value, "a whole number", "write one such as 8, without quotes or fraction")


def _number(value: object, _: Mapping[str, Any]) -> str:
    return _wrong_type(value, "a number", "write one such as 0.5, without quotes")


def _finite(value: object, _: Mapping[str, Any]) -> str:
    return f"{shown(value)} is not finite; write an ordinary number"


def _flag(value: object, _: Mapping[str, Any]) -> str:
    return _wrong_type(value, "true or false", "write true or false, without quotes")


def _text(value: object, _: Mapping[str, Any]) -> str:
    return _wrong_type(
        value, "text", "put it in quotes" if not isinstance(value, dict | list) else "write text"
    )


def _section(value: object, _: Mapping[str, Any]) -> str:
    return _wrong_type(value, "a map of keys", "indent its keys below it, or remove it for the defaults")


def _list(value: object, _: Mapping[str, Any]) -> str:
    return _wrong_type(value, "a list", "write each item on a line that starts with a hyphen")


def _wrong_type(value: object, expected: str, remedy: str) -> str:
    given = "nothing" if value is None else shown(value)
    return f"{given} where {expected} is needed; {remedy}"


def _choice(value: object, ctx: Mapping[str, Any]) -> str:
    allowed = [word.strip("'") for word in str(ctx["expected"]).replace(" or ", ", ").split(", ")]
    close = suggestion(value, allowed) if isinstance(value, str) else None
    remedy = f"did you mean {close}?" if close else "choose one of them"
    return f"{shown(value)} is not one of {', '.join(allowed)}; {remedy}"


def _pattern(value: object, ctx: Mapping[str, Any]) -> str:
    pattern = ctx["pattern"]
    return f"{shown(value)} does not fit; use {_PATTERNS.get(pattern, f'text that matches {pattern}')}"


def _long_text(value: object, ctx: Mapping[str, Any]) -> str:
    return f"{shown(value)} has {len(str(value))} characters, at most {ctx['max_length']} are allowed; shorten it"


def _short_text(value: object, ctx: Mapping[str, Any]) -> str:
    return f"{shown(value)} is too short, at least {ctx['min_length']} is needed; write it out"


def _many(value: object, ctx: Mapping[str, Any]) -> str:
    return f"{_length(value)} entries, at most {ctx['max_length']} are allowed; remove some"


def _few(value: object, ctx: Mapping[str, Any]) -> str:
    return f"{_length(value)} entries, at least {ctx['min_length']} is needed; add one"


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


_WRITERS: dict[str, Callable[[object, Mapping[str, Any]], str]] = {
    "greater_than_equal": _least,
    "greater_than": _least,
    "less_than_equal": _most,
    "less_than": _most,
    "int_type": _integer,
    "int_from_float": _integer,
    "float_type": _number,
    "finite_number": _finite,
    "bool_type": _flag,
    "string_type": _text,
    "model_type": _section,
    "model_attributes_type": _section,
    "dict_type": _section,
    "tuple_type": _list,
    "enum": _choice,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern,
    "string_too_long": _long_text,
    "string_too_short": _short_text,
    "too_long": _many,
    "too_short": _few,
}
