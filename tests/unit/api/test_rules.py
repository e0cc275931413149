"""Each cross-field rule is judged alike by the models' Python and by the CEL of the emitted definition."""

from __future__ import annotations

import copy
import json
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import cel
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.api import RULE_ERROR, GraphDeployment, ScalingAdapter
from penstock.api.crd import definitions
from penstock.api.fields import sections
from penstock.api.manifests import parse_manifests
from penstock.api.rule import Rule, unless

sys.path.append(str(Path(__file__).parents[2] / "contract"))
from manifest_table import TABLE, manifest_of

ROWS = tuple(
    dict.fromkeys(
        rule
        for kind in (GraphDeployment, ScalingAdapter)
        for _, model in sections(kind)
        for rule in model.rules
    )
)


def schema():
    """The emitted schema of a GraphDeployment."""
    version = definitions()["graphdeployments.penstock.dev"]["spec"]["versions"][0]
    return version["schema"]["openAPIV3Schema"]


def stored(part, value):
    """A value as the API server stores it: defaults filled in, nulls dropped unless a default would replace them."""
    if isinstance(value, list) and "items" in part:
        return [stored(part["items"], each) for each in value]
    if not isinstance(value, dict):
        return float(value) if part.get("type") == "number" and isinstance(value, int) else value
    if "additionalProperties" in part:
        return {key: stored(part["additionalProperties"], each) for key, each in value.items()}
    known = part.get("properties", {})
    filled = {key: copy.deepcopy(each["default"]) for key, each in known.items() if "default" in each}
    filled |= value
    return {key: stored(known.get(key, {}), each) for key, each in filled.items() if each is not None}


@cache
def compiled(expression):
    """CEL compiled once."""
    return cel.compile(expression)


def shown(value):
    """A value as Kubernetes' ``format`` writes it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list) else value


def evaluate(expression, value, old=None):
    """A CEL expression's result for ``self`` and ``oldSelf``, with Kubernetes' two extensions that the rules use."""
    context = cel.Context({"self": value, "oldSelf": old})
    context.add_function("format", lambda text, values: text % tuple(map(shown, values)))
    context.add_function("sum", sum)
    return compiled(expression).execute(context)


def broken(part, value, path="", old=None):
    """Yield each emitted rule that a stored value breaks, with its message behind the path that the server names."""
    for entry in part.get("x-kubernetes-validations", ()):
        if "oldSelf" in entry["rule"] and old is None:
            continue
        if not evaluate(entry["rule"], value, old):
            message = evaluate(entry["messageExpression"], value, old)
            at = f"{path}{entry.get('fieldPath', '')}".lstrip(".")
            yield entry["rule"], message if message.startswith("spec.") else f"{at}: {message}"
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from broken(part.get("items", {}), each, f"{path}[{index}]")
    if isinstance(value, dict):
        known = part.get("properties", {})
        for key, each in value.items():
            below = known.get(key, part.get("additionalProperties", {}))
            yield from broken(below, each, f"{path}.{key}", old.get(key) if isinstance(old, dict) else None)


def judged_by_cel(data, old=None):
    """What the emitted rules say about a manifest, as ``[(rule, "path: message")]``."""
    return list(broken(schema(), stored(schema(), data), old=old and stored(schema(), old)))


def judged_by_python(data):
    """What `penstock validate` says about a manifest."""
    return [
        f"{each.path}: {each.message}" for each in parse_manifests(yaml.safe_dump(data, sort_keys=False))[1]
    ]


def breaks_rules_alone(data):
    """Whether every field by itself is valid; the API server judges no rule where one is not."""
    try:
        GraphDeployment.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as exc:
        return all(each["type"] == RULE_ERROR for each in exc.errors())
    return True


def is_readable(data):
    """Whether the emitted rules get to judge: fields are valid but perhaps for names, which a rule judges."""
    return breaks_rules_alone(data) or any("lower-case" in each for each in judged_by_python(data))


def entries(group):
    """A group of the table whose fields are valid by themselves, by name."""
    made = [(each["name"], manifest_of(each["patch"])) for each in TABLE[group]]
    return [(name, data) for name, data in made if breaks_rules_alone(data)]


def without_remedy(said):
    """What is wrong, without what to do: Python may know the name that was meant. A map has no order in CEL."""
    return {each.partition(";")[0].replace("decode-b", "decode") for each in said}


@pytest.mark.parametrize(
    ("name", "data"), entries("invalid"), ids=lambda value: value if isinstance(value, str) else ""
)
def test_python_and_cel_say_the_same_of_a_broken_rule(name, data):
    """One rule is broken: both blame the same path with the same value and bound."""
    said = judged_by_python(data)
    assert len(said) == 1
    assert without_remedy(said) == without_remedy(message for _, message in judged_by_cel(data))


@pytest.mark.parametrize(
    ("name", "data"), entries("valid"), ids=lambda value: value if isinstance(value, str) else ""
)
def test_python_and_cel_accept_the_same(name, data):
    """At each bound, neither finds anything."""
    assert (judged_by_python(data), judged_by_cel(data)) == ([], [])


@pytest.mark.parametrize(
    "name", ["service name with capitals", "node pool name with capitals", "graph name with a dot"]
)
def test_names_are_bounded_by_a_type_in_python_and_by_a_rule_in_cel(name):
    """A structural schema has no patterns for a map's keys nor for metadata."""
    entry = next(each for each in TABLE["invalid"] if each["name"] == name)
    data = manifest_of(entry["patch"])
    ((_, message),) = judged_by_cel(data)
    assert [each.partition(":")[0] for each in judged_by_python(data)] == [entry["path"]]
    assert message.startswith(f"{entry['path']}: ")


