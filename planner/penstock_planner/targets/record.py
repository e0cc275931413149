"""A target that only records: for no-operation checks and for planners without a backend to act on."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_graph.models import Role
from penstock_planner.targets.base import Target, TargetState


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `scale`."""

    role: Role
    replicas: int
    decision_id: str


@dataclass
class RecordingTarget:
    """Observes through another target and keeps every request to itself.

    Attributes:
        observed: The target that is looked at.
        requests: What would have been asked of it.
    """

    observed: Target
    requests: list[Request] = field(default_factory=list)

    async def observe(self) -> TargetState:
        """Return what the observed target says."""
        return await self.observed.observe()

    async def scale(self, role: Role, replicas: int, *, decision_id: str) -> None:
        """Keep the request."""
        self.requests.append(Request(role, replicas, decision_id))
