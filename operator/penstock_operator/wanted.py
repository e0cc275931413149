"""Builds the objects that a graph is to have, once in a reconcile; those of the last ones are remembered."""

from __future__ import annotations

from typing import Final

from penstock.core.errors import InvalidSpecError
from penstock.core.lru_cache import LruCache
from penstock_operator.observed import ObservedGraph
from penstock_operator.plan.drift import stamped
from penstock_operator.plan.replicas import ReplicasPlan
from penstock_operator.queue import Key
from penstock_operator.resources.children import adapter, children
from penstock_operator.resources.files import absent_files
from penstock_operator.trim import Object
from penstock_operator.workloads import marked

BUILT: Final = 64
"""Graphs whose built objects are kept for the next reconcile; one at rest needs none. Chosen: five megabytes."""


class WantedObjects:
    """Builds a graph's objects, or finds them built, as the next reconcile of a graph builds mostly the same."""

    def __init__(self) -> None:
        self._built: LruCache[Key, tuple[tuple[object, ...], list[Object]]] = LruCache(BUILT)

    def of(self, graph: ObservedGraph, plan: ReplicasPlan) -> list[Object]:
        """Return the graph's ScalingAdapters and its other objects, `stamped`.

        Raises:
            InvalidSpecError: the operator does not allow what the graph's podTemplates say, or pods lack files that the
                graph names.
        """
        replicas = {name: each.number for name, each in plan.services.items()}
        away = plan.unavailable(graph.effective.gpus)
        known = (graph.uid, graph.model, replicas, away, graph.context)
        built = self._built.get(graph.key)
        if built is None or built[0] != known:
            scaled = [name for name, each in plan.services.items() if each.spec.scaling is not None]
            adapters = [adapter(graph.model, name, graph.context, replicas=None) for name in scaled]
            others = children(graph.model, graph.context, replicas=replicas, unavailable=away)
            if problems := list(absent_files(graph.model, others)):
                raise InvalidSpecError(problems)
            built = known, [stamped(each) for each in (*adapters, *map(marked, others))]
            self._built.put(graph.key, built)
        return built[1]

    def forget(self, key: Key) -> None:
        """Forget a deleted graph."""
        self._built.forget(key)
