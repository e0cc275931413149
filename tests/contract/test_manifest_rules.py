"""Each rule of the manifest is judged alike by the models' Python and by the CEL of the emitted definition."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api import GraphDeployment, ScalingAdapter
from penstock.api.fields import sections
from penstock.api.manifests import parse_manifests
from penstock.api.rule import Rule

sys.path.append(str(Path(__file__).parent))
from manifest_table import (
    TABLE,
    breaks_rules_alone,
    cel_breaks,
    cel_says,
    is_judged_by_cel,
    manifest_of,
    named,
    python_says,
)

ROWS = tuple(
    dict.fromkeys(
        rule
        for kind in (GraphDeployment, ScalingAdapter)
        for _, model in sections(kind)
        for rule in model.rules
    )
)


def without_remedy(said):
    """What is wrong, without what to do: Python may know the name that was meant. A map has no order in CEL."""
    return {each.partition(";")[0].replace("decode-b", "decode") for each in said}


@pytest.mark.parametrize("entry", named("valid"))
def test_a_manifest_at_the_bounds_is_accepted_by_python_and_cel(entry):
    """A bound itself is inside, and rules that do not apply stay silent."""
    data = manifest_of(entry["patch"])
    assert (python_says(data), cel_says(data)) == ([], [])


@pytest.mark.parametrize("entry", named("invalid"))
def test_a_broken_rule_blames_its_key_alone_in_python_and_cel(entry):
    """One problem, at a line, with the expected part of its message; CEL says the same where the fields are valid."""
    data = manifest_of(entry["patch"])
    (problem,) = parse_manifests(yaml.safe_dump(data, sort_keys=False))[1]
    assert problem.path == entry["path"]
    assert problem.line is not None
    assert entry["message"] in problem.message
    if breaks_rules_alone(data):
        assert without_remedy(cel_says(data)) == without_remedy(python_says(data))
    elif is_judged_by_cel(data):
        assert [each.partition(":")[0] for each in cel_says(data)] == [entry["path"]]


@pytest.mark.parametrize("entry", named("updates"))
def test_an_immutable_key_is_compared_with_the_stored_one(entry):
    """A changed role, model or runtime is refused; services come and go."""
    said = cel_says(manifest_of(entry["patch"]), manifest_of())
    # Another name is another object, which no rule needs to say.
    expected = [path for path in entry["paths"] if path != "metadata.name"]
    assert [each.partition(":")[0] for each in said if "immutable" in each] == expected


def test_every_row_is_broken_by_an_entry_of_the_table():
    """A row without a failing manifest would never have been compared."""
    table = [manifest_of(each["patch"]) for each in TABLE["invalid"]]
    updates = [cel_breaks(manifest_of(each["patch"]), manifest_of()) for each in TABLE["updates"]]
    judged = chain(*map(cel_breaks, filter(is_judged_by_cel, table)), *updates)
    demanded = {row.to_schema()["message"] for row in ROWS if row.cel is not None}
    assert demanded - {must for must, _ in judged} == set()


@settings(max_examples=30)
@given(st.lists(st.sampled_from([*TABLE["valid"], *TABLE["invalid"]]), min_size=2, max_size=4))
def test_python_and_cel_give_one_verdict_on_several_changes(changes):
    """Whatever is changed together, both accept or both refuse."""
    data = manifest_of(*(each["patch"] for each in changes))
    if breaks_rules_alone(data):
        assert bool(python_says(data)) == bool(cel_says(data))


def test_a_row_reads_its_values_and_what_it_depends_on_from_its_cel():
    """The blamed key is not related to itself, nor is a section around another key that was read."""

    class Bounds:
        low, high_end = 3, 2.5

    rule = Rule(
        path="low",
        must="low is at most highEnd",
        cel="!has(self.part) || self.low <= self.highEnd && self.part.names.all(n, n != '')",
        holds=lambda bounds: bounds.low <= bounds.high_end,
        text="%d exceeds %s",
        values=("self.low", "self.highEnd"),
        remedy="lower it",
    )
    (violation,) = rule.violations(Bounds)
    assert (violation.path, violation.message) == (("low",), "3 exceeds 2.5; lower it")
    assert violation.related == (("highEnd",), ("part", "names"))
    assert rule.to_schema() == {
        "rule": rule.cel,
        "message": "must hold: low is at most highEnd; lower it",
        "messageExpression": "'%d exceeds %s; lower it'.format([self.low, self.highEnd])",
        "fieldPath": ".low",
    }