@pytest.mark.parametrize("entry", TABLE["updates"], ids=lambda each: each["name"])
def test_an_immutable_key_is_compared_with_the_stored_one(entry):
    """A changed role, model or runtime is refused; services come and go."""
    said = judged_by_cel(manifest_of(entry["patch"]), manifest_of())
    # Another name is another object, which no rule needs to say.
    expected = [path for path in entry["paths"] if path != "metadata.name"]
    assert [message.partition(":")[0] for _, message in said if "immutable" in message] == expected


def test_every_row_is_broken_by_an_entry_of_the_table():
    """A row without a failing manifest would never have been compared."""
    table = [manifest_of(each["patch"]) for each in TABLE["invalid"]]
    updates = [judged_by_cel(manifest_of(each["patch"]), manifest_of()) for each in TABLE["updates"]]
    judged = chain(*map(judged_by_cel, filter(is_readable, table)), *updates)
    assert {row.cel for row in ROWS if row.cel is not None} - {rule for rule, _ in judged} == set()


@settings(max_examples=30)
@given(st.lists(st.sampled_from([*TABLE["valid"], *TABLE["invalid"]]), min_size=2, max_size=4))
def test_python_and_cel_give_one_verdict_on_several_changes(changes):
    """Whatever is changed together, both accept or both refuse."""
    data = manifest_of(*(each["patch"] for each in changes))
    if breaks_rules_alone(data):
        assert bool(judged_by_python(data)) == bool(judged_by_cel(data))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.must)
def test_every_row_says_what_must_hold_and_what_to_do(row):
    """The API server refuses line breaks and unbalanced CEL."""
    assert row.remedy
    assert "\n" not in f"{row.must}{row.text}{row.remedy}{row.cel}{row.message}"
    assert row.must[0].islower() or row.must.startswith("GRAPH")
    assert f"{row.cel}".count("(") == f"{row.cel}".count(")")


def test_a_row_reads_its_values_and_what_it_depends_on_from_its_cel():
    """The blamed key is not related to itself, nor is a section around another key that was read."""

    class Bounds:
        low, high_end = 3, 2.5

    rule = Rule(
        path="low",
        must="low is at most highEnd",
        cel="!has(self.part) || self.low <= self.highEnd && self.part.names.all(n, n != '')",
        find=unless(lambda bounds: bounds.low <= bounds.high_end),
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
