"""A graph as one reconcile works on it: the edit that is carried out, and what the watches show."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api import GraphDeployment
from penstock.core.errors import Problem
from penstock.kube.objects.served import ServedSpec
from penstock_operator.cluster import GraphSnapshot
from penstock_operator.plan.facts import Failure
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
    """

    key: Key
    model: GraphDeployment
    raw: Object
    snapshot: GraphSnapshot
    context: BuildContext
    now_s: float
    served: ServedSpec
    paused: str = ""
    problems: tuple[Problem, ...] = ()

    @property
    def invalid(self) -> Failure | None:
        """Why its newest edit is not the one that is carried out; None: it is."""
        if not self.problems:
            return None
        served = f"generation {self.served.generation} is carried out until that is corrected"
        return Failure("InvalidSpec", f"{message_of(self.problems)}; {served}")

    @property
    def uid(self) -> str:
        """Its UID."""
        return str(self.raw["metadata"]["uid"])

    @property
    def budget(self) -> int | None:
        """Most GPUs of its workers; None: no ceiling."""
        return gpu_ceiling(self.model)

    @property
    def workers(self) -> list[PodView]:
        """Its worker pods."""
        return self.snapshot.workers()

    @property
    def priorities(self) -> dict[str, int]:
        """``scaling.priority`` by service."""
        services = self.model.spec.workers
        return {name: each.scaling.priority for name, each in services.items() if each.scaling is not None}
