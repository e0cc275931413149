"""The kinds GpuPool and ClusterGpuPool: GPUs that graphs share, what each is guaranteed, and who borrows first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from penstock.api.base import WHOLE, Integer, OperatorClass, SpecModel, entry
from penstock.api.budget_rules import floor_gpus
from penstock.api.enums import PoolPriority, ReclaimBy
from penstock.api.graph import GraphDeployment, KubernetesObject
from penstock.api.pool_match import ClusterPoolMatch, PoolMatch
from penstock.api.pool_status import GpuPoolStatus
from penstock.api.rule import Breach, KeyPath, Rule, immutable
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.kube.objects.names import OPERATOR_CLASS

PoolGpus = Annotated[int, Field(strict=True, ge=0, le=100_000)]


class PoolEntry(SpecModel):
    """What each graph that an entry matches may draw."""

    match: PoolMatch = Field(description="The graphs that this entry is for.")
    guaranteed_gpus: PoolGpus = entry(
        0, "GPUs that each of them gets whenever its planner wants them, at the cost of those who borrow."
    )
    max_gpus: PoolGpus | None = entry(None, "Most GPUs that each of them holds; null: the pool's.")
    priority: PoolPriority = entry(PoolPriority.NORMAL, "Who borrows first what nobody is guaranteed.")

    rules = (
        Rule(
            path="guaranteedGpus",
            must="guaranteedGpus is at most maxGpus",
            cel=None,
            holds=lambda each: each.max_gpus is None or each.guaranteed_gpus <= each.max_gpus,
            text="%d exceeds maxGpus %d",
            values=("self.guaranteedGpus", "self.maxGpus"),
            remedy="lower it or raise maxGpus",
        ),
    )

    def most(self, pool_gpus: int, graph: GraphDeployment) -> int:
        """Return the most GPUs of a graph: of the pool, of its entry, and of its own budget if it writes one."""
        bounds = (pool_gpus, self.max_gpus, graph.spec.planner.own_gpu_budget)
        return min(each for each in bounds if each is not None)


class ClusterPoolEntry(PoolEntry):
    """What each graph that an entry matches may draw, of the namespaces that it names."""

    match: ClusterPoolMatch = Field(description="The graphs that this entry is for.")


class PoolReclaim(SpecModel):
    """How GPUs come back."""

    grace_seconds: Annotated[Integer, Field(ge=0, le=86400)] | None = entry(
        None,
        "Longest drain of a worker whose GPU the pool takes back, seconds; then it ends, and its streams go on "
        "elsewhere or are lost. null: its terminationGracePeriodSeconds.",
    )
    order: Annotated[tuple[ReclaimBy, ...], Field(min_length=1, max_length=3)] = entry(
        tuple(ReclaimBy),
        "Who gives back first what it borrows, the first that tells two graphs apart. priority: the lower one, within one who "
        "borrows most; idle: who has not used its grant yet; newest: who was granted last. Without priority that is the last.",
    )

    rules = (
        Rule(
            path="order",
            must="reclaim.order names each only once",
            cel="!has(self.order) || self.order.all(x, self.order.exists_one(y, y == x))",
            holds=lambda reclaim: len(set(reclaim.order)) == len(reclaim.order),
            text="one stands there twice",
            remedy="remove the second",
        ),
    )


def _above_pool(spec: Any) -> Iterator[Breach]:
    parts = [each.guaranteed_gpus for each in spec.graphs]
    if spec.gpus is not None and sum(parts) > spec.gpus:
        yield Breach((spec.gpus, " + ".join(map(str, parts)), sum(parts)))


class GpuPoolSpec(SpecModel):
    """The pool."""

    gpus: Annotated[Integer, Field(ge=1, le=100_000)] | None = entry(
        None,
        "GPUs that the graphs hold together at most, those of draining workers included; null: those of the nodes of nodeSelector, "
        "as on Kubernetes alone.",
    )
    graphs: Annotated[tuple[PoolEntry, ...], Field(max_length=64)] = Field(
        description="Who may draw, at most 64 entries; a graph is matched by one at most."
    )
    hold_seconds: Annotated[Integer, Field(ge=0, le=86400), WHOLE] = entry(
        60,
        "For so long a graph that gained GPUs loses none but to guarantees, and one that lost some gains none above its own; "
        "about the start-up of a replica; seconds.",
    )
    reclaim: PoolReclaim = entry(PoolReclaim(), "How GPUs that were lent come back.")
    node_selector: dict[str, str] = entry(
        {},
        "On Kubernetes: the GPUs that nodes with these labels offer count, NotReady and cordoned nodes and what other pods there hold "
        "left out, and no more than gpus. Needs the chart's rbac.nodes; foreign pods are seen by an operator of the complete cluster.",
    )
    resource: Annotated[
        str, Field(min_length=3, max_length=253, pattern=r"^[a-z0-9.-]+(/[A-Za-z0-9_.-]+)?$")
    ] = entry("nvidia.com/gpu", "Extended resource that is counted on those nodes; no DRA device class.")
    operator_class: OperatorClass = entry(
        OPERATOR_CLASS, "Class of the operator that shares it out, and of its graphs; immutable."
    )

    rules = (
        immutable("operatorClass", "operator class", kind="pool"),
        Rule(
            path="resource",
            must="resource is an extended resource",
            cel="self.resource.contains('/')",
            holds=lambda spec: "/" in spec.resource,
            text="%s is no extended resource, as its name has no slash; devices of a DRA class are not counted on nodes",
            values=("self.resource",),
            remedy="name one, or leave resource and nodeSelector out and write gpus, against which claims count by gpusPerReplica",
        ),
        Rule(
            path="gpus",
            must="a pool has gpus or a nodeSelector",
            cel="has(self.gpus) || (has(self.nodeSelector) && self.nodeSelector.size() > 0)",
            holds=lambda spec: spec.gpus is not None or bool(spec.node_selector),
            text="neither gpus nor nodeSelector",
            remedy="write how many GPUs there are, or which nodes to count",
        ),
        Rule(
            path="gpus",
            must="the guarantees of a pool's entries fit its GPUs",
            cel=None,
            find=_above_pool,
            text="%d GPUs are fewer than guaranteed: %s = %d",
            remedy="raise it or lower guaranteedGpus",
        ),
    )


class ClusterGpuPoolSpec(GpuPoolSpec):
    """The pool of several namespaces."""

    graphs: Annotated[tuple[ClusterPoolEntry, ...], Field(max_length=64)] = Field(
        description="Who may draw, at most 64 entries; a graph is matched by one at most."
    )


class PoolObject(KubernetesObject):
    """What both kinds of pool have."""

    spec: GpuPoolSpec = Field(description="The GPUs and who may draw them.")
    status: GpuPoolStatus | None = entry(None, "Written by the operator.")

    @property
    def title(self) -> str:
        """Kind and name, as sentences have them."""
        return f"{self.kind} {self.name}"

    @property
    def written_gpus(self) -> int:
        """The GPUs that are written, which count where there are no nodes to count.

        Raises:
            InvalidSpecError: none are written.
        """
        if self.spec.gpus is None:
            message = f"{self.title}: not written, and only a cluster has nodes to count; write how many GPUs there are"
            raise InvalidSpecError([ManifestProblem("spec.gpus", message)])
        return self.spec.gpus

    def called(self, graph: GraphDeployment) -> str:
        """Return a graph's name among the pool's."""
        return self.member(graph.metadata.namespace, graph.name)

    @staticmethod
    def member(namespace: str | None, name: str) -> str:  # noqa: ARG004 - for subclasses
        """Return the name, among the pool's graphs, of one of this namespace and name."""
        return name


