"""The kinds GpuPool and ClusterGpuPool: GPUs that graphs share, what each is guaranteed, and who borrows first.

`pool_rules` has the rules that need the graphs, too.
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
    """What each graph that an entry matches may draw."""

    match: PoolMatch = Field(description="The graphs that this entry is for.")
    guaranteed_gpus: PoolGpus = entry(
        0,
        "GPUs that each matched graph gets whenever its planner wants them; graphs that borrowed them give them back.",
    )
    max_gpus: PoolGpus | None = entry(None, "Maximum GPUs that each of them may hold; null: the pool's.")
    priority: PoolPriority = entry(
        PoolPriority.NORMAL,
        "Priority for borrowing GPUs that no guarantee needs; the higher one borrows first.",
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
    """What each graph that an entry matches may draw, of the namespaces that it names."""

    match: ClusterPoolMatch = Field(description="The graphs that this entry is for.")


class PoolReclaim(SpecModel):
    """How GPUs come back."""

    grace_seconds: Annotated[Integer, Field(ge=0, le=86400)] | None = entry(
        None,
        "Maximum drain time of a worker whose GPU the pool takes back, seconds; then it is ended, and its streams continue "
        "elsewhere or are lost. null: its terminationGracePeriodSeconds.",
    )
    order: Annotated[tuple[ReclaimBy, ...], Field(min_length=1, max_length=3)] = entry(
        tuple(ReclaimBy),
        "Order in which graphs give back borrowed GPUs; the first entry that tells two graphs apart decides. priority: the lower "
        "one, within it the largest borrower; idle: the one that has not used its grant yet; newest: the one that was granted "
        "last. Without priority that is the last.",
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
        "Time for which a graph that gained GPUs loses none except to guarantees, and one that lost some gains none above its own; "
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
        OPERATOR_CLASS, "Class of the operator that allocates this pool, and of its graphs; immutable."
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

    spec: GpuPoolSpec = Field(description="The pool's GPUs, and the graphs that may use them.")
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
    spec: ClusterGpuPoolSpec = Field(description="The pool's GPUs, and the graphs that may use them.")

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
