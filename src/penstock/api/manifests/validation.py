"""Plain data becomes a model, or the list of everything wrong with it. Pure."""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.api.base import (
    DNS_LABEL_PATTERN,
    ENV_NAME_PATTERN,
    IMAGE_PATTERN,
    PROFILE_NAME_PATTERN,
    RULE_ERROR,
    SERVED_NAME_PATTERN,
    SpecModel,
)
from penstock.api.durations import DURATION_ERROR
from penstock.api.fields import keys_of, model_at, walk
from penstock.api.graph import API_VERSION, GraphDeployment
from penstock.api.pool_rules import as_pool_member
from penstock.api.profile_request import ProfileRequest
from penstock.api.renamed import RENAMED_KEYS
from penstock.api.rule import KeyPath, dotted
from penstock.core.cron import FIELDS_PATTERN
from penstock.core.errors import ManifestProblem

MAX_VALUE_CHARS = 60
"""A longer value is cut in a message."""

_PATTERNS = {
    DNS_LABEL_PATTERN: "lower-case letters, digits and inner hyphens (a DNS label)",
    ENV_NAME_PATTERN: "letters, digits and underscores, not starting with a digit",
    PROFILE_NAME_PATTERN: "lower-case letters, digits, dots, hyphens and underscores",
    SERVED_NAME_PATTERN: "letters, digits and . _ : / -, starting with a letter or digit",
    r"^https?://\S+$": "an address such as http://prometheus:9090",
    IMAGE_PATTERN: "a container image without spaces, such as vllm/vllm-openai:v0.11.0",
    r"^/.*$": "an absolute path such as /models",
    r"^[A-Za-z0-9-]+$": "letters, digits and hyphens",
    FIELDS_PATTERN: "five fields with one space between: minute, hour, day of month, month, day of week; no seconds",
}

_THOUSANDS = re.compile(r"(\d{1,6})[kK]")
_PERCENT = 100

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
    """Return ``value`` as a manifest would write it, shortened; never an entire section."""
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
        elif kind == "int_type" and isinstance(value, str) and (thousands := _THOUSANDS.fullmatch(value)):
            number = int(thousands[1])
            remedy = f"write {1024 * number} or {1000 * number}, without quotes or letters"
        return f"{'nothing' if value is None else shown(value)} where {expected} is needed; {remedy}"
    if kind in _TEXTS:
        count = len(value) if isinstance(value, Sized) else 0
        text = _TEXTS[kind].format(shown=shown(value), count=count, **ctx)
        is_percent = kind.startswith("less_than") and 1 in ctx.values() and 2 <= value <= _PERCENT
        return (
            f"{text}; a share is written as a fraction, {value}% as {value / _PERCENT:g}"
            if is_percent
            else text
        )
    if kind == DURATION_ERROR:
        return str(error["msg"])
    if kind in {"enum", "literal_error"}:
        return _choice(value, ctx)
    what = f"{shown(value)}: {error['msg']}"
    if kind == "string_pattern_mismatch":
        pattern = ctx["pattern"]
        what = f"{shown(value)} does not fit; use {_PATTERNS.get(pattern, f'text that matches {pattern}')}"
        lower = str(value).lower()
        if re.search(pattern, lower):
            what += f"; write {lower}"
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
    renamed = RENAMED_KEYS.get(".".join(str(each) for each in path))
    if renamed is not None:
        return f"no longer a key; {renamed}"
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


_SpecT = TypeVar("_SpecT", bound=SpecModel)

MAX_REPAIRS = 8
"""Rounds in which invalid values are set aside to reach the rules after them; two are usual."""

_STAND_INS: dict[KeyPath, Any] = {
    ("metadata",): {"name": "x"},
    ("metadata", "name"): "x",
    ("spec", "model"): {"name": "x"},
    ("spec", "model", "name"): "x",
}


