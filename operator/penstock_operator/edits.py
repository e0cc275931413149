"""Decides which specification of a graph the operator applies: the newest one, or else the last one that it could apply.

A refused edit stops nothing: the specification that was applied before remains in effect. It is read from the cache
or from the graph's status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.api import GraphDeployment, dotted
from penstock.api.manifests.validation import problems_outside_pools, validated
from penstock.core.errors import ManifestProblem
from penstock.core.lru_cache import LruCache
from penstock.kube.objects.served import ServedSpec, current_spec, stored_spec, with_spec
from penstock_operator.observed import ObservedGraph
from penstock_operator.queue import Key
from penstock_operator.trim import Object

ValidatedGraph = tuple[GraphDeployment | None, tuple[ManifestProblem, ...]]
"""The validated graph, or None with the problems that make it invalid."""

MODELS: Final = 256
"""Number of validated graphs that are cached for the next reconcile; unchanged graphs are not reconciled and need
none. Chosen: five megabytes."""


@dataclass(frozen=True, slots=True)
class ValidEdits:
    """The valid specifications of a graph that the operator can apply, and the problems of its newest specification.

    Attributes:
        edits: Valid specifications, each with its generation and text, to try in this order: the current one if it is
            valid, then the last one that was applied.
        problems: Problems of the newest specification; empty if that specification is valid.
    """

    edits: tuple[tuple[ServedSpec, GraphDeployment], ...]
    problems: tuple[ManifestProblem, ...]


class Edits:
    """Validates the specification of each graph, and remembers which one was applied last.

    If a user's newest edit is invalid, the specification that was applied before stays in force.
    """

    def __init__(self) -> None:
        self._models: LruCache[Key, tuple[tuple[str, int, bool], ValidatedGraph]] = LruCache(MODELS)
        self._served: LruCache[Key, tuple[str, ServedSpec, GraphDeployment]] = LruCache(MODELS)

    def of(self, key: Key, raw: Object, *, is_in_pool: bool) -> ValidEdits:
        """Return the valid specifications of a graph, in the order in which to try them, and the problems of the newest one.

        Args:
            key: Namespace and name of the graph.
            raw: The GraphDeployment as the API server returned it.
            is_in_pool: Whether the graph takes its GPUs from a GpuPool; some fields are allowed only in that case.
        """
        model, problems = self._newest(key, raw, is_in_pool)
        edits = () if model is None else ((current_spec(raw), model),)
        last = self._last_served(key, raw)
        if last is not None and last[0].generation not in {each.generation for each, _ in edits}:
            edits = (*edits, last)
        return ValidEdits(edits, problems)

    def record_applied(self, graph: ObservedGraph) -> None:
        """Remember that the specification in ``graph`` is now applied, so that it stays in force if a later edit is invalid."""
        self._served.put(graph.key, (graph.uid, graph.served, graph.model))

    def forget(self, key: Key) -> None:
        """Drop the cached specifications of a deleted graph; does nothing if there are none."""
        self._models.forget(key)
        self._served.forget(key)

    def _newest(self, key: Key, raw: Object, is_in_pool: bool) -> ValidatedGraph:  # noqa: FBT001 - private
        identity = (raw["metadata"]["uid"], raw["metadata"].get("generation", 0), is_in_pool)
        known = self._models.get(key)
        if known is None or known[0] != identity:
            model, problems = validated(GraphDeployment, raw)
            if model is not None and not is_in_pool and (found := problems_outside_pools(model)):
                model, problems = None, tuple(ManifestProblem(dotted(path), text) for path, text in found)
            known = identity, (model, problems)
            self._models.put(key, known)
        return known[1]

    def _last_served(self, key: Key, raw: Object) -> tuple[ServedSpec, GraphDeployment] | None:
        """Return the specification that was applied last, from the cache or else from the graph's status; None if there is none."""
        known = self._served.get(key)
        if known is not None and known[0] == raw["metadata"]["uid"]:
            return known[1:]
        stored = stored_spec(raw)
        model = None if stored is None else validated(GraphDeployment, with_spec(raw, stored))[0]
        return None if stored is None or model is None else (stored, model)
