"""Selects the graphs to which an entry of a GpuPool or ClusterGpuPool applies."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar

from pydantic import Field

from penstock.api.base import DnsLabel, SpecModel, entry
from penstock.api.graph import GraphDeployment
from penstock.api.rule import Rule

NamespacePattern = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9*]([-a-z0-9*]*[a-z0-9*])?$")
]


class PoolMatch(SpecModel):
    """Selects the graphs to which an entry applies; every key that is set must match."""

    name: DnsLabel | None = entry(None, "Name of the graph; null: any.")
    labels: dict[str, str] = entry({}, "Labels that a graph must all have.")

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule(
            path="",
            must="match has a name or labels",
            cel=None,
            holds=lambda match: match.name is not None or bool(match.labels),
            text="neither name nor labels",
            remedy="give one, or every graph would match",
        ),
    )

    def fits(self, graph: GraphDeployment) -> bool:
        """Return whether the entry applies to a graph."""
        return self.covers(graph.name, graph.metadata.labels, graph.metadata.namespace)

    def may_cover(self, name: str, labels: Mapping[str, str], namespace: str | None) -> bool:
        """Return whether the entry can apply to the graph, without knowing the labels of namespaces."""
        return self.covers(name, labels, namespace)

    def covers(self, name: str, labels: Mapping[str, str], namespace: str | None) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether the entry applies to a graph with this name and these labels; ``namespace`` is None if unknown."""
        return (self.name is None or self.name == name) and self.labels.items() <= labels.items()


class ClusterPoolMatch(PoolMatch):
    """Selects the graphs, by namespace, to which an entry applies; every key that is set must match."""

    namespaces: Annotated[tuple[NamespacePattern, ...], Field(min_length=1, max_length=64)] = entry(
        (), 'Namespaces whose graphs may use the pool: names, or patterns such as team-*; ["*"]: all.'
    )
    namespace_labels: dict[str, str] = entry(
        {},
        "Labels that a namespace must all have for its graphs to use the pool; with namespaces, both must match.",
    )

    rules = (
        Rule(
            path="namespaces",
            must="match has namespaces or namespaceLabels",
            cel="has(self.namespaces) || (has(self.namespaceLabels) && self.namespaceLabels.size() > 0)",
            holds=lambda match: bool(match.namespaces or match.namespace_labels),
            text="neither namespaces nor namespaceLabels",
            remedy='give one; namespaces: ["*"] matches the graphs of all namespaces',
        ),
    )

    def within(self, namespaces: Mapping[str, Mapping[str, str]]) -> ClusterPoolMatch:
        """Return the match with namespace labels replaced by the names of the namespaces that have them.

        Args:
            namespaces: Labels by name, of all namespaces.
        """
        if not self.namespace_labels:
            return self
        patterns, wanted = self.namespaces or ("*",), self.namespace_labels.items()
        names = [
            name
            for name, labels in sorted(namespaces.items())
            if wanted <= labels.items() and any(fnmatchcase(name, each) for each in patterns)
        ]
        return self.model_copy(update={"namespaces": tuple(names), "namespace_labels": {}})

    def may_cover(self, name: str, labels: Mapping[str, str], namespace: str | None) -> bool:
        """Return whether the entry applies to a graph if the graph's namespace has the required labels."""
        shown = {"namespaces": self.namespaces or ("*",), "namespace_labels": {}}
        return self.model_copy(update=shown).covers(name, labels, namespace)

    def covers(self, name: str, labels: Mapping[str, str], namespace: str | None) -> bool:
        """Return whether the entry applies to a graph; False while namespace labels are not replaced by names."""
        if self.namespace_labels:
            return False
        is_within = any(fnmatchcase(namespace or "", each) for each in self.namespaces)
        return is_within and super().covers(name, labels, namespace)
