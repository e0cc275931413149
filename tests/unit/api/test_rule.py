"""One row of the API's rules: what Python says of a breach, and what an API server computes, letter by letter."""

from __future__ import annotations

from enum import StrEnum

import pytest
from pydantic import BaseModel

from penstock.api.rule import Breach, Rule, Violation, dotted, immutable, literal, quoted


class Bounds(BaseModel):
    """Two numbers that a rule compares, as keys and as fields."""

    min_replicas: int = 3
    max_replicas: int = 1
    share: float | None = 0.5


class Colour(StrEnum):
    """A closed set."""

    RED = "red"


ORDERED = Rule(
    must="minReplicas is at most maxReplicas",
    text="%d exceeds maxReplicas %d",
    remedy="lower it",
    cel="self.minReplicas <= self.maxReplicas",
    holds=lambda each: each.min_replicas <= each.max_replicas,
    values=("self.minReplicas", "self.maxReplicas"),
    path="minReplicas",
)


def test_a_breach_names_the_key_its_values_and_what_it_is_compared_with():
    """A model that obeys yields nothing."""
    assert list(ORDERED.violations(Bounds())) == [
        Violation(("minReplicas",), "3 exceeds maxReplicas 1; lower it", (("maxReplicas",),))
    ]
    assert not list(ORDERED.violations(Bounds(min_replicas=1)))


def test_an_api_server_gets_rule_message_and_the_key_to_blame():
    """The message is computed; the other one is for servers that cannot."""
    assert ORDERED.to_schema() == {
        "rule": "self.minReplicas <= self.maxReplicas",
        "message": "must hold: minReplicas is at most maxReplicas; lower it",
        "messageExpression": "'%d exceeds maxReplicas %d; lower it'.format([self.minReplicas, self.maxReplicas])",
        "fieldPath": ".minReplicas",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "'wrong; mend it'"),
        ({"values": ("self.a",)}, "'wrong; mend it'.format([self.a])"),
        ({"values": ("self.a", "k")}, "'wrong; mend it'.format([self.a, k])"),
        ({"at": "services.%s.role"}, "'services.%s.role: wrong; mend it'.format([k])"),
        (
            {"at": "services.%s.role", "values": ("self.a",)},
            "'services.%s.role: wrong; mend it'.format([k, self.a])",
        ),
        ({"at": "router.port"}, "'router.port: wrong; mend it'"),
        ({"first": "self.bad", "values": ("k",)}, "[self.bad[0]].map(k, 'wrong; mend it'.format([k]))[0]"),
        ({"message": "'as it is'"}, "'as it is'"),
    ],
)
def test_the_message_that_an_api_server_computes(changes, message):
    """With values, below a map's key, of a list's first item, or given as it is."""
    rule = Rule(must="m", text="wrong", remedy="mend it", cel="true", **changes)
    assert rule.message_cel() == message
    assert "fieldPath" not in rule.to_schema()


def test_a_rule_of_one_key_reads_that_key_and_names_no_other():
    """Its values are the key's own, whatever they are called in CEL."""
    rule = Rule(
        must="m",
        text="%s",
        remedy="r",
        cel="self <= 0.25",
        holds=lambda _: False,
        values=("self",),
        key="share",
    )
    assert list(rule.violations(Bounds())) == [Violation(("share",), "0.5; r", ())]


def test_a_breach_may_blame_another_key_with_its_own_remedy():
    """As many as are found."""

    def find(_):
        yield Breach(("one",), path=("a", 0), related=(("b",),), remedy="see b")
        yield Breach(("two",))

    rule = Rule(must="m", text="%s", remedy="r", cel=None, find=find, path="c")
    assert list(rule.violations(Bounds())) == [
        Violation(("a", 0), "one; see b", (("b",),)),
        Violation(("c",), "two; r", ()),
    ]


def test_related_keys_leave_out_sections_around_others_and_calls():
    """``size()`` is not a key, and a section of which a key is read is not named itself."""
    rule = Rule(
        must="m", text="t", remedy="r", cel="self.a.size() > 0 && has(self.b) && self.b.c == self.d", path="d"
    )
    [violation] = Rule(**{**_fields(rule), "holds": lambda _: False}).violations(Bounds())
    assert violation.related == (("a",), ("b", "c"))


def _fields(rule):
    return {name: getattr(rule, name) for name in rule.__slots__}


def test_a_key_that_keeps_its_value_names_both():
    """Only an API server sees the version before."""
    assert immutable("runtime", "runtime").to_schema() == {
        "rule": "self == oldSelf",
        "message": "must hold: the runtime is immutable; keep it, or make a new graph",
        "messageExpression": "'%s was %s and is immutable; keep it, or make a new graph'.format([self, oldSelf])",
    }


@pytest.mark.parametrize(
    ("value", "annotation", "cel"),
    [
        (Colour.RED, Colour, "'red'"),
        (True, bool, "true"),
        ("it's", str, r"'it\'s'"),
        (1, int, "1"),
        (1, float, "1.0"),
        (1, float | None, "1.0"),
        (0.5, float, "0.5"),
        (2, int | None, "2"),
    ],
)
def test_a_scalar_as_cel(value, annotation, cel):
    """A whole number is CEL's double where its field is one."""
    assert literal(value, annotation) == cel


def test_paths_and_texts():
    """Places in lists stand in brackets; every quote is escaped."""
    assert dotted(("spec", "env", 0, "name")) == "spec.env[0].name"
    assert dotted(()) == ""
    assert quoted("'a' 'b'") == r"'\'a\' \'b\''"
