"""A graph as one reconcile works on it: the edit that is carried out, and what the watches show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.api import GraphDeployment, as_pool_member
from penstock.core.errors import ManifestProblem
from penstock.kube.objects.served import ServedSpec
from penstock_operator.cluster import GraphSnapshot
from penstock_operator.plan.failures import Failure
from penstock_operator.plan.grant import PoolGrant
from penstock_operator.plan.pods import PodView
from penstock_operator.queue import Key
from penstock_operator.resources.metadata import BuildContext
from penstock_operator.resources.pod import gpu_ceiling
from penstock_operator.trim import Object
from penstock_operator.validity import message_of


@dataclass(frozen=True, slots=True)
class ObservedGraph:
    """A graph, as an edit of it that is valid has it, with its observed state.

    Attributes:
        served: That edit.
        paused: What keeps its children as they are; empty: nothing.
        problems: Of the newest edit, where that is another one.
        grant: What its GPU pool lets it hold; None: it is in none.
    """

    key: Key
    model: GraphDeployment
    raw: Object
    snapshot: GraphSnapshot
    context: BuildContext
    now_s: float
    served: ServedSpec
    paused: str = ""
    problems: tuple[ManifestProblem, ...] = ()
    grant: PoolGrant | None = None

    @property
    def invalid(self) -> Failure | None:
        """Why its newest edit is not the one that is carried out; None: it is."""
        if not self.problems:
            return None
        served = f"generation {self.served.generation} is carried out until that is corrected"
        return Failure("InvalidSpec", f"{message_of(self.problems)}; {served}")

    @property
    def uid(self) -> str:
        """Return the graph's UID."""
        return str(self.raw["metadata"]["uid"])

    @property
    def budget(self) -> int | None:
        """Most GPUs of its workers; None: no ceiling."""
        ceiling = gpu_ceiling(self.model)
        if self.grant is None:
            return ceiling
        return self.grant.gpus if ceiling is None else min(ceiling, self.grant.gpus)

    @property
    def ceiling(self) -> int | None:
        """The same without its pool: what it may want."""
        return gpu_ceiling(self.model)

    @property
    def reclaim_s(self) -> float | None:
        """The longest drain that its pool allows; None: it says nothing, or the graph is in none."""
        return None if self.grant is None else self.grant.reclaim_s

    @property
    def wants(self) -> Mapping[str, int]:
        """Replicas by role that its planner would have of the GPU pool; empty: it says nothing, or nothing any more."""
        if self.grant is not None and self.grant.is_planner_silent:
            return {}
        planner = (self.raw.get("status") or {}).get("planner") or {}
        return planner.get("wants") or {}

    @property
    def labelled(self) -> GraphDeployment:
        """The graph with the labels by which entries of GPU pools match it."""
        labels = self.raw["metadata"].get("labels") or {}
        metadata = self.model.metadata.model_copy(update={"labels": labels})
        return self.model.model_copy(update={"metadata": metadata})

    @property
    def workers(self) -> list[PodView]:
        """Return the graph's worker pods."""
        return self.snapshot.workers()

    @property
    def priorities(self) -> dict[str, int]:
        """``scaling.priority`` by service."""
        services = self.model.spec.workers
        return {name: each.scaling.priority for name, each in services.items() if each.scaling is not None}


def in_pool(graph: ObservedGraph, grant: PoolGrant | None) -> ObservedGraph:
    """Return a graph under what its GPU pool lets it hold; one that writes no budget gets the pool's, and so scheduling gates."""
    if grant is None:
        return graph
    model = as_pool_member(graph.model)
    if gpu_ceiling(model) is None:
        planner = model.spec.planner.model_copy(update={"max_gpu_budget": grant.most})
        spec = model.spec.model_copy(update={"planner": planner})
        model = model.model_copy(update={"spec": spec})
    return replace(graph, model=model, grant=grant)
