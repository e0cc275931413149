"""State that a planner reads from its ledger after a restart. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_planner.core.changes import ReplicaChange
from penstock_planner.core.starts import Starts
from penstock_planner.core.tick_schedule import TickSchedule
from penstock_planner.decide.decision import PlannerState


@dataclass(frozen=True, slots=True)
class LedgerHistory:
    """State of the planner when it wrote the newest record of its ledger. Times are simulated seconds of ``timeline``.

    Attributes:
        state: State left by the last decision.
        timeline: Name of the clock on which the times were measured.
        origin_s: Time at which the first run on this timeline started.
        newest_s: Time of the newest record.
        wall_s: Unix time of the newest record; None in a ledger of an older version.
        schedule: Adjustment interval in progress, with its pulls.
        blocked_s: Time since which an adjustment has been in progress; None if there is none.
        starts: Times at which the replicas that are not ready yet were requested, by role.
        pending: Changes that were recorded but not known to be carried out.
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
class LearnedStateInfo:
    """Description of the learned state that an earlier run left in the ledger.

    Attributes:
        until_wall_s: Unix time of the last record of that run; None in a ledger of an older version.
        learnt_from: Identity of the model, engine, profile and time scale from which it was learned; empty if
            unknown.
        seen_s: Simulated seconds of demand from which it was learned.
        is_taken: Whether this run continues with it, because the identity is that of the present run.
        learning_identity: Identity of the present run, in the form of ``learnt_from``; empty if unknown.
    """

    until_wall_s: float | None
    learnt_from: str
    seen_s: float
    is_taken: bool
    learning_identity: str = ""
