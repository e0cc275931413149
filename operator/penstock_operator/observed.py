"""A graph as one reconcile works on it: the edit that is carried out, and what the watches show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.api import GraphDeployment
from penstock.core.errors import ManifestProblem
from penstock.kube.objects.served import ServedSpec
from penstock_operator.cluster import GraphSnapshot
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.status_input import Failure
from penstock_operator.pools.grant import EffectiveBudget, PoolGrant
from penstock_operator.queue import Key
from penstock_operator.resources.metadata import BuildContext
from penstock_operator.trim import Object
from penstock_operator.validity import message_of


@dataclass(frozen=True, slots=True)
class ObservedGraph:
    """A graph, as an edit of it that is valid has it, with its observed state.

    Attributes:
        model: The graph as the user wrote it.
        served: That edit.
        effective: The GPUs that are in force: by the edit, and by its GPU pool.
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
    effective: EffectiveBudget
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
