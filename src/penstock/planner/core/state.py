"""Everything that the planner's core remembers between two events, in one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.api import Role
from penstock.planner.core.messages import Observed
from penstock.planner.core.records import Change, DecisionKind
from penstock.planner.core.schedule import Schedule
from penstock.planner.core.starts import Starts
from penstock.planner.decide.config import DecideConfig
from penstock.planner.decide.state import Memory, PlannerState


class PlannerPhase(StrEnum):
    """What the planner is doing."""

    OBSERVING = "observing"
    ADJUSTING = "adjusting"
    TARGET_UNAVAILABLE = "target_unavailable"


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What one planner is set to.

    Attributes:
        config: Of the decision.
        adjustment_deadline_s: Longest wait for an adjustment before it is rolled back or ignored; simulated seconds.
        timeline: Names the clock: times of another timeline cannot be compared.
        rolls_back: Take back scale-ups that never become ready.
        memory: Of another graph's planner, to start from where the ledger has none.
    """

    config: DecideConfig
    adjustment_deadline_s: float
    timeline: str
    rolls_back: bool = True
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Actuation:
    """A recorded decision on its way to the backend.

    Attributes:
        decided_s: Time of the decision, simulated seconds.
        changes: Not known to be carried out; the first is asked for now.
        kind: Of the decision; None when a process that died left it.
        is_any_applied: The backend took one of its changes.
    """

    decided_s: float
    changes: tuple[Change, ...]
    kind: DecisionKind | None
    is_any_applied: bool = False


@dataclass(frozen=True, slots=True)
class CoreState:
    """One planner's memory; times in simulated seconds.

    Attributes:
        origin_s: When the planner first started on this timeline.
        schedule: The interval under way with its pulls.
        decided: What the last decision left for the next.
        roll_back_after_s: No scale-up is rolled back before; after one that could not be recorded.
        phase: Of the tick under way, or of the last one.
        starts: Replicas asked for and not ready yet.
        startup_s: How long the newest replica of each role took to become ready; since this process began.
        desired: Replicas desired by the last decision, by role.
        is_overdue: An adjustment that never ended is being ignored.
        observed: The backend at this tick; None while it is unavailable.
        actuation: The decision that is being carried out; None when none is.
        roll_backs: Roles whose scale-up this tick still takes back, and why.
    """

    origin_s: float
    schedule: Schedule
    decided: PlannerState
    roll_back_after_s: float
    phase: PlannerPhase = PlannerPhase.OBSERVING
    starts: Starts = field(default_factory=dict)
    startup_s: Mapping[Role, float] = field(default_factory=dict)
    desired: Mapping[Role, int] = field(default_factory=dict)
    is_overdue: bool = False
    observed: Observed | None = None
    actuation: Actuation | None = None
    roll_backs: tuple[tuple[Role, str], ...] = ()


def begin(settings: CoreSettings, now_s: float) -> CoreState:
    """Return the state of a planner that starts now and knows nothing."""
    return CoreState(now_s, Schedule.of(settings.config, now_s), PlannerState(), roll_back_after_s=now_s)
