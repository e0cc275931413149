"""The table of manifests that are right, wrong or wrongly changed, for the models' tests and the API server's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

TABLE = yaml.safe_load(Path(__file__).with_name("invalid_manifests.yaml").read_text(encoding="utf-8"))


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


def named(group, *, without=frozenset()):
    """A group of the table, each entry under its name."""
    return [pytest.param(each, id=each["name"]) for each in TABLE[group] if each["name"] not in without]