def validate(
    model_type: type[_SpecT], data: Mapping[str, Any]
) -> tuple[list[tuple[KeyPath, str]], _SpecT | None]:
    """Return path and message of everything wrong with ``data``, and the model if nothing is.

    Invalid values are set aside and the rest is validated again, so that rules behind them speak too; a
    rule that reads a value set aside is moot and stays silent.
    """
    value: Any = copy.deepcopy(dict(data))
    found: dict[tuple[KeyPath, str], None] = {}
    aside: set[KeyPath] = set()
    for path in list(_unknown_keys(value, model_type, ())):
        found[path, message_of({"type": "extra_forbidden", "loc": path}, model_type)] = None
        _set_aside(value, path)
    for _ in range(MAX_REPAIRS):
        try:
            model = model_type.model_validate(value)
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
            blamed: set[KeyPath] = set()
            for path, message, related in (entry for each in errors for entry in _entries(each, model_type)):
                if not any(_touches(each, aside) for each in (path, *related)):
                    found[path, message] = None
                blamed.add(path)
            if all(error["type"] == RULE_ERROR for error in errors):
                blamed |= {tuple(error["loc"]) for error in errors}
            # Deepest first: what is left of a section goes after the value in it.
            aside |= {_set_aside(value, path) for path in sorted(blamed, key=len, reverse=True)}
        else:
            return list(found), (model if not found else None)
    return list(found), None


def validated(
    model: type[_SpecT], raw: Mapping[str, Any]
) -> tuple[_SpecT | None, tuple[ManifestProblem, ...]]:
    """Return the user-written part of an object of the cluster as its model, or None with everything wrong with it."""
    metadata = {key: raw["metadata"][key] for key in ("name", "namespace") if key in raw["metadata"]}
    manifest = {**{key: raw[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata}
    found, made = validate(model, manifest)
    problems = tuple(ManifestProblem(path=dotted(path), message=message) for path, message in found)
    return (made if isinstance(made, model) else None), problems


def problems_outside_pools(graph: GraphDeployment) -> list[tuple[KeyPath, str]]:
    """Return path and message of everything wrong with a graph if it draws from no GPU pool: its budget is the default then."""
    planner = graph.spec.planner
    if as_pool_member(graph) is graph:
        return []
    manifest = graph.to_manifest()
    manifest["spec"].setdefault("planner", {})["maxGpuBudget"] = planner.max_gpu_budget
    found, _ = validate(GraphDeployment, manifest)
    return [
        (path, f"{message} (not written, maxGpuBudget is {planner.max_gpu_budget} outside of GpuPools)")
        for path, message in found
    ]


def _unknown_keys(value: Any, root: type[SpecModel], path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_keys(item, root, (*path, index))
    elif isinstance(value, dict):
        model = model_at(root, path)
        for key, item in value.items():
            if model is not None and key not in keys_of(model):
                yield (*path, key)
            else:
                yield from _unknown_keys(item, root, (*path, key))


def _entries(error: Any, model_type: type[SpecModel]) -> list[tuple[KeyPath, str, tuple[KeyPath, ...]]]:
    """Return path, message and related paths of one error; a rule error holds several."""
    location: KeyPath = tuple(each for each in error["loc"] if each != "[key]")
    if error["type"] == RULE_ERROR:
        return [
            ((*location, *each.path), each.message, tuple((*location, *path) for path in each.related))
            for each in error["ctx"]["violations"]
        ]
    return [(location, message_of({**error, "loc": location}, model_type), ())]


def _touches(path: KeyPath, aside: set[KeyPath]) -> bool:
    return any(path[: len(each)] == each or each[: len(path)] == path for each in aside)


def _set_aside(value: Any, path: KeyPath) -> KeyPath:
    """Remove the value at ``path``, or put a stand-in there; return the path that is now moot.

    What is missing already takes its section with it.
    """
    while path:
        parent = value
        with contextlib.suppress(LookupError, TypeError):
            for key in path[:-1]:
                parent = parent[key]
            if path in _STAND_INS and isinstance(parent, dict):
                parent[path[-1]] = copy.deepcopy(_STAND_INS[path])
                return path
            del parent[path[-1]]
            return path if isinstance(parent, dict) else path[:-1]
        path = path[:-1]
    return path


def template_of(
    request: ProfileRequest,
) -> tuple[list[tuple[KeyPath, str]], GraphDeployment | None]:
    """Return path and message of everything wrong with a request's template, and its graph if nothing is.

    The graph has the request's name. Without a template there is neither.
    """
    template = request.spec.template
    if not template:
        return [], None
    data = {
        "apiVersion": API_VERSION,
        "kind": "GraphDeployment",
        "metadata": {"name": request.name},
        "spec": template,
    }
    found, graph = validate(GraphDeployment, data)
    problems = [
        (("spec", "template", *(path[1:] if path[:1] == ("spec",) else ())), text) for path, text in found
    ]
    return problems, graph