class GpuPool(PoolObject):
    """GPUs that the graphs of a namespace share, with guarantees and borrowing; short name gpool."""

    kind: Literal["GpuPool"] = entry("GpuPool", "Kind.")


class ClusterGpuPool(PoolObject):
    """GPUs that graphs of several namespaces share, as in a GpuPool; of no namespace; short name cgpool."""

    kind: Literal["ClusterGpuPool"] = entry("ClusterGpuPool", "Kind.")
    spec: ClusterGpuPoolSpec = Field(description="The GPUs and who may draw them.")

    def within(self, namespaces: Mapping[str, Mapping[str, str]]) -> ClusterGpuPool:
        """Return the same with labels of namespaces resolved to their names; ``namespaces``: labels by name."""
        entries = [
            each.model_copy(update={"match": each.match.within(namespaces)}) for each in self.spec.graphs
        ]
        return self.model_copy(update={"spec": self.spec.model_copy(update={"graphs": tuple(entries)})})

    @staticmethod
    def member(namespace: str | None, name: str) -> str:
        """Return the name, among the pool's graphs, of one of this namespace and name."""
        return name if namespace is None else f"{namespace}/{name}"


_FLOOR_REMEDY: Final = "raise it, or lower the graph's minReplicas, minGpuBudget or minTotalGpus"


_RESOURCE_REMEDY: Final = "correct it or the node pool's gpuResourceName, or let no entry match the graph"


def _others(resource: str, graph: GraphDeployment) -> str:
    """Return in words what a graph's workers ask for other than a pool's resource; empty: nothing."""
    asked = {name: graph.spec.gpu_resource_of(name) for name in graph.spec.workers}
    return ", ".join(f"{name}'s {each}" for name, each in asked.items() if each not in {None, resource})


def pool_problems(
    pool: PoolObject, graphs: Sequence[GraphDeployment], gpus: int | None = None
) -> Iterator[tuple[KeyPath, str]]:
    """Yield path and message of everything wrong with a pool beside the graphs that draw from it.

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


def drawing(graph: GraphDeployment) -> GraphDeployment:
    """Return a graph as it counts inside a pool: a budget that it does not write is no bound there, for the grant is one."""
    planner = graph.spec.planner
    if planner.own_gpu_budget == planner.max_gpu_budget:
        return graph
    spec = graph.spec.model_copy(update={"planner": planner.model_copy(update={"max_gpu_budget": None})})
    return graph.model_copy(update={"spec": spec})


def entries_of(pool: PoolObject, graphs: Sequence[GraphDeployment]) -> Mapping[str, PoolEntry]:
    """Return each graph's entry in a pool, by the graph's name.

    Raises:
        InvalidSpecError: a graph is matched by no entry or several, guarantees do not fit the pool, or one lies below a
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
