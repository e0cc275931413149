from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from manifest_table import manifest_of, named

from penstock.api.manifests import parse_manifests


def patched(entry):
    """The base with an entry's patch, as text."""
    return yaml.safe_dump(manifest_of(entry["patch"]), sort_keys=False)


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
