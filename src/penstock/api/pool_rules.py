"""What must hold between a GpuPool and the graphs that draw from it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.api.budget_rules import floor_gpus
from penstock.api.gpu_pool import PoolEntry, PoolObject
from penstock.api.graph import GraphDeployment
from penstock.api.rule import KeyPath
from penstock.core.errors import InvalidSpecError, ManifestProblem

_FLOOR_REMEDY: Final = "raise it, or lower the graph's minReplicas, minGpuBudget or minTotalGpus"
_RESOURCE_REMEDY: Final = "correct it or the node pool's gpuResourceName, or let no entry match the graph"


def _others(resource: str, graph: GraphDeployment) -> str:
    """Return as text what a graph's workers ask for other than a pool's resource; empty: nothing."""
    asked = {name: graph.spec.gpu_resource_of(name) for name in graph.spec.workers}
    return ", ".join(f"{name}'s {each}" for name, each in asked.items() if each not in {None, resource})


def pool_problems(
    pool: PoolObject, graphs: Sequence[GraphDeployment], gpus: int | None = None
) -> Iterator[tuple[KeyPath, str]]:
    """Yield path and message of everything wrong with a pool alongside the graphs that draw from it.

    Args:
        pool: The pool.
        graphs: Those that are known.
        gpus: Of its nodes, where it writes none; None: not known.
    """
    gpus = gpus if pool.spec.gpus is None else pool.spec.gpus
    matched: dict[str, int] = {}
    for index, each in enumerate(pool.spec.graphs):
        place: KeyPath = ("spec", "graphs", index)
        for graph in filter(each.match.fits, graphs):
            name = pool.called(graph)
            first = matched.setdefault(name, index)
            if first != index:
                message = f"graph {name} is matched by graphs[{first}] too; make one of them narrower"
                yield (*place, "match"), message
            elif (floor := floor_gpus(graph.spec)) > each.guaranteed_gpus:
                message = f"{each.guaranteed_gpus} GPUs are fewer than the {floor} that graph {name} never goes below"
                yield (*place, "guaranteedGpus"), f"{message}; {_FLOOR_REMEDY}"
            if first == index and (others := _others(pool.spec.resource, graph)):
                counted = "" if gpus is None else f"{gpus} "
                message = f"{others} of graph {name} count against {counted}{pool.spec.resource}"
                yield ("spec", "resource"), f"{message}; {_RESOURCE_REMEDY}"
    counts = Counter(matched.values())
    parts = [each.guaranteed_gpus for i, each in enumerate(pool.spec.graphs) for _ in range(counts[i])]
    if gpus is not None and sum(parts) > gpus:
        written = " + ".join(map(str, parts))
        message = f"{gpus} GPUs are fewer than guaranteed to the graphs here: {written} = {sum(parts)}"
        remedy = "raise it or lower guaranteedGpus; on a cluster the oldest graphs' guarantees count first"
        yield ("spec", "gpus"), f"{message}; {remedy}"


def as_pool_member(graph: GraphDeployment) -> GraphDeployment:
    """Return a graph as a pool sees it: bounded by its grant, and by its GPU budget only where the manifest writes one."""
    planner = graph.spec.planner
    if planner.own_gpu_budget == planner.max_gpu_budget:
        return graph
    spec = graph.spec.model_copy(update={"planner": planner.model_copy(update={"max_gpu_budget": None})})
    return graph.model_copy(update={"spec": spec})


def pool_entries(pool: PoolObject, graphs: Sequence[GraphDeployment]) -> Mapping[str, PoolEntry]:
    """Return each graph's entry in a pool, by the graph's name.

    Raises:
        InvalidSpecError: a graph is matched by no entry or several, guarantees do not fit the pool, or one is below a
            graph's floor.
    """
    found = {graph.name: each for graph in graphs for each in pool.spec.graphs if each.match.fits(graph)}
    problems = [
        ManifestProblem(".".join(map(str, path)), f"{pool.title}: {message}")
        for path, message in pool_problems(pool, graphs)
    ]
    problems += [
        ManifestProblem("spec.graphs", f"{pool.title}: no entry matches graph {graph.name}; add one for it")
        for graph in graphs
        if graph.name not in found
    ]
    if problems:
        raise InvalidSpecError(problems)
    return found
