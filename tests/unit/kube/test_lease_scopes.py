"""Which of several installations works on a graph, by their Leases alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kube.lease_scopes import (
    Keys,
    LeaseScope,
    ObservedScope,
    lease_scope,
    owner_of,
    preceding_scopes,
)

KEYS = Keys("component", "scope", "graph")

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"


def claim(lease="a/x", namespace=None, graph=None, created=EARLY):
    """A claim, of all graphs of all namespaces unless told otherwise."""
    home, _, name = lease.partition("/")
    return LeaseScope((home, name), namespace, graph, created)


WIDE_OLD = claim("a/x")
WIDE_YOUNG = claim("b/x", created=LATE)
OWN = claim("n/x", namespace="n", created=LATE)
OWN_GRAPH = claim("n/x-g", namespace="n", graph="g", created=LATE)
WIDE_GRAPH = claim("c/x-g", graph="g", created=LATE)


@pytest.mark.parametrize(
    ("claims", "key", "expected"),
    [
        ([], ("n", "g"), None),
        ([WIDE_OLD], ("n", "g"), WIDE_OLD),
        ([WIDE_YOUNG, WIDE_OLD], ("n", "g"), WIDE_OLD),
        ([claim("b/x"), claim("a/y"), claim("a/x")], ("n", "g"), claim("a/x")),
        ([WIDE_OLD, OWN], ("n", "g"), OWN),
        ([WIDE_OLD, OWN], ("m", "g"), WIDE_OLD),
        ([OWN], ("m", "g"), None),
        ([OWN, OWN_GRAPH], ("n", "g"), OWN_GRAPH),
        ([OWN, OWN_GRAPH], ("n", "h"), OWN),
        ([OWN, WIDE_GRAPH], ("n", "g"), OWN),
        ([WIDE_OLD, WIDE_GRAPH], ("n", "g"), WIDE_GRAPH),
    ],
    ids=[
        "nobody",
        "one",
        "the older Lease",
        "equal age: namespace, then name",
        "a namespace's own",
        "other namespaces",
        "not its namespace",
        "a graph's own",
        "another graph",
        "a namespace's own before one graph everywhere",
        "one graph everywhere before all",
    ],
)
def test_who_works_on_a_graph(claims, key, expected):
    """The more specific one, then the older one."""
    assert owner_of(claims, *key) == expected
    assert owner_of(reversed(claims), *key) == expected


NAMESPACES = st.sampled_from(["n", "m", "o"])
GRAPHS = st.sampled_from(["g", "h"])


@st.composite
def many(draw):
    """Claims of different Leases."""
    homes = draw(st.lists(st.tuples(NAMESPACES, st.sampled_from("xyz")), unique=True, max_size=6))
    return [
        LeaseScope(
            home,
            draw(st.sampled_from([None, home[0]])),
            draw(st.one_of(st.none(), GRAPHS)),
            draw(st.sampled_from([EARLY, LATE])),
        )
        for home in homes
    ]


@given(claims=many(), namespace=NAMESPACES, graph=GRAPHS)
def test_exactly_one_of_those_that_claim_a_graph_takes_it(claims, namespace, graph):
    """Each decides for itself, by the claims above its own; any two sets are disjoint and nothing is left over."""
    takers = [
        mine
        for mine in claims
        if mine.covers(namespace, graph)
        and not any(each.covers(namespace, graph) for each in preceding_scopes(mine, claims))
    ]
    claimed = [each for each in claims if each.covers(namespace, graph)]
    assert takers == ([] if not claimed else [owner_of(claims, namespace, graph)])


@given(claims=many())
def test_only_claims_that_can_meet_come_before_one_another(claims):
    """Installations of different namespaces or graphs do not care about each other."""
    for mine in claims:
        for other in preceding_scopes(mine, claims):
            assert other.namespace is None or mine.namespace in {None, other.namespace}
            assert mine not in preceding_scopes(other, claims)


@pytest.mark.parametrize(
    ("labels", "namespace", "graph"),
    [
        ({"scope": "cluster"}, None, None),
        ({"scope": "namespace"}, "n", None),
        ({"scope": "namespace", "graph": "g"}, "n", "g"),
        ({"scope": "nonsense"}, "n", None),
    ],
)
def test_what_a_lease_claims(labels, namespace, graph):
    """A namespaced one claims where it lies, so a namespace named cluster is nothing special."""
    metadata = {"namespace": "n", "name": "x", "labels": labels, "creationTimestamp": EARLY}
    assert lease_scope({"metadata": metadata}, KEYS) == LeaseScope(("n", "x"), namespace, graph, EARLY)


@pytest.mark.parametrize(
    ("term_s", "age_s", "expected"),
    [(15.0, 45.0, True), (15.0, 45.1, False), (1.0, 45.0, True), (60.0, 180.0, True), (60.0, 180.1, False)],
)
def test_how_long_a_claim_stands(term_s, age_s, expected):
    """Three terms, of the longer one; a Lease that was given back says 1 s and stands as long as any."""
    standing = ObservedScope(WIDE_OLD, term_s, changed_s=100.0)
    assert standing.is_current(100.0 + age_s, own_term_s=15.0) is expected
