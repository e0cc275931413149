"""Input of one reconcile: the specification of a graph that the operator applies, together with the observed state."""

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
    """A graph with a valid specification and its observed state.

    Attributes:
        key: Namespace and name of the graph.
        uid: UID of the graph.
        model: The validated specification to carry out, as the user wrote it; not necessarily the newest one.
        raw: The newest GraphDeployment as the API server returned it, reduced to the fields that the operator needs;
            its specification may be a newer one than ``model``.
        snapshot: The objects created for the graph, and its pods, as the watches show them.
        context: Settings of the operator and of the namespace from which its objects are built.
        now_s: Unix time of this reconcile in seconds, by the API server's clock.
        served: Generation and text of the specification that ``model`` was read from.
        effective: GPU budget in force, from ``model`` and from the graph's GPU pool.
        workers: The graph's worker pods.
        wants: Replicas by role that the graph's planner requests from the GPU pool; empty if the planner requests none
            or its request has expired.
        paused: Reason why the operator does not change the graph's children; empty if it changes them.
        problems: Problems of the newest specification, if ``model`` is an earlier specification; else empty.
        grant: GPUs that the graph's GPU pool grants it; None if the graph is in no pool.
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
        """Failure that says why the newest specification is not applied; None if it is applied."""
        if not self.problems:
            return None
        served = f"generation {self.served.generation} remains applied until this is corrected"
        return Failure("InvalidSpec", f"{one_line(self.problems)}; {served}")
