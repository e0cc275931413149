"""The kinds GpuPool and ClusterGpuPool: GPUs that graphs share, the guarantee of each graph, and which graph borrows first.

`pool_rules` has the rules that also need the graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.api.base import WHOLE, Integer, OperatorClass, SpecModel, entry
from penstock.api.enums import PoolPriority, ReclaimBy
from penstock.api.graph import GraphDeployment, KubernetesObject
from penstock.api.pool_match import ClusterPoolMatch, PoolMatch
from penstock.api.pool_status import GpuPoolStatus
from penstock.api.rule import Breach, Rule, immutable
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.kube.objects.names import OPERATOR_CLASS

PoolGpus = Annotated[int, Field(strict=True, ge=0, le=100_000)]


class PoolEntry(SpecModel):
    """Guarantee, limit and priority of each graph that the entry matches."""

    match: PoolMatch = Field(description="Selects the graphs to which this entry applies.")
    guaranteed_gpus: PoolGpus = entry(
        0,
        "GPUs that each matched graph gets whenever its planner requests them; graphs that borrowed them return them.",
    )
    max_gpus: PoolGpus | None = entry(
        None, "Maximum GPUs that each matched graph can hold; null: all GPUs of the pool."
    )
    priority: PoolPriority = entry(
        PoolPriority.NORMAL,
        "Priority for borrowing GPUs that no guarantee needs; the graph with the higher priority borrows first.",
    )

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

    def max_gpus_of(self, pool_gpus: int, graph: GraphDeployment) -> int:
        """Return the maximum GPUs of a graph: the smallest of the pool, the limit of its entry, and its own budget if it has one."""
        bounds = (pool_gpus, self.max_gpus, graph.spec.planner.own_gpu_budget)
        return min(each for each in bounds if each is not None)


class ClusterPoolEntry(PoolEntry):
    """Guarantee, limit and priority of each graph that the entry matches, in the namespaces that it names."""

    match: ClusterPoolMatch = Field(description="Selects the graphs to which this entry applies.")


class PoolReclaim(SpecModel):
    """How graphs return borrowed GPUs."""

    grace_seconds: Annotated[Integer, Field(ge=0, le=86400)] | None = entry(
        None,
        "Maximum drain time, in seconds, of a worker whose GPU the pool reclaims; the worker is then terminated, and its streams are "
        "resumed on another worker or lost. null: the worker's terminationGracePeriodSeconds.",
    )
    order: Annotated[tuple[ReclaimBy, ...], Field(min_length=1, max_length=3)] = entry(
        tuple(ReclaimBy),
        "Criteria for which graph returns borrowed GPUs first; the first criterion in which two graphs differ decides. priority: the "
        "graph with the lower priority, and among equal ones the largest borrower; idle: the graph that has not used its grant yet; "
        "newest: the graph whose grant was raised last. If priority is not listed, it is added as the last criterion.",
    )

    rules = (
        Rule(
            path="order",
            must="reclaim.order names each only once",
            cel="!has(self.order) || self.order.all(x, self.order.exists_one(y, y == x))",
            holds=lambda reclaim: len(set(reclaim.order)) == len(reclaim.order),
            text="one occurs twice",
            remedy="remove the second",
        ),
    )


def _above_pool(spec: Any) -> Iterator[Breach]:
    parts = [each.guaranteed_gpus for each in spec.graphs]
    if spec.gpus is not None and sum(parts) > spec.gpus:
        yield Breach((spec.gpus, " + ".join(map(str, parts)), sum(parts)))


class GpuPoolSpec(SpecModel):
    """Size of a pool, and the graphs that share it."""

    gpus: Annotated[Integer, Field(ge=1, le=100_000)] | None = entry(
        None,
        "Maximum GPUs that the graphs hold together, including those of draining workers; null: the GPUs of the nodes that "
        "nodeSelector selects, which works on Kubernetes only.",
    )
    graphs: Annotated[tuple[PoolEntry, ...], Field(max_length=64)] = Field(
        description="Graphs that share the pool, at most 64 entries; the first entry that matches a graph applies."
    )
    hold_seconds: Annotated[Integer, Field(ge=0, le=86400), WHOLE] = entry(
        60,
        "Seconds for which a graph that gained GPUs loses none except to guarantees, and a graph that lost GPUs gains none above its "
        "guarantee; set it to about the start-up time of a replica.",
    )
    reclaim: PoolReclaim = entry(PoolReclaim(), "How graphs return borrowed GPUs.")
    node_selector: dict[str, str] = entry(
        {},
        "On Kubernetes: labels of the nodes whose GPUs the pool counts, at most `gpus`. GPUs of NotReady and cordoned nodes, and GPUs "
        "that other pods hold there, are not counted. Needs the chart's rbac.nodes; only a cluster-wide operator sees pods of other namespaces.",
    )
    resource: Annotated[
        str, Field(min_length=3, max_length=253, pattern=r"^[a-z0-9.-]+(/[A-Za-z0-9_.-]+)?$")
    ] = entry(
        "nvidia.com/gpu",
        "Extended resource that is counted on those nodes; DRA device classes are not supported.",
    )
    operator_class: OperatorClass = entry(
        OPERATOR_CLASS, "Class of the operator that allocates this pool, and of the pool's graphs; immutable."
    )

    rules = (
        immutable("operatorClass", "operator class", kind="pool"),
        Rule(
            path="resource",
            must="resource is an extended resource",
            cel="self.resource.contains('/')",
            holds=lambda spec: "/" in spec.resource,
            text="%s is not an extended resource, as its name has no slash; devices of a DRA class are not counted on nodes",
            values=("self.resource",),
            remedy="name one, or leave resource and nodeSelector out and write gpus, against which claims count by gpusPerReplica",
        ),
        Rule(
            path="gpus",
            must="a pool has gpus or a nodeSelector",
            cel="has(self.gpus) || (has(self.nodeSelector) && self.nodeSelector.size() > 0)",
            holds=lambda spec: spec.gpus is not None or bool(spec.node_selector),
            text="neither gpus nor nodeSelector",
            remedy="set gpus to the number of GPUs, or nodeSelector to the nodes to count",
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
    """Size of a pool for several namespaces, and the graphs that share it."""

    graphs: Annotated[tuple[ClusterPoolEntry, ...], Field(max_length=64)] = Field(
        description="Graphs that share the pool, at most 64 entries; the first entry that matches a graph applies."
    )


class PoolObject(KubernetesObject):
    """Common part of GpuPool and ClusterGpuPool."""

    spec: GpuPoolSpec = Field(description="The pool's GPUs, and the graphs that may use them.")
    status: GpuPoolStatus | None = entry(None, "Written by the operator.")

    @property
    def title(self) -> str:
        """Kind and name as messages show them, such as ``GpuPool team-a``."""
        return f"{self.kind} {self.name}"

    @property
    def written_gpus(self) -> int:
        """Value of ``spec.gpus``, which applies wherever there are no nodes to count.

        Raises:
            InvalidSpecError: ``spec.gpus`` is not set.
        """
        if self.spec.gpus is None:
            message = (
                f"{self.title}: missing, and only a cluster has nodes to count; set it to the number of GPUs"
            )
            raise InvalidSpecError([ManifestProblem("spec.gpus", message)])
        return self.spec.gpus

    def called(self, graph: GraphDeployment) -> str:
        """Return the name under which the pool's status lists a graph."""
        return self.member(graph.metadata.namespace, graph.name)

    @staticmethod
    def member(namespace: str | None, name: str) -> str:  # noqa: ARG004 - for subclasses
        """Return the name under which the pool's status lists the graph with this namespace and name."""
        return name


class GpuPool(PoolObject):
    """GPUs that the graphs of a namespace share, with guarantees and borrowing; short name gpool."""

    kind: Literal["GpuPool"] = entry("GpuPool", "Kind.")


class ClusterGpuPool(PoolObject):
    """GPUs that graphs of several namespaces share, as in a GpuPool; cluster-scoped; short name cgpool."""

    kind: Literal["ClusterGpuPool"] = entry("ClusterGpuPool", "Kind.")
    spec: ClusterGpuPoolSpec = Field(description="The pool's GPUs, and the graphs that may use them.")

    def within(self, namespaces: Mapping[str, Mapping[str, str]]) -> ClusterGpuPool:
        """Return the pool with namespace labels replaced by the names of the matching namespaces; ``namespaces`` are labels by name."""
        entries = [
            each.model_copy(update={"match": each.match.within(namespaces)}) for each in self.spec.graphs
        ]
        return self.model_copy(update={"spec": self.spec.model_copy(update={"graphs": tuple(entries)})})

    @staticmethod
    def member(namespace: str | None, name: str) -> str:
        """Return the name under which the pool's status lists the graph with this namespace and name."""
        return name if namespace is None else f"{namespace}/{name}"
