"""Which of several installations works on a graph: decided from their Leases alone. Pure.

Every installation of a component (an operator, a planner) holds one Lease, which says what it works on: one
namespace or all, every graph or one. Where several cover the same graph, the more specific one works: a
namespace's own before a cluster-wide one, then one graph's before one of all graphs, then the older Lease.
The order is total, so of any two that see the same Leases at most one takes a graph.
`penstock.kube.ownership` watches the Leases; it is the only caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

CLUSTER: Final = "cluster"
NAMESPACE: Final = "namespace"
"""Values of the scope label on a Lease: all namespaces, or the one in which the Lease lies."""

OBSERVED_TERMS: Final = 3.0
"""A scope counts for so many terms after its Lease changed last. Chosen: an installation that restarts gets
its graphs back without another one having taken them in between."""

SETTLED_TERMS: Final = 2.0
"""A new leader whose predecessor renewed within so many terms need not wait: nobody else can have begun yet.
One term less than `OBSERVED_TERMS`, for views that are up to that old."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a Lease's labels.

    Attributes:
        component: Its value is the component's name.
        scope: Its value is `CLUSTER` or `NAMESPACE`.
        graph: Its value is the only graph's name; absent for all graphs.
    """

    component: str
    scope: str
    graph: str


@dataclass(frozen=True, slots=True)
class LeaseScope:
    """What one installation works on, as its Lease says.

    Attributes:
        lease: Namespace and name of its Lease.
        namespace: The only namespace; None: all.
        graph: The only graph's name; None: all.
        created: When its Lease was made, RFC 3339 in UTC.
    """

    lease: tuple[str, str]
    namespace: str | None
    graph: str | None
    created: str

    @property
    def rank(self) -> tuple[object, ...]:
        """Order of precedence; the least one works."""
        return (self.namespace is None, self.graph is None, self.created, *self.lease)

    def covers(self, namespace: str, graph: str | None) -> bool:
        """Return whether it takes this graph; with None, whether it takes every graph of the namespace."""
        return self.namespace in {None, namespace} and self.graph in {None, graph}

    def overlaps(self, other: LeaseScope) -> bool:
        """Return whether there can be a graph that both take."""
        return (None in {self.namespace, other.namespace} or self.namespace == other.namespace) and (
            None in {self.graph, other.graph} or self.graph == other.graph
        )


@dataclass(frozen=True, slots=True)
class ObservedScope:
    """A scope as one process observes it.

    Attributes:
        scope: The scope.
        term_s: Its Lease's term, seconds.
        changed_s: This process's own clock when it saw the Lease change last.
    """

    scope: LeaseScope
    term_s: float
    changed_s: float

    def is_current(self, now_s: float, *, own_term_s: float) -> bool:
        """Return whether the scope still counts; a released Lease's counts as long as one that expired."""
        return now_s - self.changed_s <= OBSERVED_TERMS * max(self.term_s, own_term_s)


def lease_scope(lease: Mapping[str, Any], keys: Keys) -> LeaseScope:
    """Return what a Lease's labels say that its installation works on.

    Args:
        lease: With the scope label.
        keys: Of the labels.
    """
    metadata = lease["metadata"]
    labels = metadata.get("labels") or {}
    is_wide = labels.get(keys.scope) == CLUSTER
    return LeaseScope(
        lease=(metadata["namespace"], metadata["name"]),
        namespace=None if is_wide else metadata["namespace"],
        graph=labels.get(keys.graph),
        created=str(metadata.get("creationTimestamp", "")),
    )


def owner_of(scopes: Iterable[LeaseScope], namespace: str, graph: str) -> LeaseScope | None:
    """Return the scope whose installation works on a graph; None if none covers it."""
    return min((each for each in scopes if each.covers(namespace, graph)), key=_rank, default=None)


def preceding_scopes(own: LeaseScope, others: Iterable[LeaseScope]) -> list[LeaseScope]:
    """Return the scopes that take precedence over ``own`` wherever both cover a graph, the first in order first."""
    return sorted((each for each in others if each.overlaps(own) and each.rank < own.rank), key=_rank)


def _rank(scope: LeaseScope) -> tuple[object, ...]:
    return scope.rank
