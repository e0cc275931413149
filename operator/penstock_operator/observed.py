"""A graph as one reconcile works on it: the edit that is carried out, and what the watches show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.api import GraphDeployment
from penstock.core.errors import ManifestProblem, one_line
from penstock.kube.objects.served import ServedSpec
from penstock_operator.cluster import GraphSnapshot
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.status_input import Failure
from penstock_operator.pools.grant import EffectiveBudget, PoolGrant
from penstock_operator.queue import Key
from penstock_operator.resources.metadata import BuildContext
from penstock_operator.trim import Object


@dataclass(frozen=True, slots=True)
class ObservedGraph:
    """A graph, as an edit of it that is valid has it, with its observed state.

    Attributes:
        model: The graph as the user wrote it.
        served: That edit.
        effective: The GPUs that are in force: by the edit, and by its GPU pool.
        workers: Its worker pods.
        wants: Replicas by role that its planner would have of the GPU pool; empty: it says nothing, or nothing any more.
        paused: What keeps its children as they are; empty: nothing.
        problems: Of the newest edit, where that is another one.
        grant: What its GPU pool lets it hold; None: it is in none.
    """

    key: Key
    uid: str
    model: GraphDeployment
    raw: Object
    snapshot: GraphSnapshot
    context: BuildContext
    now_s: float
    served: ServedSpec
    effective: EffectiveBudget
    workers: Sequence[PodView]
    wants: Mapping[str, int]
    paused: str = ""
    problems: tuple[ManifestProblem, ...] = ()
    grant: PoolGrant | None = None

    @property
    def invalid(self) -> Failure | None:
        """Why its newest edit is not the one that is carried out; None: it is."""
        if not self.problems:
            return None
        served = f"generation {self.served.generation} is carried out until that is corrected"
        return Failure("InvalidSpec", f"{one_line(self.problems)}; {served}")
