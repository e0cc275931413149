"""The table of manifests that are right, wrong or wrongly changed, and two of its three judges: Python and CEL.

The third is a real API server, in tests/cluster/test_crds.py. A judge says ``["path: message"]``, nothing of what it
accepts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel import cel  # not the package: xds-protos writes an empty `cel` of its own
from pydantic import ValidationError

from penstock.api import RULE_ERROR, GraphDeployment
from penstock.api.crd import definitions
from penstock.api.manifests import parse_manifests

TABLE = yaml.safe_load(Path(__file__).with_name("invalid_manifests.yaml").read_text(encoding="utf-8"))
SCHEMA = definitions()["graphdeployments.penstock.dev"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def merged(target, patch):
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def manifest_of(*patches):
    """The table's base, changed by patches in turn."""
    made = copy.deepcopy(TABLE["base"])
    for patch in patches:
        made = merged(made, patch)
    return made


def named(group):
    """A group of the table, each entry under its name."""
    return [pytest.param(each, id=each["name"]) for each in TABLE[group]]


def python_says(data) -> list[str]:
    """What `penstock validate` says about a manifest."""
    _, problems = parse_manifests(yaml.safe_dump(data, sort_keys=False))
    return [f"{each.path}: {each.message}" for each in problems]


def cel_says(data, old=None) -> list[str]:
    """What the emitted rules say about a manifest that replaces ``old``."""
    return [message for _, message in cel_breaks(data, old)]


def cel_breaks(data, old=None) -> list[tuple[str, str]]:
    """What the emitted rules that a manifest breaks demand, with what each says."""
    return list(_broken(SCHEMA, _stored(SCHEMA, data), old=old and _stored(SCHEMA, old)))


def breaks_rules_alone(data) -> bool:
    """Whether every field by itself is valid; the API server judges no rule where one is not."""
    try:
        GraphDeployment.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as exc:
        return all(each["type"] == RULE_ERROR for each in exc.errors())
    return True


def is_judged_by_cel(data) -> bool:
    """Whether fields are valid but perhaps for names: a type bounds those in Python, a rule in CEL.

    A structural schema has no patterns for a map's keys nor for metadata.
    """
    return breaks_rules_alone(data) or any("lower-case" in each for each in python_says(data))


def _stored(part: dict[str, Any], value: Any) -> Any:
    """A value as the API server stores it: defaults filled in, nulls dropped unless a default would replace them."""
    if isinstance(value, list) and "items" in part:
        return [_stored(part["items"], each) for each in value]
    if not isinstance(value, dict):
        return float(value) if part.get("type") == "number" and isinstance(value, int) else value
    if "additionalProperties" in part:
        return {key: _stored(part["additionalProperties"], each) for key, each in value.items()}
    known = part.get("properties", {})
    filled = {key: copy.deepcopy(each["default"]) for key, each in known.items() if "default" in each}
    filled |= value
    return {key: _stored(known.get(key, {}), each) for key, each in filled.items() if each is not None}


_compiled = cache(cel.compile)


def _shown(value: Any) -> Any:
    """A value as Kubernetes' ``format`` writes it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list) else value


def _evaluate(expression: str, value: Any, old: Any) -> Any:
    """A CEL expression's result for ``self`` and ``oldSelf``, with Kubernetes' two extensions that the rules use."""
    context = cel.Context({"self": value, "oldSelf": old})
    context.add_function("format", lambda text, values: text % tuple(map(_shown, values)))
    context.add_function("sum", sum)
    return _compiled(expression).execute(context)


def _broken(part: dict[str, Any], value: Any, path: str = "", old: Any = None) -> Iterator[tuple[str, str]]:
    """Yield what each emitted rule that a stored value breaks demands, with its message behind the path that the server names."""
    for entry in part.get("x-kubernetes-validations", ()):
        if "oldSelf" in entry["rule"] and old is None:
            continue
        if not _evaluate(entry["rule"], value, old):
            message = _evaluate(entry["messageExpression"], value, old)
            at = f"{path}{entry.get('fieldPath', '')}".lstrip(".")
            yield entry["message"], message if message.startswith("spec.") else f"{at}: {message}"
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _broken(part.get("items", {}), each, f"{path}[{index}]")
    if isinstance(value, dict):
        known = part.get("properties", {})
        for key, each in value.items():
            below = known.get(key, part.get("additionalProperties", {}))
            yield from _broken(below, each, f"{path}.{key}", old.get(key) if isinstance(old, dict) else None)
