"""What a planner resumes from. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_planner.core.changes import ReplicaChange
from penstock_planner.core.starts import Starts
from penstock_planner.core.tick_schedule import TickSchedule
from penstock_planner.decide.decision import PlannerState


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """Where the planner stood.

    Attributes:
        origin_s: Simulated seconds when the first run of this timeline began.
        newest_s: Time of the newest record.
        wall_s: The same in real seconds since 1970; None in a ledger of an older version.
        blocked_s: Since when an adjustment has been under way; None when none is.
        starts: Replicas asked for and not ready yet.
        pending: Changes recorded but not known to be carried out.
    """

    state: PlannerState
    timeline: str
    origin_s: float
    newest_s: float
    wall_s: float | None
    schedule: TickSchedule
    blocked_s: float | None
    starts: Starts
    pending: tuple[ReplicaChange, ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a former run left in the ledger.

    Attributes:
        until_wall_s: When it was last written, real seconds since 1970; None in a ledger of an older version.
        learnt_from: Model, engine, profile and time scale; empty: unknown.
        seen_s: Simulated seconds of demand that it has seen.
        is_taken: It is of what runs now, and the planner continues it.
        learns_from: What runs now, as ``learnt_from``; empty: unknown.
    """

    until_wall_s: float | None
    learnt_from: str
    seen_s: float
    is_taken: bool
    learns_from: str = ""
