"""Plain data becomes a model, or the list of everything wrong with it.

Called by `penstock.api.manifests.loading`; pure.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from penstock.api.base import RULE_ERROR, SpecModel
from penstock.api.fields import keys_of, model_at
from penstock.api.graph import API_VERSION, GraphDeployment
from penstock.api.manifests.messages import message_of
from penstock.api.profile_request import ProfileRequest
from penstock.api.rule import KeyPath

MAX_REPAIRS = 8
"""Rounds in which invalid values are set aside to reach rules behind them; two are usual."""

_STAND_INS: dict[KeyPath, Any] = {
    ("metadata",): {"name": "x"},
    ("metadata", "name"): "x",
    ("spec", "model"): {"name": "x"},
    ("spec", "model", "name"): "x",
}


def validate(
    model_type: type[SpecModel], data: Mapping[str, Any]
) -> tuple[list[tuple[KeyPath, str]], SpecModel | None]:
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
            blamed: set[KeyPath] = set()
            for error in exc.errors(include_url=False):
                for path, message, related in _entries(error, model_type):
                    if not any(_touches(each, aside) for each in (path, *related)):
                        found[path, message] = None
                    blamed.add(path)
            if all(error["type"] == RULE_ERROR for error in exc.errors(include_url=False)):
                blamed |= {tuple(error["loc"]) for error in exc.errors(include_url=False)}
            aside |= {_set_aside(value, path) for path in blamed}
        else:
            return list(found), (model if not found else None)
    return list(found), None


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
    """Remove what stands at ``path``, or put a stand-in there; return the path that is now moot.

    What is missing already takes its section with it.
    """
    while path:
        parent = value
        for key in path[:-1]:
            parent = _child(parent, key)
        if path in _STAND_INS and isinstance(parent, dict):
            parent[path[-1]] = copy.deepcopy(_STAND_INS[path])
            return path
        if isinstance(parent, dict) and path[-1] in parent:
            del parent[path[-1]]
            return path
        if isinstance(parent, list) and isinstance(path[-1], int) and path[-1] < len(parent):
            del parent[path[-1]]
            return path[:-1]
        path = path[:-1]
    return path


def _child(parent: Any, key: str | int) -> Any:
    if isinstance(parent, dict):
        return parent.get(key)
    if isinstance(parent, list) and isinstance(key, int) and key < len(parent):
        return parent[key]
    return None


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
    return problems, (graph if isinstance(graph, GraphDeployment) else None)
