from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from penstock_graph.loading import load_graph, parse_manifests
from penstock_graph.update import validate_update

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


def patched(entry):
    """The base with an entry's patch, as text."""
    return yaml.safe_dump(merged(copy.deepcopy(TABLE["base"]), entry["patch"]), sort_keys=False)


def named(group):
    """A group of the table, each entry under its name."""
    return [pytest.param(entry, id=entry["name"]) for entry in TABLE[group]]


@pytest.mark.parametrize("entry", named("valid"))
def test_manifests_at_the_bounds_are_accepted(entry):
    """A bound itself is inside, and rules that do not apply stay silent."""
    assert parse_manifests(patched(entry))[1] == []


@pytest.mark.parametrize("entry", named("invalid"))
def test_each_broken_rule_blames_its_key_alone(entry):
    """One broken rule gives one problem: its key path, and the expected part of its message."""
    _, problems = parse_manifests(patched(entry))
    assert [problem.path for problem in problems] == [entry["path"]]
    assert entry["message"] in problems[0].message


@pytest.mark.parametrize("entry", named("invalid"))
def test_each_problem_carries_a_line(entry):
    """Every problem of a text manifest says where it is."""
    _, problems = parse_manifests(patched(entry))
    assert all(problem.line is not None for problem in problems)


@pytest.mark.parametrize("entry", named("updates"))
def test_immutable_keys_are_named_when_they_change(entry):
    """An update is refused for exactly the immutable keys that it changes."""
    old = load_graph(patched({"patch": {}}))
    new = load_graph(patched(entry))
    assert [problem.path for problem in validate_update(old, new)] == entry["paths"]
